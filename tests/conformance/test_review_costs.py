"""Findings about time and memory: F9 (sweeps), F10 (caches), F11 (raw kernels), F17, F19 (scratch), F22 (cycles).

Memory figures come from processes of their own, with values of 4 MiB.
"""

from __future__ import annotations

import gc
import time
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.conformance.equality import assert_equal_to_plain, grads, training
from tests.conformance.resident import MIB, VALUE, VALUE_BYTES, growth_bytes, prepare, resident_bytes

SLACK = 2 * MIB

# An honest operator that counts how often it runs: forward, proof and replays alike.
COUNTED = torch.library.Library("elbowroom_counted", "DEF")
COUNTED.define("shrink(Tensor x) -> Tensor")
RUNS = [0]


def _shrink(x: torch.Tensor) -> torch.Tensor:
    RUNS[0] += 1
    return x * 0.99


COUNTED.impl("shrink", _shrink, "CPU")


def side_branches(t: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
    """A running value that nothing saves, with a saved side branch at every step (routers, auxiliary heads)."""
    total = torch.zeros_like(t)
    for w in weights:
        t = torch.ops.elbowroom_counted.shrink(t)
        total = total + w * t.cos()
    return total


@pytest.mark.parametrize("length", [50, 200])
def test_f09_replays_are_linear(contender: Any, elbowroom_only: None, length: int) -> None:
    """Each operator of the running value is replayed at most once in a backward pass, not once per side branch."""
    weights = [torch.randn(8, requires_grad=True) for _ in range(length)]
    for _ in range(3):
        y = contender.checkpoint(side_branches, torch.randn(8), weights)
        before = RUNS[0]
        y.sum().backward()
        assert RUNS[0] - before <= length


def test_f09_time_is_linear(contender: Any) -> None:
    """The same with torch's own operators: quadratic replay of 1600 steps would take over ten seconds."""

    def block(t: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
        total = torch.zeros_like(t)
        for w in weights:
            t = t * 0.99
            total = total + w * t.cos()
        return total

    weights = [torch.randn(8, requires_grad=True) for _ in range(1600)]
    contender.checkpoint(block, torch.randn(8), weights).sum().backward()
    y = contender.checkpoint(block, torch.randn(8), weights).sum()
    begin_s = time.monotonic()
    y.backward()
    assert time.monotonic() - begin_s < 4.0


def test_f09_order_of_asking_does_not_matter(equal_to_plain: Any) -> None:
    """Branches of one region asked for in several backward passes, forwards, backwards and mixed."""

    def program(call: Any) -> Any:
        x, weights = torch.randn(6), [torch.randn(6, requires_grad=True) for _ in range(7)]

        def block(t: torch.Tensor) -> list[torch.Tensor]:
            outs = []
            for w in weights:
                t = (t * 0.9).sin()
                outs.append((w * t.cos()).exp())
            return outs

        for order in (range(7), reversed(range(7)), (3, 0, 6, 1, 5, 2, 4)):
            outs = call(block, x)
            for n in order:
                outs[n].sum().backward()
        return grads(*weights)

    equal_to_plain(program)


def _after_backward_of_one_branch(ck: Any) -> None:
    prepare(ck)
    x = torch.randn(VALUE, requires_grad=True)

    def block(t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for _ in range(5):
            t = t.sin()
        return t.exp(), t.cos()

    for _ in range(3):
        a, b = ck.checkpoint(block, x)
        before = resident_bytes()
        torch.autograd.grad(a.sum(), x, retain_graph=True)
        left = resident_bytes() - before
        assert left < SLACK, f"{left / MIB:.1f} MiB of replayed values are still held after a partial backward"
        torch.autograd.grad(b.sum(), x)


def test_f10_caches_die_with_the_pass(isolated: Any) -> None:
    """After a partial backward over a retained graph no replayed value is held."""
    isolated(_after_backward_of_one_branch)


def _peak_of_long_region(ck: Any) -> None:
    """Kept values go one by one: a chain whose backward needs each value once has no second copy of the whole."""
    prepare(ck)
    x = torch.randn(VALUE, requires_grad=True)
    peaks = []

    def watch(_gradient: torch.Tensor) -> None:
        peaks.append(resident_bytes())

    def block(t: torch.Tensor) -> torch.Tensor:
        for _ in range(10):
            t = t.sin()
            t.register_hook(watch)
        return t

    for _ in range(3):
        peaks.clear()
        before = resident_bytes()
        y = ck.checkpoint(block, x).sum()
        y.backward()
        x.grad = None
        highest = max(peaks) - before
        # ten saved values, a gradient or two, one value being made
        assert highest <= 14 * VALUE_BYTES, f"{highest / MIB:.1f} MiB at the highest point of backward"
        assert peaks[-1] - before <= 5 * VALUE_BYTES, (
            f"{(peaks[-1] - before) / MIB:.1f} MiB held when only one value is needed"
        )


def test_f10_values_are_released_one_by_one(isolated: Any) -> None:
    isolated(_peak_of_long_region)


class RawNorm(torch.autograd.Function):
    """RMSNorm times a gate by a raw kernel (numpy): writes into empty memory that no operator shows."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        a = x.detach().numpy()
        scale = 1.0 / np.sqrt((a * a).mean(-1, keepdims=True) + np.float32(1e-6))
        np.multiply(a, scale, out=out.detach().numpy())
        ctx.save_for_backward(x, out)
        return out

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        x, out = ctx.saved_tensors
        scale = (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()
        return (g - out * (g * out).mean(-1, keepdim=True)) * scale


def raw_block(t: torch.Tensor) -> torch.Tensor:
    return RawNorm.apply(RawNorm.apply(t.sin()).cos()).tanh()


def test_f11_raw_kernel_function_is_right(equal_to_plain: Any) -> None:
    """A Function with a raw kernel is opaque: its result is kept, its gradients are plain's."""
    equal_to_plain(training(lambda: raw_block, lambda: [torch.randn(3, 8, requires_grad=True)], steps=4))


class ReplayableNorm(RawNorm):
    """The same, declared to be one operator of the tape."""


def _replayable_block(t: torch.Tensor) -> torch.Tensor:
    return ReplayableNorm.apply(ReplayableNorm.apply(t.sin()).cos()).tanh()


def _replayable(ck: Any) -> None:
    import elbowroom

    marked = elbowroom.replayable(ReplayableNorm)
    assert marked is None or marked is ReplayableNorm
    leaf = lambda: [torch.randn(3, 8, requires_grad=True)]  # noqa: E731
    assert_equal_to_plain(ck, training(lambda: _replayable_block, leaf, steps=4))
    prepare(ck)
    x = torch.randn(1024, 1024, requires_grad=True)
    for _ in range(3):

        def forward() -> torch.Tensor:
            y = x
            for _ in range(3):
                y = ck.checkpoint(_replayable_block, y)
            return y

        held, y = growth_bytes(forward)
        limit = 3 * VALUE_BYTES + SLACK if ck.saves_memory else 15 * VALUE_BYTES
        assert held <= limit, f"{held / MIB:.1f} MiB alive after three regions of raw kernels"
        y.sum().backward()
        x.grad = None


def test_f11_replayable_function_is_replayed(isolated: Any, elbowroom_only: None) -> None:
    """replayable(): plain's gradients, and only the regions' outputs alive after the forward."""
    isolated(_replayable)


def _keeping_everything_is_free(ck: Any) -> None:
    """A region that starts with a reduction: plain saves next to nothing, so keep="everything" holds no input."""
    from tests.conformance.contenders import Elbowroom

    ck = Elbowroom(keep="everything")
    prepare(ck)
    x = torch.randn(VALUE, requires_grad=True)
    for _ in range(3):
        held, y = growth_bytes(lambda: ck.checkpoint(lambda t: t.view(1024, 1024).mean(0).sin().exp(), x * 1.0))
        assert held <= SLACK, f"{held / MIB:.1f} MiB held where plain autograd holds none"
        y.sum().backward()
        x.grad = None


def test_f17_keeping_everything_costs_nothing(isolated: Any, elbowroom_only: None) -> None:
    """F17: sources are not free. Where everything is kept, a region holds no more than plain autograd."""
    isolated(_keeping_everything_is_free)


def _lstm_workspace(ck: Any) -> None:
    """The workspace of an LSTM is scratch: it is replayed, not kept because its bits differ."""
    prepare(ck)
    torch.manual_seed(0)
    lstm = nn.LSTM(128, 128, num_layers=2)
    x = torch.randn(256, 32, 128, requires_grad=True)  # 4 MiB
    plain_held, y = growth_bytes(lambda: lstm(x)[0])
    y.sum().backward()
    del y
    for _ in range(3):
        held, y = growth_bytes(lambda: ck.checkpoint(lambda t: lstm(t)[0], x))
        assert held <= max(plain_held / 4, VALUE_BYTES + 2 * SLACK), (
            f"{held / MIB:.1f} MiB held, plain {plain_held / MIB:.1f}"
        )
        y.sum().backward()


def test_f19_scratch_outputs_are_not_kept(isolated: Any, elbowroom_only: None) -> None:
    isolated(_lstm_workspace)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_f19_scratch_outputs_do_not_matter(equal_to_plain: Any, mode: str) -> None:
    """Operators with undefined scratch outputs: embedding_bag, ctc_loss, recurrent layers; values as plain's."""

    def block(t: torch.Tensor) -> torch.Tensor:
        bag = F.embedding_bag(torch.tensor([0, 1, 2, 2]), t * 1.0, torch.tensor([0, 3]), mode=mode)
        lengths = torch.tensor([6]), torch.tensor([2])
        return bag.sin().sum() + F.ctc_loss((t[:, None] * 2.0).log_softmax(-1), torch.tensor([[1, 2]]), *lengths).exp()

    equal_to_plain(training(lambda: block, lambda: [torch.randn(6, 5, requires_grad=True)], steps=4))


def _no_cycles(ck: Any) -> None:
    """Twelve steps with the collector off leave no garbage behind that only the collector could free."""
    prepare(ck)
    w = torch.randn(2**18, requires_grad=True)

    def block(t: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            t = F.dropout(torch.sin(t * w), 0.1)
        return t

    def step() -> None:
        y = ck.checkpoint(block, ck.checkpoint(block, torch.ones(2**18, requires_grad=True)))
        y.sum().backward()
        w.grad = None

    for _ in range(4):
        step()
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    before = resident_bytes()
    for _ in range(12):
        step()
    grown = resident_bytes() - before
    gc.collect()
    mine = [type(o).__name__ for o in gc.garbage if type(o).__module__.startswith(("elbowroom", "torch"))]
    assert grown < 4 * MIB, f"{grown / MIB:.1f} MiB more after twelve steps without the collector"
    assert not mine, f"reference cycles through {sorted(set(mine))[:8]}"


def test_f22_no_reference_cycles(isolated: Any) -> None:
    isolated(_no_cycles)
