"""Files and datasets → blocks of rows: the unit that is read, rendered, cached and held in memory.

A block is cheap to send to another process, which opens and parses it there. A row that cannot be read becomes a row
with a `problem`; nothing but a missing file stops the others.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import IO, Any

import pyarrow as pa

from ..errors import UserError

BLOCK_ROWS, BLOCK_BYTES = 1024, 8 << 20
_COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}
_LINES, _ARRAYS = (".jsonl", ".ndjson"), (".json",)
_TABLES = (".parquet", ".arrow", ".feather")
FORMATS = f"{', '.join((*_LINES, *_ARRAYS))} (each also with {', '.join(_COMPRESSIONS)}), {', '.join(_TABLES)}"


@dataclass(frozen=True)
class Row:
    """data: the row; where it is no JSON object, its text, with `problem` saying so. origin: "file:line"."""

    data: Any
    origin: str
    problem: str = ""


@dataclass(frozen=True)
class Block:
    """Consecutive rows of one file. count: how many. weight: its share of the source's `weight`."""

    name: str
    count: int
    weight: float

    def rows(self) -> Iterator[Row]:
        raise NotImplementedError


@dataclass(frozen=True)
class LineBlock(Block):
    """Lines of a file, the first being line `first`. They are read from path[offset : offset + size] or lie in `data`."""

    first: int
    path: Path
    offset: int
    size: int
    data: bytes = b""

    def rows(self) -> Iterator[Row]:
        data = self.data
        if not data:
            with self.path.open("rb") as file:
                file.seek(self.offset)
                data = file.read(self.size)
        rows = (_parse(raw, f"{self.name}:{number}") for number, raw in enumerate(data.split(b"\n"), self.first))
        return islice((row for row in rows if row is not None), self.count)


@dataclass(frozen=True)
class ListBlock(Block):
    """Rows that are in memory already."""

    held: list[Row]

    def rows(self) -> Iterator[Row]:
        return islice(self.held, self.count)


@dataclass(frozen=True)
class TableBlock(Block):
    """Rows of a table, the first being row `first`; batch: the Arrow stream that holds them."""

    first: int
    batch: bytes

    def rows(self) -> Iterator[Row]:
        held = pa.ipc.open_stream(self.batch).read_all().to_pylist()
        return (Row(without_nulls(data), f"{self.name}:{i}") for i, data in enumerate(held[: self.count], self.first))


@dataclass(frozen=True)
class Files:
    """The rows of files, in their order. paths: (file, what it is called in origins)."""

    paths: list[tuple[Path, str]]
    weight: float = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "weight", float(sum(path.stat().st_size for path, _ in self.paths)) or 1.0)

    def digest(self, update: Callable[[bytes], object]) -> None:
        for path, name in self.paths:
            update(f"{name}\0{path.stat().st_size}\0".encode())
            with path.open("rb") as file:
                while chunk := file.read(1 << 22):
                    update(chunk)

    def state(self) -> list[tuple[int, int]]:
        """Changes whenever a file is written to."""
        return [(path.stat().st_size, path.stat().st_mtime_ns) for path, _ in self.paths]

    def blocks(self) -> Iterator[Block]:
        for path, name in self.paths:
            compression = _COMPRESSIONS.get(path.suffix)
            kind = Path(path.stem).suffix if compression else path.suffix
            if kind in _TABLES:
                yield from _tables(path, name, path.suffix)
            elif kind in _ARRAYS and _begins_array(path, compression):
                yield from _array(path, name, compression)
            else:
                yield from _lines(path, name, compression)


@dataclass(frozen=True)
class Given:
    """Rows that are made or loaded elsewhere. make: gives them anew each time, `weight` of them (0: unknown)."""

    make: Callable[[], Iterator[Row]]
    weight: float = 0.0

    def digest(self, update: Callable[[bytes], object]) -> None:
        for row in self.make():
            update(json.dumps([row.origin, row.problem, row.data], sort_keys=True, default=str).encode())

    def state(self) -> None:
        return None

    def blocks(self) -> Iterator[Block]:
        return _in_blocks(self.make(), "", 1.0)


Source = Files | Given


