"""Nothing of the surroundings reaches what runs inside ``hermetic``, and all of it is back afterwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import elbowroom
from elbowroom.core.hermetic import hermetic
from tests.core.counting import fresh, programs_of, tape_of


class Counting(TorchDispatchMode):
    seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        Counting.seen += 1
        return func(*args, **(kwargs or {}))


class Watching(TorchFunctionMode):
    seen = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        Watching.seen += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def keys() -> Any:
    """The dispatch keys of a recorded region."""
    fn = fresh(lambda x: (x * 2).sin())
    out = elbowroom.checkpoint(fn, torch.randn(3, requires_grad=True))
    found = tape_of(programs_of(fn)[0]).keys
    del out
    return found


def test_modes_autocast_and_autograd_are_off(keys: Any) -> None:
    x = torch.randn(4, 4, requires_grad=True)
    with Counting(), Watching(), torch.autocast("cpu", torch.bfloat16):
        Counting.seen = Watching.seen = 0
        with hermetic(keys):
            y = x @ x
        inside = (Counting.seen, Watching.seen)
        z = x @ x
    assert inside == (0, 0)
    assert (y.dtype, y.requires_grad) == (torch.float32, False)
    assert (z.dtype, z.requires_grad) == (torch.bfloat16, True)
    assert Counting.seen > 0
    assert Watching.seen > 0


def test_transforms_are_off(keys: Any) -> None:
    plain = torch.ones(3)

    def inside(t: torch.Tensor) -> torch.Tensor:
        with hermetic(keys):
            assert type(plain + 1) is torch.Tensor
        return t * 2

    assert torch.equal(torch.vmap(inside)(torch.ones(2, 3)), torch.full((2, 3), 2.0))


@pytest.mark.parametrize("enabled", [True, False])
def test_grad_mode_comes_back_also_after_an_error(keys: Any, enabled: bool) -> None:
    with torch.set_grad_enabled(enabled):
        with pytest.raises(ValueError, match="could not convert"), hermetic(keys):
            float("inside") if not torch.is_grad_enabled() else None
        assert torch.is_grad_enabled() is enabled


def test_it_nests(keys: Any) -> None:
    with hermetic(keys), hermetic(keys):
        y = torch.ones(2) * 2
    assert y.tolist() == [2.0, 2.0]
    assert (torch.ones(2, requires_grad=True) * 2).requires_grad
