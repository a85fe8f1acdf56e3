from __future__ import annotations

import numpy as np
import pytest
import torch

from data_pipelines.conversations.vocabulary import coverage, draft_vocabulary
from data_pipelines.documents import Document, Documents
from data_pipelines.errors import UserError


def document(ids: list[int], trained: list[int]) -> Document:
    return Document(np.array(ids, np.int32), np.array(trained, bool), "first:1" if len(ids) == 6 else "second:2")


LISTED = [document([9, 9, 9, 5, 7, 7], [0, 0, 0, 1, 1, 1]), document([9, 3, 5, 8], [0, 1, 1, 1])]
DOCUMENTS = Documents.gather(LISTED)
# trained on: 5 twice, 7 twice, 3 once, 8 once; 9 never


def test_the_most_frequent_labels_ascending_and_ties_by_id():
    assert draft_vocabulary(DOCUMENTS, 2, 10).tolist() == [5, 7]
    assert draft_vocabulary(DOCUMENTS, 1, 10).tolist() == [5]
    assert draft_vocabulary(DOCUMENTS, 3, 10).tolist() == [3, 5, 7]
    assert draft_vocabulary(DOCUMENTS, 6, 10).tolist() == [0, 1, 3, 5, 7, 8]  # filled up with the lowest of the others
    assert draft_vocabulary(DOCUMENTS, 10, 10).tolist() == list(range(10))
    assert draft_vocabulary(Documents.gather(LISTED[::-1]), 3, 10).dtype == torch.int64


def test_coverage_is_the_share_of_labels():
    assert coverage(DOCUMENTS, torch.tensor([5, 7]), 10) == pytest.approx(4 / 6)
    assert coverage(DOCUMENTS, torch.arange(10), 10) == 1


def test_what_does_not_fit_is_refused():
    for size in (0, 11):
        with pytest.raises(UserError, match="does not fit"):
            draft_vocabulary(DOCUMENTS, size, 10)
    with pytest.raises(UserError, match="outside the target's vocabulary") as error:
        draft_vocabulary(DOCUMENTS, 2, 9)
    assert error.value.where == "first:1"