def open_files(path: Path, name: str) -> Files:
    """A file, or the files of a folder and of the folders in it, sorted by name.

    Raises UserError when there is none that can be read.
    """
    if path.is_dir():
        inside = [p for p in sorted(path.rglob("*")) if p.is_file() and not _hidden(p.relative_to(path))]
        known = [(p, f"{name.rstrip('/')}/{p.relative_to(path)}") for p in inside if _known(p)]
        if not known:
            raise UserError(f"the folder {name} holds no file of rows", fix=f"files of rows are {FORMATS}")
        return Files(known)
    if not path.is_file():
        raise UserError(
            f"data file {name} does not exist",
            fix="data.path is a file or a folder of rows, hf:<dataset id>, builtin:prompts or builtin:demo",
        )
    if not _known(path):
        raise UserError(f"{name} is of no kind that is known by its name", fix=f"files of rows are {FORMATS}")
    return Files([(path, name)])


def open_dataset(name: str, max_rows: int, streaming: bool) -> Given:
    """`<id>[:config][:split]` through the `datasets` library (split: train), or a folder that its save_to_disk wrote.

    Of one part after the id it is tried whether it is a split, and then whether it is a configuration.
    """
    path, *rest = name.split(":")
    choices = {0: [(None, "train")], 1: [(None, *rest), (*rest, "train")], 2: [tuple(rest)]}.get(len(rest), [])
    refused: list[Exception] = []
    for config, split in choices:
        try:
            dataset = _load_dataset(path, config, split, streaming)
        except (OSError, ValueError, LookupError, RuntimeError) as error:
            refused.append(error)
            continue
        return _rows_of_dataset(dataset, ":".join(part for part in (path, config, split) if part), max_rows)
    reason = next(
        (str(error).splitlines()[0] for error in refused if str(error)), "it is written <id>[:config][:split]"
    )
    raise UserError(
        f"the dataset {path} cannot be loaded: {reason}",
        where=f"data.path=hf:{name}",
        fix="check the name, the configuration, the split and the network; files on this machine need no hf:",
    ) from (refused[0] if refused else None)


def _load_dataset(path: str, config: str | None, split: str, streaming: bool) -> Iterable[dict]:
    import datasets  # seconds to import, and only needed here

    try:
        if not is_saved_dataset(Path(path)):
            return datasets.load_dataset(path, config, split=split, streaming=streaming)
        loaded = datasets.load_from_disk(path)
    except datasets.exceptions.DatasetsError as error:
        raise ValueError(str(error.__cause__ or error)) from error
    return loaded[split] if isinstance(loaded, datasets.DatasetDict) else loaded


def _rows_of_dataset(dataset: Iterable[dict], name: str, max_rows: int) -> Given:
    def rows() -> Iterator[Row]:
        chosen = islice(dataset, max_rows or None)
        return (Row(without_nulls(dict(data)), f"{name}:{i}") for i, data in enumerate(chosen))

    known = getattr(dataset, "num_rows", 0)  # a streamed one does not know
    return Given(rows, float(min(known, max_rows or known)))


def is_saved_dataset(path: Path) -> bool:
    """Whether `datasets` wrote this folder (`save_to_disk`)."""
    return (path / "state.json").is_file() or (path / "dataset_dict.json").is_file()


def limited(blocks: Iterator[Block], most: int) -> Iterator[Block]:
    """The first `most` rows of the blocks; all where that is 0."""
    left = most
    for block in blocks:
        yield block if not most or block.count <= left else replace(block, count=left)
        left -= block.count
        if most and left <= 0:
            return


