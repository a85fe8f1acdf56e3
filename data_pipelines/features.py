"""The features of one pack, as one safetensors byte string, wherever they are: in the store, in a file, in memory.

Tensors: `input_ids` int32 [T], `document_ids` int32 [T], `taps` [T, A, H], `final` [T, H]. Metadata: pack id, what the
features are of (`FeatureSpec`), and a checksum over names, shapes, dtypes and bytes. No pickle anywhere.

The format is written and read here, not by the safetensors library: that copies everything twice on the way out and once
on the way in. Here it is once (out) and not at all, and a payload has one header only that can be right.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch
import xxhash

from .errors import FeatureError
from .packing import document_ids

METADATA = "draftsmith"
_HEADER_BYTES = 640  # at most: names, shapes, offsets, metadata
_DTYPES = {torch.int32: "I32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.float64: "F64"}


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
    """Features of a pack → safetensors bytes. `pack` is its id. Raises FeatureError on shapes or a dtype not of `spec`."""
    tensors = {
        "input_ids": torch.from_numpy(np.ascontiguousarray(input_ids, dtype=np.int32)),
        "document_ids": torch.from_numpy(document_ids(lengths)),
        "taps": features.taps,
        "final": features.final,
    }
    layout = _layout(spec, sum(lengths))
    got = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    if got != layout:
        raise FeatureError(f"features of {got}, wanted {layout}")
    parts = [tensor.contiguous().view(-1).view(torch.uint8).numpy() for tensor in tensors.values()]
    metadata = {"pack": pack, "features": spec.fingerprint}
    return b"".join([_header(layout, {**metadata, "checksum": _checksum(layout, metadata, parts)}), *parts])


def payload_bytes(spec: FeatureSpec, tokens: int) -> int:
    """The most that `encode` makes of a pack of so many tokens; it is exact but for some 200 bytes of the header."""
    states = tokens * (len(spec.taps) + 1) * spec.hidden_size * getattr(torch, spec.dtype).itemsize
    return states + tokens * 2 * 4 + _HEADER_BYTES  # two int32: input_ids, document_ids


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
    if metadata["pack"] != pack:
        raise FeatureError(f"features of pack {metadata['pack']}, not of {pack}")
    if metadata["features"] != spec.fingerprint:
        raise FeatureError(
            f"features of {metadata['features']}, wanted {spec.fingerprint} (another target, taps or dtype)"
        )
    stated = metadata.pop("checksum")
    if checksum is not None and stated != checksum:
        raise FeatureError(f"checksum {stated} is not the one that the producer reported, {checksum}")
    layout = _layout(spec, sum(lengths))
    header = _header(layout, {**metadata, "checksum": stated})
    sizes = [dtype.itemsize * math.prod(shape) for dtype, shape in layout.values()]
    if payload[: len(header)] != header or len(payload) != len(header) + sum(sizes):
        raise FeatureError(f"{len(payload)} bytes of another layout, wanted {len(header) + sum(sizes)}: {layout}")
    # Tensors may be written to, so that bytes have to be copied. What a store gives has not.
    writable = bytearray(payload) if memoryview(payload).readonly else payload
    body = torch.frombuffer(writable, dtype=torch.uint8)[len(header) :]
    actual = _checksum(layout, metadata, [body.numpy()])
    if actual != stated:
        raise FeatureError(f"checksum of the bytes is {actual}, stated {stated}: corrupt")
    parts = zip(layout.items(), body.split(sizes), strict=True)
    tensors = {name: part.view(dtype).view(shape) for (name, (dtype, shape)), part in parts}
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
        norms = torch.linalg.vector_norm(tensor.flatten(0, -2), dim=-1)  # one pass shows all three
        if not norms.isfinite().all():
            raise FeatureError(f"{name}: not finite")
        if (norms > 0).sum() * 2 < len(norms):
            raise FeatureError(f"{name}: more than half of the hidden states are all zeros")


def _layout(spec: FeatureSpec, tokens: int) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Name → dtype and shape of the tensors, as they follow one another on the wire; each begins at a multiple of 4."""
    dtype = getattr(torch, spec.dtype)
    return {
        "input_ids": (torch.int32, (tokens,)),
        "document_ids": (torch.int32, (tokens,)),
        "taps": (dtype, (tokens, len(spec.taps), spec.hidden_size)),
        "final": (dtype, (tokens, spec.hidden_size)),
    }


def _header(layout: dict[str, tuple[torch.dtype, tuple[int, ...]]], metadata: dict[str, str]) -> bytes:
    """How a safetensors file with these tensors begins: the length of a JSON text, and the text."""
    entries: dict[str, dict] = {"__metadata__": {METADATA: json.dumps(metadata, sort_keys=True)}}
    end = 0
    for name, (dtype, shape) in layout.items():
        start, end = end, end + dtype.itemsize * math.prod(shape)
        entries[name] = {"dtype": _DTYPES[dtype], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _checksum(layout: dict, metadata: dict[str, str], parts: Iterable[np.ndarray]) -> str:
    """Of the bytes of `parts`, which together are the tensors, and of what they are."""
    digest = xxhash.xxh3_128(f"{layout} {sorted(metadata.items())}".encode())
    for part in parts:
        digest.update(part)
    return digest.hexdigest()
