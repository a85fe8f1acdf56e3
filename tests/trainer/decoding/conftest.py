"""Targets of several families and prompts for them."""

from __future__ import annotations

import pytest
import torch

from tests.trainer.decoding.decoding_cases import FAMILIES, build


@pytest.fixture(scope="session", params=FAMILIES)
def model(request):
    return build(request.param)


@pytest.fixture(scope="session")
def llama():
    return build("llama")


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    rng = torch.Generator().manual_seed(1)
    return [torch.randint(0, 96, (n,), generator=rng).tolist() for n in (5, 17, 1, 11)]
