from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipelines.documents import Document, Documents, DocumentWriter, split_origin

DOCUMENT = st.tuples(st.lists(st.integers(0, 50), min_size=1, max_size=9), st.integers(0, 3), st.integers(-1, 10**12))


def made(drawn) -> list[Document]:
    documents = []
    for ids, file, number in drawn:
        origin = f"folder/{file}.jsonl" + (f":{number}" if number >= 0 else "")
        documents.append(Document(np.array(ids, np.int32), np.array(ids) % 2 == 0, origin))
    return documents


@settings(max_examples=60, deadline=None)
@given(st.lists(DOCUMENT, max_size=20), st.integers(0, 20))
def test_what_is_written_in_portions_is_read_back_from_files(tmp_path_factory, drawn, cut):
    listed, folder = made(drawn), tmp_path_factory.mktemp("documents")
    writer = DocumentWriter(folder)
    writer.append(Documents.gather(listed[:cut]))
    writer.append(Documents.gather(listed[cut:]))
    writer.close()
    for documents in (Documents.load(folder), Documents.gather(listed)):
        assert len(documents) == len(listed)
        for got, given_ in zip(documents, listed, strict=True):
            assert np.array_equal(got.input_ids, given_.input_ids) and got.input_ids.dtype == np.int32
            assert np.array_equal(got.loss_mask, given_.loss_mask) and got.loss_mask.dtype == np.bool_
            assert got.origin == given_.origin
    mapped, held = Documents.load(folder), Documents.gather(listed)
    assert mapped.fingerprint == held.fingerprint
    assert mapped.label_counts.tolist() == held.label_counts.tolist()
    labels = [i for d in listed for i, label in zip(d.input_ids, d.loss_mask) if label]
    assert held.label_counts.tolist() == np.bincount(labels, minlength=len(held.label_counts)).tolist()


def test_another_cut_between_documents_or_another_label_is_another_fingerprint():
    ids, mask = np.arange(6, dtype=np.int32), np.array([0, 1, 0, 1, 1, 1], bool)

    def fingerprint(*cuts: int, mask: np.ndarray = mask) -> str:
        return Documents.gather(Document(i, m) for i, m in zip(np.split(ids, cuts), np.split(mask, cuts))).fingerprint

    assert len({fingerprint(), fingerprint(3), fingerprint(2), fingerprint(3, mask=~mask)}) == 4
    assert fingerprint(3) == fingerprint(3)


def test_origins():
    assert split_origin("a/b.jsonl:12") == ("a/b.jsonl", 12)
    assert split_origin("org/set:train:7") == ("org/set:train", 7)
    assert split_origin("row 3") == ("row 3", -1) and split_origin("a:²") == ("a:²", -1)
    documents = Documents.gather(made([([1, 2], 0, 5), ([3], 1, 9)]))
    assert [documents.origin_of_token(i) for i in range(3)] == [documents[0].origin] * 2 + [documents[1].origin]
    assert [d.origin for d in documents[1:]] == [documents[1].origin]
    for index in (-1, 2):
        with pytest.raises(IndexError):
            documents[index]
