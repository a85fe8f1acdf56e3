"""What is trained on, and how it is cut."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..errors import UserError


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
    batch_size: int = 32

    def __post_init__(self) -> None:
        if self.mode not in ("never", "always", "sample"):
            raise UserError(f"data.regenerate.mode={self.mode} is not one of never, always, sample")


@dataclass
class DataConfig:
    """path: `builtin:prompts` (generated prompts), `builtin:demo` (prompts with SmolLM2's answers), a `.jsonl` file of
    rows with `messages`, or `hf:<id>[:split]` (a dataset with a `messages` column)."""

    path: str = ""
    max_rows: int = 0  # 0: all (for builtin:prompts a number must be given)
    pack_tokens: int = 2048
    max_document_tokens: int = 2048
    long_documents: str = "clip"  # clip: keep the first max_document_tokens; quarantine: leave the document out
    max_quarantined_fraction: float = 0.5
    regenerate: RegenerateConfig = field(default_factory=RegenerateConfig)

    def __post_init__(self) -> None:
        if not self.path:
            raise UserError(
                "no value for data.path: there is nothing to train on",
                fix="data.path=<conversations>.jsonl, data.path=hf:<dataset id>, or data=prompts for generated prompts",
            )
        if self.long_documents not in ("clip", "quarantine"):
            raise UserError(f"data.long_documents={self.long_documents} is not one of clip, quarantine")
        if self.max_document_tokens > self.pack_tokens:
            raise UserError(
                f"data.max_document_tokens={self.max_document_tokens} is more than data.pack_tokens={self.pack_tokens}",
                fix="a document must fit into one pack",
            )
