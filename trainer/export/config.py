"""How a trained drafter leaves."""

from __future__ import annotations

from dataclasses import dataclass

from data_pipelines.errors import check_choice


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
        check_choice("export.dtype", self.dtype, ("bfloat16", "float16", "float32"))
