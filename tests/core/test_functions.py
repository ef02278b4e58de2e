"""``replayable``: an ``autograd.Function`` as one operator of the tape."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from torch.autograd import Function

import elbowroom
from tests.core.counting import assert_equal_to_plain, fresh, gradients, plain


def write_raw(x: torch.Tensor, values: torch.Tensor) -> None:
    """A kernel that PyTorch does not see."""
    with torch._C.DisableTorchFunction():
        memory = (ctypes.c_float * x.numel()).from_address(x.data_ptr())
    for i, value in enumerate(values.flatten().tolist()):
        memory[i] = value


def kernel_square() -> Any:
    """x squared by a raw kernel; it also saves what it made on the way."""

    class Square(Function):
        runs = 0

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
            Square.runs += 1
            out, twice = torch.empty_like(x), torch.empty_like(x)
            write_raw(out, x.detach() * x.detach() * scale)
            write_raw(twice, 2 * x.detach() * scale)
            ctx.save_for_backward(twice)
            return out

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            (twice,) = ctx.saved_tensors
            return grad * twice, None

    return Square


def test_it_is_the_class_itself_and_a_decorator() -> None:
    square = kernel_square()
    assert elbowroom.replayable(square) is square
    assert elbowroom.replayable(square) is square
    x = torch.randn(3, requires_grad=True)
    assert torch.equal(square.apply(x), x.detach() ** 2)


@pytest.mark.parametrize("wrong", [3, torch.nn.Linear, lambda x: x])
def test_it_takes_function_classes_only(wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"replayable\(\) needs a subclass of torch\.autograd\.Function, got"):
        elbowroom.replayable(wrong)


def test_it_is_replayed_as_one_operator_and_holds_nothing() -> None:
    square = elbowroom.replayable(kernel_square())
    fn = fresh(lambda x: square.apply((x * 2).sin()).exp())
    x = torch.randn(5, requires_grad=True)
    assert_equal_to_plain(fn, x)
    found = elbowroom.proof(fn)
    assert (found.operators, found.proved, found.kept) == (4, 4, ())
    assert found.held_bytes == 5 * 4  # x
    before, runs = found.replays, square.runs
    elbowroom.checkpoint(fn, x).sum().backward()
    assert elbowroom.proof(fn).replays - before == 4
    assert square.runs - runs == 2  # forward and replay, and no proof at call 5


def test_without_it_what_the_kernel_made_is_kept() -> None:
    square = kernel_square()
    fn = fresh(lambda x: square.apply((x * 2).sin()).exp())
    x = torch.randn(5, requires_grad=True)
    assert_equal_to_plain(fn, x)
    rows = elbowroom.proof(fn).kept
    assert sum(row.nbytes for row in rows) == 2 * 5 * 4
    assert all("empty_like" in row.operator for row in rows)


def test_its_scalars_may_change() -> None:
    square = elbowroom.replayable(kernel_square())
    fn = fresh(lambda x, scale: square.apply((x * 2).sin(), scale).exp())
    x = torch.randn(5, requires_grad=True)
    for scale in (1.0, 1.0, 2.0, 3.0, 1.0):
        assert_equal_to_plain(fn, x, scale, calls=1)


def test_two_results_setup_context_and_nones() -> None:
    class Pair(Function):
        @staticmethod
        def forward(x: torch.Tensor, y: torch.Tensor | None) -> Any:
            return x.sin(), x.cos()

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.save_for_backward(inputs[0], inputs[1], output[0])
            ctx.set_materialize_grads(False)

        @staticmethod
        def backward(ctx: Any, one: Any, other: Any) -> Any:
            x, y, sine = ctx.saved_tensors
            assert y is None
            grad = 0
            if one is not None:
                grad = grad + one * x.cos()
            if other is not None:
                grad = grad - other * sine
            return grad, None

    pair = elbowroom.replayable(Pair)
    for use in (lambda a, b: a * b, lambda a, b: a.exp(), lambda a, b: b.exp()):
        fn = fresh(lambda x, use=use: use(*pair.apply(x * 2, None)).sin())
        assert_equal_to_plain(fn, torch.randn(4, requires_grad=True))


def test_a_subclass_runs_its_own_forward() -> None:
    @elbowroom.replayable
    class Double(Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad * 2

    class Triple(Double):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 3

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad * 3

    for cls, factor in [(Triple, 3.0), (elbowroom.replayable(Triple), 3.0), (Double, 2.0)]:
        x = torch.ones(2, requires_grad=True)
        assert torch.equal(cls.apply(x), torch.full((2,), factor))
        assert_equal_to_plain(fresh(lambda x, cls=cls: cls.apply(x.sin()).exp()), x)


def test_one_that_does_not_repeat_is_kept() -> None:
    class Counts(Function):
        n = 0

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            Counts.n += 1
            return x + Counts.n

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad

    counts = elbowroom.replayable(Counts)
    fn = fresh(lambda x: (counts.apply(x * 2) * 3).sin())
    elbowroom.checkpoint(fn, torch.randn(3, requires_grad=True)).sum().backward()
    (row,) = elbowroom.proof(fn).kept
    assert (row.operator, row.why) == ("autograd.Function Counts", "a second run gave other bits")


def test_one_that_draws() -> None:
    class Noise(Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            noise = torch.rand_like(x)
            ctx.save_for_backward(noise)
            return x * noise

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad * ctx.saved_tensors[0]

    noise = elbowroom.replayable(Noise)
    fn = fresh(lambda x: noise.apply(noise.apply(x * 2)).sin())
    assert_equal_to_plain(fn, torch.randn(6, requires_grad=True))
    assert elbowroom.proof(fn).kept == ()


def test_one_that_raises_and_is_caught_inside_the_region() -> None:
    class Picky(Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            if float(x.sum()) > 100:
                raise ValueError("too much")
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad * 2

    picky = elbowroom.replayable(Picky)

    def body(x: torch.Tensor) -> torch.Tensor:
        h = x + 1
        try:
            h = picky.apply(h)
        except ValueError:
            h = h * 3
        return h.sin().exp()

    fn = fresh(body)
    for size in (0.0, 0.0, 1000.0, 0.0, 1000.0, 1000.0, 0.0):
        assert_equal_to_plain(fn, torch.full((3,), size, requires_grad=True), calls=1)


def test_outside_of_regions_and_without_grad_it_is_a_plain_apply() -> None:
    square = elbowroom.replayable(kernel_square())
    x = torch.randn(3, requires_grad=True)
    with torch.no_grad():
        assert torch.equal(square.apply(x), x * x)
    assert all(torch.equal(a, b) for a, b in zip(gradients(plain, square.apply, x), [x * x, 2 * x], strict=True))  # type: ignore[arg-type]
    assert square.runs == 2
