"""Fixtures that every folder of tests shares."""

from __future__ import annotations

import pytest
import torch

from data_pipelines.engines import Target, TargetConfig, resolve_target

torch.set_num_threads(1)  # several processes on few cores: more threads are slower, and results depend on their number


@pytest.fixture(scope="session")
def tiny_target() -> Target:
    """A few-layer Llama with its own tokenizer, trained to be predictable (made once, kept in the user's cache)."""
    return resolve_target(TargetConfig(kind="tiny"))
