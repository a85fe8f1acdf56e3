"""Documents: tokenised conversations with their loss masks, in memory or in files larger than memory."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

_FILES = {"input_ids": np.int32, "loss_mask": np.bool_, "lengths": np.int32, "names": np.int32, "numbers": np.int64}
_CHUNK = 1 << 22  # tokens read at a time by what passes over all of them


@dataclass(frozen=True, eq=False)
class Document:
    """One tokenised conversation.

    input_ids: int32 [n]. loss_mask: bool [n], True where the token was written by the assistant (end of turn included).
    origin: where the row came from, for people ("file.jsonl:12").
    """

    input_ids: np.ndarray
    loss_mask: np.ndarray
    origin: str = ""

    def __len__(self) -> int:
        return len(self.input_ids)


@dataclass(frozen=True, eq=False)
class Documents(Sequence[Document]):
    """D documents laid end to end.

    input_ids: int32 [N]. loss_mask: bool [N]. lengths: int32 [D], N in all. Where each came from: names: int32 [D], an
    index into `files`, and numbers: int64 [D], the line or row of that file, -1 where there is none.
    """

    input_ids: np.ndarray
    loss_mask: np.ndarray
    lengths: np.ndarray
    names: np.ndarray
    numbers: np.ndarray
    files: list[str]

    @classmethod
    def gather(cls, documents: Iterable[Document]) -> Documents:
        """The documents, copied, in memory."""
        documents = list(documents)
        empty = Document(np.zeros(0, np.int32), np.zeros(0, np.bool_))
        files: dict[str, int] = {}
        places = [split_origin(d.origin) for d in documents]
        return cls(
            np.concatenate([d.input_ids for d in [empty, *documents]]).astype(np.int32),
            np.concatenate([d.loss_mask for d in [empty, *documents]]).astype(np.bool_),
            np.array([len(d) for d in documents], np.int32),
            np.array([files.setdefault(name, len(files)) for name, _ in places], np.int32),
            np.array([number for _, number in places], np.int64),
            list(files),
        )

    @classmethod
    def load(cls, folder: Path) -> Documents:
        """The documents that a `DocumentWriter` left in `folder`, mapped into memory: read where they are used."""
        arrays = {
            name: np.memmap(folder / name, kind, "r").view(np.ndarray)
            if (folder / name).stat().st_size
            else np.zeros(0, kind)
            for name, kind in _FILES.items()
        }
        known = json.loads((folder / "known.json").read_text(encoding="utf-8"))
        documents = cls(**arrays, files=known["files"])
        # What would take a pass over all tokens was found while they were written.
        vars(documents).update(
            fingerprint=known["fingerprint"], label_counts=np.fromfile(folder / "label_counts", np.int64)
        )
        return documents

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int | slice) -> Document | list[Document]:  # type: ignore[override]
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(index)
        end = int(self._ends[index])
        part = slice(end - int(self.lengths[index]), end)
        return Document(self.input_ids[part], self.loss_mask[part], self.origin(index))

    def __iter__(self) -> Iterator[Document]:
        return (self[i] for i in range(len(self)))

    def origin(self, index: int) -> str:
        name, number = self.files[self.names[index]], int(self.numbers[index])
        return name if number < 0 else f"{name}:{number}"

    @cached_property
    def _ends(self) -> np.ndarray:
        return np.cumsum(self.lengths, dtype=np.int64)

    def origin_of_token(self, index: int) -> str:
        """Of the document that holds input_ids[index]."""
        return self.origin(int(np.searchsorted(self._ends, index, side="right")))

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the lengths, token ids and masks."""
        return _Totals().add(self).fingerprint

    @cached_property
    def label_counts(self) -> np.ndarray:
        """int64 [highest id + 1]: how often each token is trained on."""
        return _Totals().add(self).label_counts


class DocumentWriter:
    """Appends documents to the files of a folder; `Documents.load` reads them after `close`."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._files = {name: (folder / name).open("wb") for name in _FILES}
        self._names: dict[str, int] = {}
        self._totals = _Totals()

    def append(self, documents: Documents) -> None:
        renumbered = np.array([self._names.setdefault(name, len(self._names)) for name in documents.files], np.int32)
        for name in _FILES:
            array = getattr(documents, name)
            array = renumbered[array] if name == "names" and len(array) else array
            self._files[name].write(np.ascontiguousarray(array).data)
        self._totals.add(documents)

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._totals.label_counts.tofile(self._folder / "label_counts")
        known = {"files": list(self._names), "fingerprint": self._totals.fingerprint}
        (self._folder / "known.json").write_text(json.dumps(known), encoding="utf-8")


class _Totals:
    """What is known of documents after a pass over them, in whatever portions they come."""

    def __init__(self) -> None:
        self._digests = {name: hashlib.sha256() for name in ("lengths", "input_ids", "loss_mask")}
        self.label_counts = np.zeros(0, np.int64)

    def add(self, documents: Documents) -> _Totals:
        for name, digest in self._digests.items():
            digest.update(np.ascontiguousarray(getattr(documents, name)).data)
        ids, mask = documents.input_ids, documents.loss_mask
        for start in range(0, len(ids), _CHUNK):
            part = ids[start : start + _CHUNK]
            size = max(len(self.label_counts), int(part.max()) + 1)
            self.label_counts = np.pad(self.label_counts, (0, size - len(self.label_counts)))
            self.label_counts += np.bincount(part[mask[start : start + _CHUNK]], minlength=size)
        return self

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(b"".join(d.digest() for d in self._digests.values())).hexdigest()[:16]


def split_origin(origin: str) -> tuple[str, int]:
    """("file", 12) of "file:12"; (origin, -1) where it ends in no number."""
    name, _, number = origin.rpartition(":")
    return (name, int(number)) if number.isascii() and number.isdigit() else (origin, -1)
