"""What is said to the ledger, and what a producer is told: it is given address and token, no more.

Requests are pydantic models that take nothing for anything else: no number for a string, no NaN, nothing out of range.
"""

from __future__ import annotations

import importlib.metadata
import math
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Base64Bytes, BaseModel, ConfigDict, Field, model_validator

from .. import __version__
from ..errors import UserError
from ..plugins import load_plugins
from ..stores.config import StoreConfig
from .wants import unpack_ids

MAX_WAIT_SECONDS = 2.0  # of a long poll; whoever waits for something asks again
MAX_TEXT = 10_000  # characters of a reason

Name = Annotated[str, Field(min_length=1, max_length=1000)]
Text = Annotated[str, Field(max_length=MAX_TEXT)]
Count = Annotated[int, Field(ge=0, lt=2**63)]
Length = Annotated[int, Field(ge=1, lt=2**31)]
Seconds = Annotated[float, Field(ge=0)]


class Message(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False)


class WantedPack(Message):
    """See `wants.Want`."""

    session: Name
    index: Count
    pack: Name
    features: Name
    bytes: Annotated[int, Field(ge=1, lt=2**63)]
    input_ids: Base64Bytes
    lengths: list[Length]

    @model_validator(mode="after")
    def _are_token_ids(self) -> WantedPack:
        if 4 * sum(self.lengths) != len(self.input_ids):
            raise ValueError(f"input_ids are {len(self.input_ids)} bytes, but lengths add up to {sum(self.lengths)}")
        if unpack_ids(self.input_ids).min(initial=0) < 0:
            raise ValueError("input_ids: a negative token id")
        return self


class WantRequest(Message):
    wants: list[WantedPack]

    @model_validator(mode="after")
    def _one_session(self) -> WantRequest:
        if len({want.session for want in self.wants}) > 1:
            raise ValueError("wants of several sessions")
        return self


class LocateRequest(Message):
    want: Name
    wait: Seconds = 0.0


class LostRequest(Message):
    want: Name
    lease: Name
    reason: Text
    removed: bool = False


class ConsumedRequest(Message):
    want: Name
    lease: Text
    removed: bool = True


class About(Message):
    """What a producer says of itself. capacity [bytes]: what it lends to the store; 0: the store has no bound.

    Seconds since it started: computing, putting into the store, waiting for a lease.
    """

    host: Text = ""
    pid: Count = 0
    capacity: Count = 0
    compute_seconds: Seconds = 0.0
    put_seconds: Seconds = 0.0
    idle_seconds: Seconds = 0.0


class LeaseRequest(Message):
    producer: Name
    features: Name
    wait: Seconds = 0.0
    about: About = About()


class StoredRequest(Message):
    producer: Name
    want: Name
    lease: Name
    size: Count
    checksum: Name


class FailedRequest(Message):
    producer: Name
    want: Name
    lease: Name
    reason: Text


class ReconcileRequest(Message):
    producer: Name
    keys: list[Name]


class FinishRequest(Message):
    pass


class Row(Message):
    """One line of metrics.jsonl; a value that is not finite travels as null."""

    step: Count
    loss: float | None = None
    expected_length: float | None = None
    wait_seconds: float | None = None
    seconds: float | None = None
    tokens: float | None = None


class Report(Message):
    """How a trainer rank stands. rows: rank 0 only, in order of their steps."""

    rank: Annotated[int, Field(ge=0, lt=2**20)]
    world_size: Annotated[int, Field(ge=1, le=2**20)]
    host: Text
    pid: Count
    session: Name
    step: Count
    total_steps: Count
    wait_fraction: float | None = None
    rows: Annotated[list[Row], Field(max_length=1000)] = []


def finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: None for these, wherever they are in dicts and lists."""
    if isinstance(value, dict):
        return {name: finite(part) for name, part in value.items()}
    if isinstance(value, list):
        return [finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def versions() -> dict[str, str]:
    """What features depend on besides the target's weights. Builds of one version (+cpu, +cu126) are not told apart."""
    found = {name: importlib.metadata.version(name).partition("+")[0] for name in ("torch", "transformers")}
    return {"draftsmith": __version__, **found}


def producer_config(
    target: Any, store: StoreConfig, spec: Any, *, threads: int, lease_seconds: float, plugins: Sequence[str] = ()
) -> dict[str, Any]:
    """The JSON of `GET /config`. target: TargetConfig. spec: FeatureSpec. threads: of a producer; 0: torch's choice."""
    return {
        "plugins": list(plugins),
        "target": asdict(target),
        "store": asdict(store),
        "spec": {**asdict(spec), "taps": list(spec.taps)},
        "threads": threads,
        "lease_seconds": lease_seconds,
        "versions": versions(),
    }


@dataclass(frozen=True)
class ProducerConfig:
    """`producer_config` read back, with the parts still as keyword arguments of their classes."""

    target: dict[str, Any]
    store: StoreConfig
    spec: dict[str, Any]
    threads: int
    lease_seconds: float

    @classmethod
    def from_json(cls, message: dict[str, Any]) -> ProducerConfig:
        """Raises UserError when the message was made by other versions than those installed here."""
        _check_versions(message.get("versions"))
        try:
            load_plugins(message["plugins"])
            spec = {**message["spec"], "taps": tuple(message["spec"]["taps"])}
            store = StoreConfig(**message["store"])
            return cls(message["target"], store, spec, message["threads"], message["lease_seconds"])
        except (KeyError, TypeError) as error:
            raise UserError(
                f"the ledger's configuration is not understood: {error}",
                fix="run the same version of draftsmith on the ledger and on the producers",
            ) from error


def _check_versions(wanted: Any) -> None:
    if not isinstance(wanted, dict):
        raise UserError(
            "the ledger does not say which versions it works with",
            fix=f"run draftsmith {__version__} on the ledger's machine too",
        )
    here = versions()
    different = [name for name in here if here[name] != wanted.get(name)]
    if different:
        raise UserError(
            "this producer could compute other features than the trainer expects: "
            + ", ".join(f"{name} is {here[name]} here and {wanted.get(name)} there" for name in different),
            where=f"here: {socket.gethostname()}; there: where the ledger was configured",
            fix=f"install {' '.join(f'{name}=={wanted.get(name)}' for name in different)} here",
        )


def read_token(token_file: str) -> str:
    """The bearer token in a file. Raises UserError when there is none."""
    if not token_file:
        raise UserError("no file with the ledger's token is given", fix="set source.token_file=<run_dir>/ledger.token")
    try:
        token = Path(token_file).read_text().strip()
    except OSError as error:
        raise UserError(f"the ledger's token cannot be read: {error.strerror}", where=token_file) from error
    if not token:
        raise UserError("the file with the ledger's token is empty", where=token_file)
    return token
