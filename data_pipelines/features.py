"""The features of one pack, as one safetensors byte string, wherever they are: in the store, in a file, in memory.

Tensors: `taps` [T, A, H], `final` [T, H], `input_ids` int32 [T], `document_ids` int32 [T]. Metadata: pack id, what the
features are of (`FeatureSpec`), and a checksum over names, shapes, dtypes and bytes. No pickle anywhere.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors

from .errors import FeatureError
from .packing import document_ids

METADATA = "draftsmith"


@dataclass(frozen=True)
class FeatureSpec:
    """What the features are of. Two specs with the same fingerprint give the same features for the same pack.

    target: fingerprint of the target's weights and config. taps: the k of H^k (the residual stream after k decoder
    layers), ascending; the final state before the final norm always travels too. dtype: of the computation and of the
    wire. layers and hidden_size are the target's, to check shapes with.
    """

    target: str
    taps: tuple[int, ...]
    hidden_size: int
    dtype: str = "bfloat16"
    engine: str = "transformers"

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True, eq=False)
class Features:
    """taps [T, A, H] and final [T, H] (before the final norm), both of the spec's dtype."""

    taps: torch.Tensor
    final: torch.Tensor


def encode(features: Features, *, pack: str, input_ids: np.ndarray, lengths: Sequence[int], spec: FeatureSpec) -> bytes:
    """Features of a pack → safetensors bytes. `pack` is its id."""
    tensors = {
        "taps": features.taps.contiguous(),
        "final": features.final.contiguous(),
        "input_ids": torch.from_numpy(np.ascontiguousarray(input_ids, dtype=np.int32)),
        "document_ids": torch.from_numpy(document_ids(lengths)),
    }
    metadata = {"pack": pack, "features": spec.fingerprint, "checksum": _checksum(tensors, pack, spec.fingerprint)}
    # One entry: safetensors writes several in no fixed order, and the same features are to be the same bytes.
    return save_safetensors(tensors, {METADATA: json.dumps(metadata, sort_keys=True)})


def read_metadata(payload: bytes | memoryview) -> dict[str, str]:
    """What the payload says of itself: `pack`, `features`, `checksum`. Nothing of it is verified here."""
    try:
        (size,) = struct.unpack("<Q", payload[:8])
        if size > 65536:
            raise ValueError(f"header of {size} bytes")
        metadata = json.loads(json.loads(bytes(payload[8 : 8 + size]))["__metadata__"][METADATA])
        return {key: str(metadata[key]) for key in ("pack", "features", "checksum")}
    except (struct.error, ValueError, KeyError, TypeError, RecursionError) as error:
        raise FeatureError(f"not a features payload: {error}") from error


def decode(
    payload: bytes | memoryview,
    *,
    pack: str,
    input_ids: np.ndarray,
    lengths: Sequence[int],
    spec: FeatureSpec,
    checksum: str | None = None,
) -> Features:
    """Safetensors bytes → verified features.

    checksum: what the producer reported for this object, if it came through a ledger.
    Raises FeatureError when the bytes are not exactly the features of this pack under this spec: truncated, a flipped
    bit, another pack or target, another layout, not finite, all zero.
    """
    metadata = read_metadata(payload)
    stated = metadata["checksum"]
    try:
        tensors = load_safetensors(bytes(payload))
    except (SafetensorError, ValueError, KeyError) as error:
        raise FeatureError(f"not a features payload: {error}") from error
    if metadata["pack"] != pack:
        raise FeatureError(f"features of pack {metadata['pack']}, not of {pack}")
    if metadata["features"] != spec.fingerprint:
        raise FeatureError(
            f"features of {metadata['features']}, wanted {spec.fingerprint} (another target, taps or dtype)"
        )
    if checksum is not None and stated != checksum:
        raise FeatureError(f"checksum {stated} is not the one that the producer reported, {checksum}")
    actual = _checksum(tensors, pack, spec.fingerprint)
    if actual != stated:
        raise FeatureError(f"checksum of the bytes is {actual}, stated {stated}: corrupt")
    length = sum(lengths)
    shapes = {
        "taps": (length, len(spec.taps), spec.hidden_size),
        "final": (length, spec.hidden_size),
        "input_ids": (length,),
        "document_ids": (length,),
    }
    for name, shape in shapes.items():
        if name not in tensors or tuple(tensors[name].shape) != shape:
            got = tuple(tensors[name].shape) if name in tensors else "nothing"
            raise FeatureError(f"{name}: got {got}, wanted {shape}")
    if not np.array_equal(tensors["input_ids"].numpy(), input_ids):
        raise FeatureError("the features were computed from other token ids")
    if not np.array_equal(tensors["document_ids"].numpy(), document_ids(lengths)):
        raise FeatureError("the features were computed with another layout of documents")
    features = Features(tensors["taps"], tensors["final"])
    check_values(features, spec)
    return features


def check_values(features: Features, spec: FeatureSpec) -> None:
    """Raises FeatureError on values that no working target gives: a wrong dtype, NaN, infinity, mostly zeros.

    (A few rows of zeros are right: a padding token's embedding is zero in many models, and stays so.)
    """
    wanted = getattr(torch, spec.dtype)
    for name, tensor in (("taps", features.taps), ("final", features.final)):
        if tensor.dtype != wanted:
            raise FeatureError(f"{name}: dtype {tensor.dtype}, wanted {wanted}")
        if not torch.isfinite(tensor.float().sum()):  # one pass; a sum is finite iff (practically) every term is
            raise FeatureError(f"{name}: not finite")
        rows = tensor.reshape(-1, tensor.shape[-1])
        if rows.any(dim=-1).sum() * 2 < len(rows):
            raise FeatureError(f"{name}: more than half of the hidden states are all zeros")


def _checksum(tensors: dict[str, torch.Tensor], pack: str, spec: str) -> str:
    digest = xxhash.xxh3_128(f"{pack} {spec}".encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        digest.update(tensor.contiguous().view(torch.uint8).numpy() if tensor.numel() else b"")
    return digest.hexdigest()
