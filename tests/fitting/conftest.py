"""Fixtures of the tests of whole models."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def few_objects() -> Iterator[None]:
    """Sets aside what pytest and imports made, some 400,000 objects: every start of a meter looks at all others."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
