"""Process-wide switches: a replay runs under the ones of its forward, and puts back what it found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import elbowroom
from elbowroom.core.flags import Flags
from tests.core.counting import fresh

CHANGES: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "threads": (torch.get_num_threads, lambda: torch.set_num_threads(3)),
    "deterministic": (
        torch.are_deterministic_algorithms_enabled,
        lambda: torch.use_deterministic_algorithms(True, warn_only=True),
    ),
    "matmul precision": (torch.get_float32_matmul_precision, lambda: torch.set_float32_matmul_precision("medium")),
    "mkldnn": (torch._C._get_mkldnn_enabled, lambda: torch._C._set_mkldnn_enabled(False)),
    "cudnn": (lambda: torch.backends.cudnn.enabled, lambda: torch._C._set_cudnn_enabled(False)),
    "cudnn benchmark": (lambda: torch.backends.cudnn.benchmark, lambda: torch._C._set_cudnn_benchmark(True)),
    "cudnn tf32": (lambda: torch.backends.cudnn.allow_tf32, lambda: torch._C._set_cudnn_allow_tf32(False)),
    "cudnn deterministic": (
        lambda: torch.backends.cudnn.deterministic,
        lambda: torch._C._set_cudnn_deterministic(True),
    ),
}


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    threads, found = torch.get_num_threads(), Flags.now()
    with found.restored():
        pass
    yield
    torch.set_num_threads(threads)
    # What a test changed is set back by entering the flags once more, without leaving them.
    from elbowroom.core import flags

    for state, (get, put) in zip(found.states, flags._SWITCHES, strict=True):
        if get() != state:
            put(state)


@pytest.mark.parametrize("name", sorted(CHANGES))
def test_the_recorded_state_comes_back_and_goes_again(name: str) -> None:
    get, change = CHANGES[name]
    recorded, flags = get(), Flags.now()
    change()
    changed = get()
    assert changed != recorded, "the test changes something"
    with flags.restored():
        assert get() == recorded
    assert get() == changed


def test_it_goes_again_after_an_error() -> None:
    flags = Flags.now()
    torch._C._set_mkldnn_enabled(False)
    with pytest.raises(ValueError, match="inside"), flags.restored():
        raise ValueError("inside")
    assert not torch._C._get_mkldnn_enabled()


def test_no_flags_change_nothing() -> None:
    torch._C._set_mkldnn_enabled(False)
    with Flags.none().restored():
        assert not torch._C._get_mkldnn_enabled()


_seen: list[bool] = []


@torch.library.custom_op("elbowroom_tests::looks_at_flags", mutates_args=())
def looks_at_flags(x: torch.Tensor) -> torch.Tensor:
    _seen.append(torch._C._get_mkldnn_enabled())
    return x + 1


looks_at_flags.register_autograd(lambda ctx, grad: grad)


def test_a_replayed_operator_sees_the_flags_of_its_forward() -> None:
    fn = fresh(lambda x: (looks_at_flags(x * 2) * 3).sin())
    x = torch.randn(3, requires_grad=True)
    out = elbowroom.checkpoint(fn, x, verify="never")
    torch._C._set_mkldnn_enabled(False)
    _seen.clear()
    out.sum().backward()
    assert _seen == [True]
    assert not torch._C._get_mkldnn_enabled()
