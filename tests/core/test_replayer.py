"""Lifetimes to the byte, what is asked from the tape, and what happens when something was changed or fails."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.autograd import Function

import elbowroom
from elbowroom.core.proof import fingerprint
from elbowroom.core.replayer import Handle
from elbowroom.errors import ChangedTensorError, ReplayError
from tests.core.counting import (
    assert_equal_to_plain,
    fresh,
    gradients,
    held_bytes,
    plain,
    programs_of,
    tape_of,
    tapes_of,
)

KIB = 1024
N = 256  # a vector of float32: 1 KiB


@pytest.fixture(autouse=True)
def _no_collector() -> Iterator[None]:
    """Memory must fall without the garbage collector (rule 4)."""
    fingerprint(torch.zeros(1))  # its weights stay
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Probe(Function):
    """Does nothing, and writes down in backward how many bytes Python holds."""

    log: list[int] = []

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        Probe.log.append(held_bytes() - grad.untyped_storage().nbytes())
        return grad


def chain(x: torch.Tensor, depth: int) -> torch.Tensor:
    for _ in range(depth):
        x = Probe.apply(x.sin() + 1.5)
    return x


def silent_chain(x: torch.Tensor, depth: int) -> torch.Tensor:
    for _ in range(depth):
        x = x.sin() + 1.5
    return x


def keep_sums(value: Any) -> bool:
    return value.operator is torch.ops.aten.add.Tensor


@pytest.mark.parametrize("depth", [1, 4, 7])
def test_a_forward_holds_its_input_only(depth: int) -> None:
    fn = fresh(chain)
    x = torch.randn(N, requires_grad=True)
    for _ in range(3):
        before = held_bytes()
        out = elbowroom.checkpoint(fn, x, depth)
        assert held_bytes() - before == KIB  # the output; the input is the caller's own
        del out
        assert held_bytes() == before


def test_kept_values_are_released_one_by_one() -> None:
    fn = fresh(chain)
    x = torch.randn(N, requires_grad=True)
    for _ in range(3):
        before = held_bytes()
        loss = elbowroom.checkpoint(fn, x, 5, keep=keep_sums).neg()
        # Of 5 sums 4 are saved by the next sin(); the last is the output, and nobody saves it.
        assert held_bytes() - before == 4 * KIB + KIB
        Probe.log.clear()
        loss.backward(torch.ones(N))
        x.grad = None
        falling = [b - a for a, b in zip(Probe.log, Probe.log[1:], strict=False)]
        # Probe k runs after sin() number k + 1 has given back what it saved.
        assert falling == [-KIB] * 4, Probe.log
        del loss
        assert held_bytes() == before


def test_the_working_set_shrinks_as_backward_proceeds() -> None:
    fn = fresh(chain)
    x = torch.randn(N, requires_grad=True)
    for _ in range(3):
        loss = elbowroom.checkpoint(fn, x, 5).neg()
        Probe.log.clear()
        loss.backward(torch.ones(N))
        x.grad = None
        # The first probe comes before any replay; then the 4 saved inputs of sin() are there, less the one asked.
        assert [seen - Probe.log[0] for seen in Probe.log[1:]] == [3 * KIB, 2 * KIB, KIB, 0], Probe.log


def test_a_retained_graph_keeps_the_saving() -> None:
    fn = fresh(silent_chain)
    x = torch.randn(N, requires_grad=True)
    for _ in range(3):
        loss = elbowroom.checkpoint(fn, x, 6).sum()
        before = held_bytes()
        for _ in range(3):
            torch.autograd.grad(loss, x, retain_graph=True)
            assert held_bytes() == before
        tape = tape_of(programs_of(fn)[0])
        assert tape._cache == {}
        torch.autograd.grad(loss, x)
        del tape
        assert tapes_of(fn) == []


def test_a_partial_backward_leaves_no_caches() -> None:
    def two(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = (x * 2).sin() * 3
        return h.sin(), h.cos()

    fn = fresh(two)
    x = torch.randn(N, requires_grad=True)
    for _ in range(3):
        one, other = elbowroom.checkpoint(fn, x)
        before = held_bytes()
        torch.autograd.grad(one.sum(), x, retain_graph=True)
        assert held_bytes() == before
        torch.autograd.grad(other.sum(), x)
        del one, other
        assert tapes_of(fn) == []


def test_a_handle_that_dies_early_releases_its_values() -> None:
    def branch(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (x + 2).sin(), (x + 3).exp().exp()

    fn = fresh(branch)
    x = torch.randn(N, requires_grad=True)
    for keep in (None, lambda v: True):
        one, other = elbowroom.checkpoint(fn, x, keep=keep)
        before = held_bytes()
        del other  # kept: what both exp() saved, their results; the second result is the output itself
        assert before - held_bytes() == (KIB if keep is None else 2 * KIB)
        one.sum().backward()
        del one
        assert tapes_of(fn) == []


def test_a_handle_that_dies_in_the_forward_is_counted() -> None:
    def dropped(x: torch.Tensor) -> torch.Tensor:
        (x + 5).sin()  # its node dies at once
        return (x + 2).sin()

    fn = fresh(dropped)
    x = torch.randn(N, requires_grad=True)
    assert_equal_to_plain(fn, x)
    out = elbowroom.checkpoint(fn, x)
    tape = tape_of(programs_of(fn)[0])
    assert sum(tape._live) == 1
    assert tape._op_counts.count(0) == len(tape._op_counts) - 1  # x + 2 alone can still be needed
    del out, tape


def test_nothing_is_left_after_training_steps() -> None:
    fn = fresh(silent_chain)
    x = torch.randn(N, requires_grad=True)
    torch.autograd.grad(elbowroom.checkpoint(fn, x, 3).sum(), x)
    before = held_bytes()
    for _ in range(5):
        torch.autograd.grad(elbowroom.checkpoint(fn, x, 3).sum(), x)
    assert held_bytes() == before
    assert tapes_of(fn) == []


def test_an_exception_in_backward_leaves_the_graph_usable() -> None:
    class Boom(Function):
        armed = True

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            if Boom.armed:
                raise ValueError("boom")
            return grad

    def body(x: torch.Tensor) -> torch.Tensor:
        return (Boom.apply((x * 2).sin()) * 3).sin()

    x = torch.randn(N, requires_grad=True)
    loss = elbowroom.checkpoint(fresh(body), x).sum()
    with pytest.raises(ValueError, match="boom"):
        loss.backward(retain_graph=True)
    Boom.armed = False
    (found,) = torch.autograd.grad(loss, x)
    (expected,) = torch.autograd.grad(body(x).sum(), x)
    assert torch.equal(found, expected)


# Asking --------------------------------------------------------------------------------------------------------------


class ReadsTwice(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (one,), (other,) = ctx.saved_tensors, ctx.saved_tensors
        return grad * one.cos() * (one == other)


def test_reading_twice_replays_once() -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        return ReadsTwice.apply((x * 2).sin())

    fn = fresh(body)
    x = torch.randn(N, requires_grad=True)
    assert_equal_to_plain(fn, x, calls=2)
    before = elbowroom.proof(fn).replays
    elbowroom.checkpoint(fn, x).sum().backward()
    assert elbowroom.proof(fn).replays - before == 2  # x * 2 and its sin(), once each


def test_asking_outside_of_a_backward_leaves_nothing_behind() -> None:
    fn = fresh(lambda x: (x * 2).sin())
    x = torch.randn(N, requires_grad=True)
    out = elbowroom.checkpoint(fn, x)
    before = held_bytes()
    assert torch.equal(out.grad_fn._saved_self, x * 2)
    assert held_bytes() == before
    assert tape_of(programs_of(fn)[0])._cache == {}


def test_a_graph_may_be_asked_by_many_threads() -> None:
    fn = fresh(lambda x: silent_chain(x, 5))
    x = torch.randn(N, requires_grad=True)
    loss = elbowroom.checkpoint(fn, x).sum()
    (expected,) = torch.autograd.grad(loss, x, retain_graph=True)
    wrong: list[str] = []

    def work() -> None:
        for _ in range(10):
            (found,) = torch.autograd.grad(loss, x, retain_graph=True)
            if not torch.equal(found, expected):
                wrong.append("other bits")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


# Changed under us ----------------------------------------------------------------------------------------------------


class WritesOnSaved(Function):
    """A custom backward that uses what it saved as its own scratch memory: legal without checkpointing."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        x.mul_(0)
        return grad * 2


