"""Every causal LM of transformers is exact, or refused in words."""

from __future__ import annotations

import pytest

from tests.families.build import all_families
from tests.families.cases import check_family


@pytest.mark.families
@pytest.mark.parametrize("family", [f for f in all_families() if not f.multimodal], ids=str)
def test_is_exact_or_refused(family, tmp_path):
    check_family(family, tmp_path)
