"""Nothing that a peer or a file says is ever unpickled: what would do so does not occur in the sources.

And what is decoded instead of pickles survives anything: `features.decode` gives back what was encoded, or FeatureError.
"""

from __future__ import annotations

import ast
import json
import resource
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from data_pipelines.errors import FeatureError
from data_pipelines.features import METADATA, Features, FeatureSpec, decode, encode, read_metadata

ROOT = Path(__file__).parents[2]
PACKAGES = ("data_pipelines", "trainer", "launch")

MODULES = {
    "pickle",
    "cPickle",
    "_pickle",
    "cloudpickle",
    "dill",
    "joblib",
    "marshal",
    "shelve",
    "multiprocessing.connection",
}
# What unpickles somewhere inside, by the last part of its name.
CALLS = {
    "all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list", "send_object_list",
    "recv_object_list", "read_pickle", "to_pickle", "Queue", "SimpleQueue", "JoinableQueue", "Manager", "Pipe",
    "DataLoader",
}  # fmt: skip
LOADS = {"torch.load", "torch.save", "np.load", "numpy.load", "yaml.load", "yaml.unsafe_load"}
WORDS = {"eval", "exec", "__reduce__", "__reduce_ex__"}


def sources() -> list[Path]:
    return [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def findings(tree: ast.AST) -> list[str]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if _forbidden_module(alias.name)]
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            names = [f"{module}.{alias.name}" for alias in node.names]
            found += [name for name in names if _forbidden_module(module) or name.rpartition(".")[2] in CALLS]
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            last = name.rpartition(".")[2]
            if name in LOADS or last in CALLS or name in WORDS:
                found.append(f"{name}(…)")
            found += [
                f"{name}({keyword.arg}=…)"
                for keyword in node.keywords
                if keyword.arg == "allow_pickle" or (keyword.arg == "weights_only" and not _is(keyword.value, True))
            ]
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name in WORDS:
            found.append(node.name)
    return found


def _forbidden_module(name: str) -> bool:
    return name in MODULES or name.partition(".")[0] in MODULES


