"""Following and leaving: how many programs there are, what is recorded in full, what the steady state takes."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import elbowroom
from tests.conformance.equality import assert_same_bits
from tests.core.counting import (
    assert_equal_to_plain,
    drafted,
    fresh,
    gradients,
    held_bytes,
    plain,
    programs_of,
    tape_of,
)


def block(x: torch.Tensor, w: torch.Tensor, scale: float = 1.0, depth: int = 2, twice: bool = False) -> torch.Tensor:
    for _ in range(depth):
        x = F.gelu(x @ w * scale)
    return x.sin().exp() if twice else x.sin()


def inputs(rows: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(rows, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)


def drafts(fn: Any, *args: Any, **settings: Any) -> int:
    with drafted() as seen:
        gradients(elbowroom.checkpoint, fn, *args, **settings)
    return len(seen)


# Following -----------------------------------------------------------------------------------------------------------


def test_the_steady_state_records_nothing_in_full() -> None:
    fn = fresh(block)
    n_ops = drafts(fn, *inputs())
    assert n_ops == elbowroom.proof(fn).operators
    assert [drafts(fn, *inputs()) for _ in range(8)] == [n_ops, 0, n_ops, 0, 0, 0, n_ops, 0]  # proved again at 2, 4, 8
    assert len(programs_of(fn)) == 1


def test_no_proof_no_drafts_after_the_first_call() -> None:
    fn = fresh(block)
    assert [drafts(fn, *inputs(), verify="never") > 0 for _ in range(5)] == [True, False, False, False, False]


def test_a_proof_at_every_call() -> None:
    fn = fresh(block)
    assert len({drafts(fn, *inputs(), verify="always") for _ in range(4)}) == 1


def test_a_schedule_of_scalars_is_one_program() -> None:
    fn = fresh(lambda x, p: F.dropout(x.clamp(-p, p), 0.5).mul_(2).sin())
    x = torch.randn(64, requires_grad=True)
    for p in (1.0, 0.5, 0.25, 2, True, 0.0, -0.0, 1.0):
        assert_equal_to_plain(fn, x, p, calls=1)
    assert len(programs_of(fn)) == 1


@pytest.mark.parametrize(
    "scalar", [1, True, -3, 0.0, -0.0, 0.5, float("inf"), float("nan"), "mean", None, torch.float64]
)
def test_equal_scalars_are_followed(scalar: Any) -> None:
    def body(x: torch.Tensor, scalar: Any) -> torch.Tensor:
        if isinstance(scalar, str):
            x = F.mse_loss(x, torch.zeros(4), reduction=scalar)
        elif isinstance(scalar, torch.dtype):
            x = torch.cumsum(x, 0, dtype=scalar)
        elif scalar is not None:
            scalar = float(str(scalar)) if isinstance(scalar, float) else scalar  # a new object each time
            x = x.masked_fill(x > 0, scalar)
        return x.sin().exp()

    fn = fresh(body)
    x = torch.randn(4, requires_grad=True)
    counts = [drafts(fn, x, scalar) for _ in range(3)]
    assert counts[0] > 0
    assert counts[2] == 0


def test_complex_scalars_differ_by_the_sign_of_zero() -> None:
    def body(x: torch.Tensor, scalar: complex) -> torch.Tensor:
        return torch.full((2,), scalar, dtype=torch.complex64).sqrt() * x

    fn = fresh(body)
    x = torch.randn(2, dtype=torch.complex64, requires_grad=True)
    for scalar in [complex(-1.0, 0.0)] * 3 + [complex(-1.0, -0.0)] * 2:
        assert_equal_to_plain(fn, x, scalar, calls=1)


# Leaving -------------------------------------------------------------------------------------------------------------


def test_alternating_shapes_make_one_program_each() -> None:
    fn = fresh(block)
    for rows in (3, 5, 3, 7, 5, 3, 7, 7, 5):
        assert_equal_to_plain(fn, *inputs(rows), calls=1)
    assert len(programs_of(fn)) == 3
    counts = [drafts(fn, *inputs(rows)) for rows in (3, 5, 7) * 6]
    assert 0 in counts, counts


@pytest.mark.parametrize("verify", ["first", "never", "always"])
def test_branches_share_what_was_the_same_so_far(verify: str) -> None:
    fn = fresh(block)
    x, w = inputs()
    for twice in (False, True, False, False, True, True, False):
        assert_equal_to_plain(fn, x, w, 1.0, 2, twice, calls=1, verify=verify)
    short, long = sorted(programs_of(fn), key=lambda p: len(p.ops))
    assert len(long.ops) == len(short.ops) + 1
    assert all(a is b for a, b in zip(long.ops, short.ops, strict=False))


def test_a_call_that_ends_early_or_goes_on_is_another_program() -> None:
    fn = fresh(lambda x, w, depth: block(x, w, 1.0, depth))
    for depth in (2, 2, 3, 1, 3, 2, 1, 4, 3):
        assert_equal_to_plain(fn, *inputs(), depth, calls=1)
    assert len(programs_of(fn)) == 4


def test_leaving_after_a_legal_write_to_a_saved_tensor_loses_nothing() -> None:
    def body(x: torch.Tensor, depth: int) -> torch.Tensor:
        y = (x * 2).exp()
        y.data.mul_(2)  # plain autograd multiplies by the new content
        for _ in range(depth):
            y = y.sin()
        return y

    fn = fresh(body)
    x = torch.randn(4, requires_grad=True)
    for depth in (1, 1, 1, 2, 3, 1, 2, 3, 0):
        assert_equal_to_plain(fn, x, depth, calls=1)


@pytest.mark.parametrize("keep", [None, "matmuls"])
def test_leaving_a_program_that_gave_sources_to_autograd(keep: Any) -> None:
    # From call 2 on, sources that are saved go to autograd directly; the second half of the call takes handles again.
    def body(x: torch.Tensor, w: torch.Tensor, write: bool) -> torch.Tensor:
        h = (x * w).sin()
        if write:
            return (h * w).exp() * w.clone()
        return h * w

    fn = fresh(body)
    x, w = torch.randn(4, requires_grad=True), torch.randn(4, requires_grad=True)
    for write in (False, False, False, True, False, True, True, False):
        assert_equal_to_plain(fn, x, w, write, calls=1, keep=keep)


def test_what_is_saved_is_compared_though_operators_are_the_same() -> None:
    def body(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return ((x * w).sin() * w).exp()

    fn = fresh(body)
    for x_wants, w_wants in [(True, True), (True, True), (True, False), (False, True), (True, True), (False, True)]:
        x, w = torch.randn(4, requires_grad=x_wants), torch.randn(4, requires_grad=w_wants)
        assert_equal_to_plain(fn, x, w, calls=1)


def test_aliased_arguments_are_another_program() -> None:
    fn = fresh(lambda a, b: (a * 2).sin() * b.exp())
    a, b = torch.randn(4, requires_grad=True), torch.randn(4, requires_grad=True)
    for first, second in [(a, b), (a, b), (a, a), (b, a), (b, b)]:
        assert_equal_to_plain(fn, first, second, calls=1)


def test_slices_of_one_tensor_through_the_same_code() -> None:
    # The region sees its argument first through a view operator, at another offset in every call.
    fn = fresh(lambda part, w: ((part.unsqueeze(0) + 1) * w).exp())
    whole, w = torch.randn(8, 4), torch.randn(2, 4, requires_grad=True)
    for part in [*whole.chunk(4), *whole.chunk(4)]:
        assert_equal_to_plain(fn, part, w, calls=1)


def test_a_program_of_one_device_is_not_followed_on_another() -> None:
    def body(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        h = x * w
        h.add_(1)
        return h.sin().exp()

    fn = fresh(body)
    meta = torch.randn(3, device="meta", requires_grad=True)
    elbowroom.checkpoint(fn, meta, torch.randn(3, device="meta")).sum().backward()
    assert_equal_to_plain(fn, torch.randn(3, requires_grad=True), torch.randn(3))
    elbowroom.checkpoint(fn, meta, torch.randn(3, device="meta")).sum().backward()


# What a call takes ---------------------------------------------------------------------------------------------------


def test_equal_blocks_share_their_programs() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.gelu(self.linear(x))

    model = nn.Sequential(*(elbowroom.wrap(Block()) for _ in range(5)))
    model(torch.randn(2, 4)).sum().backward()
    assert elbowroom.proof(model).programs <= 2  # the first block's input wants no gradient
    assert elbowroom.proof(model).calls == 5


def test_what_no_replay_reads_is_not_copied() -> None:
    def body(x: torch.Tensor, steps: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        steps.add_(1)
        state.mul_(0.9).add_(x.detach().mean())
        return (x + 2).sin()

    fn = fresh(body)
    x, steps, state = torch.randn(1000, requires_grad=True), torch.zeros(1000), torch.zeros(1000)
    for _ in range(3):
        before = held_bytes()
        out = elbowroom.checkpoint(fn, x, steps, state)
        (program,) = programs_of(fn)
        assert program.snapshots == {}
        assert held_bytes() - before == 4000  # the output
        held = [t for t in tape_of(program).held if isinstance(t, torch.Tensor) and t.numel() > 1]
        assert {t.untyped_storage()._cdata for t in held} == {x.untyped_storage()._cdata}
        del out, held
        assert held_bytes() == before


@pytest.mark.parametrize(
    "write",
    [
        lambda b: b.add_(1),
        lambda b: b.mul_(2).add_(1),
        lambda b: torch._foreach_add_([b], 1.0),
        lambda b: torch.add(b, 1, out=b),
        lambda b: b[1:].sub_(1),
        lambda b: b.copy_(b.flip(0)),
        lambda b: b.index_add_(0, torch.tensor([0, 0]), torch.ones(2)),
    ],
)
@pytest.mark.parametrize("read_first", [False, True])
def test_sources_written_by_the_region(write: Callable[[torch.Tensor], Any], read_first: bool) -> None:
    def body(x: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        b = b.clone() if b.requires_grad else b
        y = (x * b.sin()).exp() if read_first else x
        write(b)
        return (y * b.sin()).exp()

    fn = fresh(body)
    for call in range(4):
        x = torch.randn(4, requires_grad=True)
        runs = []
        for contender in (plain, elbowroom.checkpoint):
            b = torch.arange(4.0)
            runs.append([gradients(contender, fn, x, b), b])
        assert_same_bits(runs[0], runs[1], f"call {call + 1}: ")


def test_results_in_lists_inside_tuples_are_followed() -> None:
    fn = fresh(lambda x: _two(x)[0].sin() * _two(x)[1][0].exp())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_equal_to_plain(fn, torch.randn(3, requires_grad=True))
    assert elbowroom.proof(fn).kept == ()


@torch.library.custom_op("elbowroom_tests::two", mutates_args=())
def _two(x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    return x + 1, [x * 2]


_two.register_autograd(lambda ctx, grad, grads: grad + grads[0] * 2)


def test_one_result_kept_and_its_sibling_replayed() -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        values, order = (x * 2).sort()
        return (values * order.float() + 0).sin()

    keep = fresh(lambda v: v.operator is torch.ops.aten.sort.default and v.dtype is torch.float32)
    assert_equal_to_plain(fresh(body), torch.randn(5, requires_grad=True), keep=keep)


# When the recorder itself fails -----------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:elbowroom. recording region:RuntimeWarning")
def test_an_internal_error_keeps_everything_and_gradients_stay_right(monkeypatch: pytest.MonkeyPatch) -> None:
    from elbowroom.core import recorder

    original = recorder.Recorder._before

    def failing(self: Any, func: Any, *rest: Any) -> Any:
        if func is torch.ops.aten.tanh.default:
            raise LookupError("a defect of ours")
        return original(self, func, *rest)

    monkeypatch.setattr(recorder.Recorder, "_before", failing)
    buffer = torch.ones(4)

    def body(x: torch.Tensor) -> torch.Tensor:
        y = (x + buffer).sin() * 2
        return y.tanh().exp()

    assert_equal_to_plain(fresh(body), torch.randn(4, requires_grad=True))


def test_an_internal_error_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from elbowroom.core import recorder

    def failing(*args: Any) -> Any:
        raise LookupError("a defect of ours")

    monkeypatch.setattr(recorder.Recorder, "_before", failing)
    fn = fresh(lambda x: (x * 2).sin())
    x = torch.randn(4, requires_grad=True)
    with pytest.warns(RuntimeWarning, match=r"recording region .* failed \(LookupError: a defect of ours\)") as seen:
        [gradients(elbowroom.checkpoint, fn, x) for _ in range(3)]
    assert len(seen) == 1


@pytest.mark.filterwarnings("ignore:elbowroom. recording region:RuntimeWarning")
def test_a_write_after_an_internal_error_is_an_error_never_a_wrong_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    from elbowroom.core import recorder

    original = recorder.Recorder._before

    def failing(self: Any, func: Any, *rest: Any) -> Any:
        if func is torch.ops.aten.sum.default:
            raise LookupError("a defect of ours")
        return original(self, func, *rest)

    monkeypatch.setattr(recorder.Recorder, "_before", failing)
    buffer = torch.zeros(4)

    def body(x: torch.Tensor) -> torch.Tensor:
        total = (x + buffer).sin().sum()
        buffer.add_(1)
        return total

    x = torch.randn(4, requires_grad=True)
    out = elbowroom.checkpoint(fresh(body), x)
    try:
        out.backward()
    except elbowroom.ChangedTensorError:
        return
    assert torch.equal(x.grad, x.detach().cos())  # type: ignore[arg-type]