@pytest.mark.parametrize("keep", [None, "matmuls"])
def test_a_backward_that_writes_on_what_it_saved_disturbs_nobody(keep: Any) -> None:
    def body(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        h = x @ w
        return (h + 1).sin().sum() + WritesOnSaved.apply(h).sum()

    x, w = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    assert_equal_to_plain(fresh(body), x, w, keep=keep)


def test_a_changed_kept_value_is_replayed() -> None:
    def body(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = x @ w
        return (h * 2 + 1).sin(), h  # plain autograd saves h * 2 + 1, not h

    fn = fresh(body)
    for call in range(3):
        x, w = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
        out, h = elbowroom.checkpoint(fn, x, w, keep="matmuls")
        with torch.no_grad():
            h.zero_()
        (found,) = torch.autograd.grad(out.sum(), x)
        (expected,) = torch.autograd.grad(body(x, w)[0].sum(), x)
        assert torch.equal(found, expected), f"call {call + 1}"


def test_a_changed_source_names_argument_operator_and_remedy() -> None:
    fn = fresh(lambda x, scale: (x * scale + 1).sin())
    x, scale = torch.randn(4, requires_grad=True), torch.randn(4)
    for _ in range(3):
        out = elbowroom.checkpoint(fn, x, scale)
        scale.add_(1)
        with pytest.raises(ChangedTensorError) as caught:
            out.sum().backward()
        text = str(caught.value)
        assert text.startswith("argument 1 (float32[4])")
        assert caught.value.found_version == caught.value.recorded_version + 1  # type: ignore[operator]
        assert "Change it after backward, or give the region a copy" in text
    assert "aten.mul" in text


def test_a_changed_activation_is_not_missed_where_plain_did_not_save_it() -> None:
    fn = fresh(lambda x: (x + 1).sin())
    for call in range(3):
        leaf = torch.randn(4, requires_grad=True)
        x = leaf * 2
        out = elbowroom.checkpoint(fn, x)
        with torch.no_grad():
            x.zero_()
        (found,) = torch.autograd.grad(out.sum(), leaf)
        assert torch.equal(found, (leaf.detach() * 2 + 1).cos() * 2), f"call {call + 1}"


# Failing -------------------------------------------------------------------------------------------------------------

_failing: dict[str, Exception | None] = {"error": None}


@torch.library.custom_op("elbowroom_tests::moody", mutates_args=())
def moody(x: torch.Tensor) -> torch.Tensor:
    if _failing["error"] is not None:
        raise _failing["error"]
    return x + 1


moody.register_autograd(lambda ctx, grad: grad)


def test_an_operator_that_fails_in_a_replay_says_where_it_came_from() -> None:
    fn = fresh(lambda x: (moody(x * 2) * 3).sin())
    out = elbowroom.checkpoint(fn, torch.randn(2, 5, requires_grad=True), verify="never")
    _failing["error"] = ValueError("not today")
    try:
        with pytest.raises(ReplayError) as caught:
            out.sum().backward()
    finally:
        _failing["error"] = None
    error = caught.value
    assert "elbowroom_tests.moody" in error.operator
    assert error.shapes == "float32[2, 5]"
    assert __file__ in error.line
    assert "<lambda>" in error.region
    assert isinstance(error.__cause__, ValueError)
    assert "ValueError: not today" in str(error)


def test_out_of_memory_stays_out_of_memory() -> None:
    fn = fresh(lambda x: (moody(x * 2) * 3).sin())
    out = elbowroom.checkpoint(fn, torch.randn(2, 5, requires_grad=True), verify="never")
    _failing["error"] = torch.OutOfMemoryError("no room")
    try:
        with pytest.raises(torch.OutOfMemoryError, match="no room"):
            out.sum().backward()
    finally:
        _failing["error"] = None


def test_replays_leave_grad_mode_and_default_dtype_alone() -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        torch.set_default_dtype(torch.float64)
        try:
            y = x * torch.ones(4) * 2
        finally:
            torch.set_default_dtype(torch.float32)
        return y.sin()

    x = torch.randn(4, requires_grad=True)
    assert_equal_to_plain(fresh(body), x)
    assert torch.get_default_dtype() is torch.float32
    assert torch.is_grad_enabled()


def test_handles_hold_two_words() -> None:
    fn = fresh(lambda x: (x * 2).sin())
    out = elbowroom.checkpoint(fn, torch.randn(4, requires_grad=True))
    handle = out.grad_fn._raw_saved_self.data
    assert type(handle) is Handle
    assert handle.tape is tape_of(programs_of(fn)[0])
    assert (handle.tape.program.slots[handle.index].bound, Handle.__slots__) == (1, ("index", "tape"))


def test_gradients_helper_can_tell_a_difference() -> None:
    """The yardstick itself: it compares outputs and gradients."""
    x = torch.ones(2, requires_grad=True)
    assert torch.equal(gradients(plain, lambda x: x * 2, x)[1], torch.full((2,), 2.0))