def _is(node: ast.AST, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_no_source_unpickles(path: Path) -> None:
    assert findings(ast.parse(path.read_text())) == []


@pytest.mark.parametrize(
    "code",
    [
        "import pickle", "from pickle import loads", "import joblib.memory", "from marshal import load", "import dill as d",
        "torch.load(path)", "torch.load(path, weights_only=False)", "numpy.load(f, allow_pickle=True)",
        "dist.broadcast_object_list(x)", "from torch.distributed import all_gather_object", "mp.get_context().Queue()",
        "from torch.utils.data import DataLoader", "eval(text)", "def __reduce__(self): ...",
        "load_model(path, weights_only=False)",
    ],
)  # fmt: skip
def test_the_search_finds_what_it_is_for(code: str) -> None:
    assert findings(ast.parse(code))


# What is read instead

SPEC = FeatureSpec(target="t", taps=(1, 2), hidden_size=8, dtype="float32")
IDS, LENGTHS = np.arange(6, dtype=np.int32), (2, 4)
_rng = torch.Generator().manual_seed(1)
HONEST = Features(torch.randn(6, 2, 8, generator=_rng), torch.randn(6, 8, generator=_rng))
PAYLOAD = encode(HONEST, pack="p", input_ids=IDS, lengths=LENGTHS, spec=SPEC)
(HEADER_SIZE,) = struct.unpack("<Q", PAYLOAD[:8])
HEADER, BODY = json.loads(PAYLOAD[8 : 8 + HEADER_SIZE]), PAYLOAD[8 + HEADER_SIZE :]
MEMORY_BYTES = 256 * 1024**2


def identical_or_refused(payload: bytes) -> bool:
    """Whether it was refused. Anything else than the honest features, or another exception, fails the test."""
    try:
        read_metadata(payload)
    except FeatureError:
        refused_early = True
    else:
        refused_early = False
    try:
        got = decode(payload, pack="p", input_ids=IDS, lengths=LENGTHS, spec=SPEC)
    except FeatureError:
        return True
    assert not refused_early
    assert torch.equal(got.taps, HONEST.taps) and torch.equal(got.final, HONEST.final)
    return False


@pytest.fixture(autouse=True, scope="module")
def bounded_memory():
    """A payload of a few hundred bytes that makes its reader allocate gigabytes fails here with MemoryError."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def build(header: object, body: bytes = BODY, *, size: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text) if size is None else size) + text + body


def test_the_honest_payload_is_read() -> None:
    assert not identical_or_refused(PAYLOAD)
    assert not identical_or_refused(build(HEADER))


@st.composite
def mutated_bytes(draw: st.DrawFn) -> bytes:
    """Flips, cuts, insertions, repetitions, transplants, several at once; more of them in the header than chance has."""
    data = bytearray(PAYLOAD)
    for _ in range(draw(st.integers(1, 4))):
        end = len(data) if draw(st.booleans()) else min(len(data), 8 + HEADER_SIZE)
        at = draw(st.integers(0, max(end - 1, 0)))
        kind = draw(st.sampled_from(["flip", "set", "cut", "insert", "delete", "repeat", "zero"]))
        length = draw(st.integers(1, 40))
        if kind == "flip" and data:
            data[at] ^= 1 << draw(st.integers(0, 7))
        elif kind == "set" and data:
            data[at] = draw(st.sampled_from(b'\x00\xff"{}[]:,019-e\\'))
        elif kind == "cut":
            del data[at:]
        elif kind == "insert":
            data[at:at] = draw(st.binary(min_size=1, max_size=length))
        elif kind == "delete":
            del data[at : at + length]
        elif kind == "repeat":
            data[at:at] = data[at : at + length]
        else:
            data[at : at + length] = bytes(len(data[at : at + length]))
    return bytes(data)


@settings(max_examples=600, deadline=None)
@given(mutated_bytes())
def test_any_mutation_is_refused_or_harmless(payload: bytes) -> None:
    identical_or_refused(payload)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@st.composite
def mutated_header(draw: st.DrawFn) -> dict:
    """The header stays JSON, and says something else: shapes, offsets, dtypes, names, labels."""
    header = json.loads(json.dumps(HEADER))
    for _ in range(draw(st.integers(1, 3))):
        name = draw(st.sampled_from([*header, "extra", ""]))
        if name == "__metadata__":
            labels = json.loads(HEADER["__metadata__"][METADATA])
            labels[draw(st.sampled_from([*labels, "extra"]))] = draw(JSON)
            header[name] = draw(st.sampled_from([{METADATA: json.dumps(labels)}, {METADATA: labels}, {}]) | JSON)
        elif name in header and isinstance(header[name], dict) and draw(st.booleans()):
            entry = dict(header[name])
            numbers = st.lists(st.integers(0, 2**64) | st.integers(0, 200), max_size=4)
            entry[draw(st.sampled_from(["shape", "data_offsets", "dtype"]))] = draw(
                numbers | st.sampled_from(["F32", "F64", "BF16", "F8_E4M3", "I64", "BOOL", "C64", "F4"]) | JSON
            )
            header[name] = entry
        else:
            header[name] = draw(JSON | st.sampled_from([v for k, v in HEADER.items() if k != "__metadata__"]))
    return header


@settings(max_examples=600, deadline=None)
@given(mutated_header())
def test_any_other_header_is_refused_or_harmless(header: dict) -> None:
    identical_or_refused(build(header))


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**64 - 1), st.binary(max_size=64))
def test_any_stated_size_is_refused(size: int, rest: bytes) -> None:
    assume(size != HEADER_SIZE)
    assert identical_or_refused(build(HEADER, size=size))
    assert identical_or_refused(struct.pack("<Q", size) + rest)


@pytest.mark.parametrize(
    "header",
    [
        b"[" * 60000,
        b'{"a":' * 10000,
        b'{"__metadata__":{"draftsmith":"' + b"[" * 50000 + b'"}}',
        b'{"__metadata__":{"draftsmith":"' + b"9" * 20000 + b'"}}',
        b'{"__metadata__":{"draftsmith":"{\\"pack\\":' + b"9" * 20000 + b'}"}}',
        b'{"__metadata__":{"draftsmith":"\\ud800"}}',
        b"\xff\xfe{}",
        b"9" * 60000,
        json.dumps({**HEADER, "taps": {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 8]}}).encode(),
        json.dumps({**HEADER, "taps": {"dtype": "F32", "shape": [2**62], "data_offsets": [0, 2**64 - 1]}}).encode(),
        json.dumps({**HEADER, "more": {"dtype": "F32", "shape": [0, 2**62], "data_offsets": [0, 0]}}).encode(),
        json.dumps({f"t{i}": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]} for i in range(999)} | HEADER).encode(),
    ],
    ids=lambda header: header[:24].decode("latin1"),
)  # fmt: skip
def test_headers_that_are_meant_to_hurt(header: bytes) -> None:
    assert identical_or_refused(build(header))