def without_nulls(value: Any) -> Any:
    """A table has one schema for all its rows: a key that a row did not have comes back as a null, and is taken out."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def _known(path: Path) -> bool:
    name = path.with_suffix("") if path.suffix in _COMPRESSIONS else path
    return name.suffix in (*_LINES, *_ARRAYS) or path.suffix in _TABLES


def _hidden(path: Path) -> bool:
    return any(part.startswith((".", "_")) for part in path.parts)


def _open(path: Path, compression: str | None) -> IO[bytes]:
    return (
        io.BufferedReader(pa.input_stream(str(path), compression=compression), 1 << 20)
        if compression
        else path.open("rb", 1 << 20)
    )


def _lines(path: Path, name: str, compression: str | None) -> Iterator[Block]:
    """Compressed lines travel with their block, because a compressed file cannot be entered in the middle."""
    total, file = os.path.getsize(path), _open(path, compression)
    offset = size = count = lines = 0
    first, held = 1, []

    def block() -> LineBlock:
        # How far a compressed file has been read is not told; that it grows fivefold is near enough for a progress bar.
        weight = min(size / 5, total) if compression else size
        return LineBlock(name, count, weight, first, path, offset, size, b"".join(held))

    with file:
        while True:
            try:
                raw = file.readline()
            except OSError as error:
                yield block()
                yield _broken(f"{name}:{first + lines}", f"the file is damaged from here on: {error}")
                return
            if not raw:
                break
            size, count, lines = size + len(raw), count + bool(raw.strip()), lines + 1
            if compression:
                held.append(raw)
            if count >= BLOCK_ROWS or size >= BLOCK_BYTES:
                yield block()
                offset, first = offset + size, first + lines
                size = count = lines = 0
                held.clear()
    if count:
        yield block()


def _parse(raw: bytes, origin: str) -> Row | None:
    """None for a blank line: it holds no row."""
    if not raw.strip():
        return None
    text = raw.decode("utf-8-sig", errors="replace").strip()
    try:
        raw.decode("utf-8-sig")
        data = json.loads(text)
    except UnicodeDecodeError:
        return Row(text, origin, "the line is not UTF-8")
    except (ValueError, RecursionError):
        return Row(text, origin, "the line is not JSON")
    if "\\ud" in text.lower():  # an escape may spell half a character, which no text can hold
        try:
            json.dumps(data, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            return Row(text, origin, "the line holds half a character (a lone surrogate)")
    return Row(data, origin, "" if isinstance(data, dict) else "the line is not a JSON object")


def _begins_array(path: Path, compression: str | None) -> bool:
    with _open(path, compression) as file:
        return file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"["


def _array(path: Path, name: str, compression: str | None) -> Iterator[Block]:
    """The elements of a JSON array, counted from 1, without holding the array."""
    import ijson

    def rows() -> Iterator[Row]:
        number = 0
        with _open(path, compression) as file:
            if file.peek(3)[:3] == b"\xef\xbb\xbf":
                file.read(3)
            try:
                for number, data in enumerate(ijson.items(file, "item", use_float=True), 1):
                    problem = "" if isinstance(data, dict) else "the element is not a JSON object"
                    yield Row(data, f"{name}:{number}", problem)
            except (ijson.JSONError, UnicodeDecodeError, OSError) as error:
                yield Row("", f"{name}:{number + 1}", f"the array is broken from here on: {str(error).splitlines()[0]}")

    return _in_blocks(rows(), name, 0.0)


def _tables(path: Path, name: str, suffix: str) -> Iterator[Block]:
    """Rows counted from 0, as libraries count them. Of a Parquet file one row group at a time is read."""
    import pyarrow.parquet as parquet

    number, size = 0, path.stat().st_size
    try:
        if suffix == ".parquet":
            file = parquet.ParquetFile(path)
            batches = file.iter_batches(batch_size=BLOCK_ROWS)
        else:
            batches = _arrow_batches(path)
        for batch in batches:
            for start in range(0, batch.num_rows, BLOCK_ROWS):
                part = batch.slice(start, BLOCK_ROWS)
                sink = pa.BufferOutputStream()
                with pa.ipc.new_stream(sink, part.schema) as writer:
                    writer.write_batch(part)
                held = sink.getvalue().to_pybytes()
                yield TableBlock(name, part.num_rows, min(len(held), size), number, held)
                number += part.num_rows
    except (pa.ArrowException, OSError) as error:
        yield _broken(f"{name}:{number}", f"the file is damaged from here on: {str(error).splitlines()[0]}")


def _arrow_batches(path: Path) -> Iterator[pa.RecordBatch]:
    """Both of Arrow's formats go by one suffix: the file begins with its name, the stream does not."""
    mapped = pa.memory_map(str(path))
    if mapped.read(6) == b"ARROW1":
        reader = pa.ipc.open_file(mapped)
        return (reader.get_batch(i) for i in range(reader.num_record_batches))
    mapped.seek(0)
    return iter(pa.ipc.open_stream(mapped))


def _broken(origin: str, problem: str) -> ListBlock:
    return ListBlock(origin, 1, 0.0, [Row("", origin, problem)])


def _in_blocks(rows: Iterator[Row], name: str, weight_of_row: float) -> Iterator[Block]:
    while held := list(islice(rows, BLOCK_ROWS)):
        yield ListBlock(name, len(held), weight_of_row * len(held), held)


def rows_of(blocks: Iterable[Block]) -> Iterator[Row]:
    for block in blocks:
        yield from block.rows()
