"""What is trained on, and how it is cut."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..errors import UserError, check_choice
from .shapes import check_format


@dataclass
class RegenerateConfig:
    """Whether the target answers the prompts itself before training.

    never: the rows' own answers are trained on. always: every assistant turn is replaced by the target's own.
    sample: the rows' answers are trained on, and `sample` of them are generated again to show that they are the
    target's.
    """

    mode: str = "never"
    sample: int = 8
    max_new_tokens: int = 128
    batch_size: int = 32  # of the target in this process
    server: str = (
        ""  # http://host:port/v1 of an OpenAI-compatible server of the target; empty: the target in this process
    )
    model: str = ""  # what the server calls the target; empty: the only model that it has
    api_key_file: str = ""
    api_key_variable: str = ""  # the name of an environment variable that holds the key
    concurrency: int = 64  # requests in flight
    timeout_seconds: float = 600.0  # of one answer
    max_attempts: int = 5  # of one request that fails while others are answered
    patience_seconds: float = 300.0  # with no answer to anything, before the run stops
    check_prompts: bool = True  # that the server's prompts are those of the target's chat template
    # How the server samples; null: as the target's own generation config says. temperature 0 is greedy.
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    def __post_init__(self) -> None:
        check_choice("data.regenerate.mode", self.mode, ("never", "always", "sample"))
        if self.server and not self.server.startswith(("http://", "https://")):
            raise UserError(f"data.regenerate.server={self.server} is not an address", fix="http://host:port/v1")
        if self.concurrency < 1 or self.max_attempts < 1:
            raise UserError("data.regenerate.concurrency and max_attempts must be at least 1")
        if self.api_key_file and self.api_key_variable:
            raise UserError("data.regenerate.api_key_file and api_key_variable are both given", fix="give one")


@dataclass
class DataConfig:
    """path: `builtin:prompts` (generated prompts), `builtin:demo` (prompts with SmolLM2's answers), a file of rows or a
    folder of such files (JSON, JSON lines, Parquet, Arrow), or `hf:<id>[:config][:split]`. What a row may hold is in
    `shapes`.

    Of long documents, clip keeps the first max_document_tokens tokens, split makes several documents of one (the later
    ones without what came before), quarantine leaves the row out.
    """

    path: str = ""
    format: str = "auto"  # auto: by each row's keys; or the one shape of all rows
    pair: str = ""  # <key of the prompt>/<key of the answer>, for rows in which they have names of their own
    streaming: bool = False  # of hf: fetch rows as they are read, twice, rather than the whole data set before
    max_rows: int = 0  # 0: all (for builtin:prompts a number must be given)
    pack_tokens: int = 2048
    max_document_tokens: int = 2048
    too_long: str = "clip"  # clip, split or quarantine
    max_quarantined_fraction: float = 0.5
    workers: int = 0  # processes that render; 0: one for each CPU, and no other process for a few thousand rows
    train_on: str = "all"  # all: every turn of the roles; last: the last one only
    roles: list[str] = field(default_factory=lambda: ["assistant"])  # whose turns are trained on
    reasoning: str = "train"  # train; context: shown to the target and not trained on; drop: taken out of the rows
    regenerate: RegenerateConfig = field(default_factory=RegenerateConfig)

    def __post_init__(self) -> None:
        if not self.path:
            raise UserError(
                "no value for data.path: there is nothing to train on",
                fix="data.path=<conversations>.jsonl, data.path=hf:<dataset id>, or data=prompts for generated prompts",
            )
        check_format(self.format, self.pair)
        check_choice("data.too_long", self.too_long, ("clip", "split", "quarantine"))
        if not 0 <= self.max_quarantined_fraction <= 1:
            raise UserError(f"data.max_quarantined_fraction={self.max_quarantined_fraction} is not from 0 to 1")
        for key in ("workers", "max_rows"):
            if getattr(self, key) < 0:
                raise UserError(f"data.{key}={getattr(self, key)} is less than 0")
        if self.max_document_tokens < 2:
            raise UserError(f"data.max_document_tokens={self.max_document_tokens}: a document has 2 tokens at least")
        check_choice("data.train_on", self.train_on, ("all", "last"))
        check_choice("data.reasoning", self.reasoning, ("train", "context", "drop"))
        roles = ("assistant", "user", "system", "developer", "tool")
        if not self.roles or not set(self.roles) <= set(roles):
            raise UserError(f"data.roles={list(self.roles)} is not a choice of {', '.join(roles)}")
        if self.max_document_tokens > self.pack_tokens:
            raise UserError(
                f"data.max_document_tokens={self.max_document_tokens} is more than data.pack_tokens={self.pack_tokens}",
                fix="a document must fit into one pack",
            )
