"""How a trained drafter leaves."""

from __future__ import annotations

from dataclasses import dataclass

from data_pipelines.errors import UserError


@dataclass
class ExportConfig:
    """The standard speculator format: config.json and model.safetensors.

    dtype: of the stored weights. verifier: the name of the target that goes into config.json; empty: the hub id or path
    that the target came from.
    """

    name: str = "speculators"
    dtype: str = "bfloat16"
    verifier: str = ""

    def __post_init__(self) -> None:
        if self.dtype not in ("bfloat16", "float16", "float32"):
            raise UserError(f"export.dtype={self.dtype} is not one of bfloat16, float16, float32")
