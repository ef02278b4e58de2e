"""Fixtures of the tests of whole models."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="module")
def few_objects() -> Iterator[None]:
    """Sets aside what pytest and imports made, some 400,000 objects: every start of a meter looks at all others."""
    # The first optimizer imports half of torch's compiler: before the freeze, or each collection goes through it.
    torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
