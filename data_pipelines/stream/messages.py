"""What a producer needs to know, as the ledger hands it out: a producer is given address and token, no more."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..stores.config import StoreConfig

MAX_WAIT_SECONDS = 2.0  # of a long poll; whoever waits for something asks again


def producer_config(
    target: Any, store: StoreConfig, spec: Any, *, threads: int, lease_seconds: float
) -> dict[str, Any]:
    """The JSON of `GET /config`. target: TargetConfig. spec: FeatureSpec. threads: of a producer; 0: torch's choice."""
    return {
        "target": asdict(target),
        "store": asdict(store),
        "spec": {**asdict(spec), "taps": list(spec.taps)},
        "threads": threads,
        "lease_seconds": lease_seconds,
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
        try:
            spec = {**message["spec"], "taps": tuple(message["spec"]["taps"])}
            store = StoreConfig(**message["store"])
            return cls(message["target"], store, spec, message["threads"], message["lease_seconds"])
        except (KeyError, TypeError) as error:
            raise UserError(
                f"the ledger's configuration is not understood: {error}",
                fix="run the same version of draftsmith on the ledger and on the producers",
            ) from error


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
