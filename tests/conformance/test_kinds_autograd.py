"""Autograd's whole interface through regions, beyond cases 031-039, 065 and 076."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad

from tests.conformance.equality import assert_same_bits, grads, training


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, requires_grad=True)


def test_kind_031_grad_variants(equal_to_plain: Any) -> None:
    """grad_outputs, several outputs and inputs, allow_unused, materialize_grads, inputs inside the graph."""

    def program(call: Any) -> Any:
        x, w, unused = leaf(3, 4), leaf(4, 4), leaf(2)
        seen = []
        for _ in range(3):
            h = x.sin()
            a, b = call(lambda t: (torch.tanh(t @ w), (t @ w).exp()), h)
            seen += torch.autograd.grad([a, b], [x, w], [torch.ones_like(a), a.detach()], retain_graph=True)
            seen += torch.autograd.grad(a.sum(), [h, unused], retain_graph=True, allow_unused=True)
            seen += torch.autograd.grad(
                b.sum(), [x, unused], retain_graph=True, allow_unused=True, materialize_grads=True
            )
            torch.autograd.backward([a.sum(), b.sum()], inputs=[w])
        return seen, grads(x, w)

    equal_to_plain(program)


def test_kind_031_retained_graph(equal_to_plain: Any) -> None:
    """Backward three times over one graph of two regions, and once more after a partial one."""

    def program(call: Any) -> Any:
        x, w = leaf(3, 4), leaf(4, 4)
        y = call(lambda t: F.dropout((t @ w).sin(), 0.3).exp(), x)
        z = call(lambda t: F.gelu(t @ w).tanh(), y)
        for _ in range(2):
            z.sum().backward(retain_graph=True)
        y.sum().backward(retain_graph=True)
        torch.autograd.grad(z.sum(), y, retain_graph=True)
        z.pow(2).sum().backward()
        return grads(x, w)

    equal_to_plain(program)


def test_kind_031_second_backward_is_refused(contender: Any) -> None:
    """Without retain_graph the second backward is autograd's own error, as without checkpointing."""
    x = leaf(3)
    y = contender.checkpoint(lambda t: t.sin().exp().tanh(), x).sum()
    y.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        y.backward()


def test_kind_031_branches_one_by_one(equal_to_plain: Any) -> None:
    """One region's outputs go backward separately, with other regions between, in both orders."""

    def program(call: Any) -> Any:
        seen = []
        for order in ((0, 1, 2), (2, 0, 1)):
            x, w = leaf(4), leaf(4)
            shared = call(lambda t, w: t.sin() * w, x, w)
            outs = call(lambda t, w: (t.exp(), (t * w).tanh(), t.cos().exp()), shared, w)
            for n in order:
                outs[n].sum().backward(retain_graph=True)
                seen.append(grads(x, w))
        return seen

    equal_to_plain(program)


def test_kind_032_forces_in_regions(equal_to_plain: Any) -> None:
    """Energy to force to loss, each atom type a region; the inner graph is built in one region and used in another."""

    def program(call: Any) -> Any:
        nets = [nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)) for _ in range(2)]
        pos = leaf(4, 3)

        def force(p: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            energy = sum(net(p).sum() for net in nets)
            (g,) = torch.autograd.grad(energy, p, create_graph=True)
            return energy, -g

        seen = []
        for _ in range(3):
            energy, f = call(force, pos.sin())
            loss = call(lambda a, b: a.pow(2) + b.norm(dim=1).sum(), energy, f)
            loss.backward()
            seen.append(loss.detach())
        return seen, grads(pos, *nets)

    equal_to_plain(program)


def test_kind_033_double_backward(equal_to_plain: Any) -> None:
    """Hessian-vector products, gradient penalties and third derivatives through two regions."""

    def program(call: Any) -> Any:
        w, x, v = leaf(4, 4), leaf(3, 4), torch.randn(3, 4)
        seen = []
        for _ in range(2):
            y = call(lambda t: F.softplus(t @ w).sin(), call(lambda t: torch.tanh(t @ w), x)).sum()
            (g,) = torch.autograd.grad(y, x, create_graph=True)
            (hv,) = torch.autograd.grad((g * v).sum(), x, create_graph=True)
            (third,) = torch.autograd.grad(hv.pow(2).sum(), x, create_graph=True)
            (g.pow(2).sum() + hv.sum() + third.norm()).backward()
            seen += [g.detach(), hv.detach(), third.detach()]
        return seen, grads(w, x)

    equal_to_plain(program)


def test_kind_033_hessian_of_functional(equal_to_plain: Any) -> None:
    def program(call: Any) -> Any:
        x = torch.randn(4)
        fn = lambda t: call(lambda u: u.sin().exp() * u, t).sum()  # noqa: E731
        jacobian = torch.autograd.functional.jacobian(lambda t: call(lambda u: u.sin().exp(), t), x, vectorize=True)
        return torch.autograd.functional.hessian(fn, x), jacobian

    equal_to_plain(program)


def test_kind_033_gradcheck(contender: Any) -> None:
    """Numerical and analytical derivatives agree, first and second, also batched."""
    x = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)
    fn = lambda t: contender.checkpoint(lambda u: (u @ u.t()).sin().exp().tanh(), t)  # noqa: E731
    assert torch.autograd.gradcheck(fn, (x,), check_batched_grad=True)
    assert torch.autograd.gradgradcheck(fn, (x,))


class Cube(torch.autograd.Function):
    """Saves an input, an intermediate and an output; reads them in several ways; takes and gives non-tensors."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, power: float) -> Any:
        square = x * x
        out = square * x
        index = out.argmax()
        ctx.save_for_backward(x, square, out)
        ctx.attribute = square  # not through save_for_backward: a plain reference, as much code does
        ctx.power = power
        ctx.mark_non_differentiable(index)
        ctx.set_materialize_grads(False)
        return out * power, index

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor | None, _index: Any) -> Any:
        if g is None or not ctx.needs_input_grad[0]:
            return None, None
        assert len(ctx.saved_tensors) == 3
        x, square, out = ctx.saved_tensors
        again = ctx.saved_tensors[0]
        assert torch.equal(again, x)
        assert torch.equal(out, square * x)
        return g * 3 * (square + ctx.attribute) / 2 * ctx.power, None


class WritesItsInput(torch.autograd.Function):
    """A Function that works in place, marked dirty."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g * 2


class WritesItsSavedTensor(torch.autograd.Function):
    """A backward that uses its saved tensor as scratch space, as memory-frugal kernels do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x.exp())
        return x.exp()

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        (e,) = ctx.saved_tensors
        return e.mul_(g)


def test_kind_035_functions_of_many_kinds(equal_to_plain: Any) -> None:
    def block(t: torch.Tensor) -> torch.Tensor:
        cube, index = Cube.apply(t.sin(), 0.5)
        return WritesItsInput.apply(cube * 1.0).tanh() * (index + 1) + WritesItsSavedTensor.apply(t.cos()).sin()

    equal_to_plain(training(lambda: block, lambda: [leaf(5)]))


def test_kind_039_function_around_a_region(equal_to_plain: Any) -> None:
    """A Function whose forward and backward run a region under enable_grad (reversible layers do)."""

    def program(call: Any) -> Any:
        w = leaf(4, 4)

        class Reversible(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
                ctx.save_for_backward(x)
                return torch.tanh(x @ w)

            @staticmethod
            def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
                (x,) = ctx.saved_tensors
                with torch.enable_grad():
                    x = x.detach().requires_grad_()
                    y = call(lambda t: torch.tanh(t @ w), x)
                return torch.autograd.grad(y, x, g)[0]

        x = leaf(3, 4)
        for _ in range(2):
            call(lambda t: Reversible.apply(t.sin()).exp(), x).sum().backward()
        return grads(x)

    equal_to_plain(program)


# Forward derivatives of some operators come from torch.jit.script in torch itself.
JIT = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")


@JIT
def test_kind_036_function_transforms_around(equal_to_plain: Any) -> None:
    """torch.func around a region: grad, vmap, jacrev, jvp, and vmap of grad."""

    def program(call: Any) -> Any:
        x, w = torch.randn(3, 4), torch.randn(4)
        fn = lambda t: call(lambda u: (u * w).sin().exp(), t).sum()  # noqa: E731
        func = torch.func
        return [
            func.grad(fn)(x[0]),
            func.vmap(func.grad(fn))(x),
            func.jacrev(lambda t: call(torch.sin, t))(x[0]),
            func.jvp(lambda t: call(torch.exp, t), (x,), (x,)),
            func.vmap(lambda t: call(torch.tanh, t))(x),
        ]

    equal_to_plain(program)


def test_kind_036_vmap_inside(equal_to_plain: Any) -> None:
    block = lambda t: torch.func.vmap(lambda r: (r.sin() * r.sum()).exp())(t).tanh()  # noqa: E731
    equal_to_plain(training(lambda: block, lambda: [leaf(3, 4)]))


@JIT
def test_kind_036_forward_mode(equal_to_plain: Any) -> None:
    """Dual numbers through a region."""

    def program(call: Any) -> Any:
        x, t = leaf(4), torch.randn(4)
        with forward_ad.dual_level():
            y = call(lambda u: u.sin().exp(), forward_ad.make_dual(x, t))
            value, tangent = forward_ad.unpack_dual(y)
            value.sum().backward()
        return [value.detach(), tangent.detach(), grads(x)]

    equal_to_plain(program)


def test_kind_036_batched_gradients(equal_to_plain: Any) -> None:
    """is_grads_batched: backward itself runs under vmap, over dropout."""

    def program(call: Any) -> Any:
        x = leaf(5)
        y = call(lambda t: F.dropout(t.sin(), 0.5).exp(), x)
        return torch.autograd.grad(y, x, torch.eye(5), is_grads_batched=True)

    equal_to_plain(program)


def test_kind_065_nesting(equal_to_plain: Any) -> None:
    """Regions in regions, torch's checkpoint in and around them, one block on several levels."""

    def program(call: Any) -> Any:
        from torch.utils.checkpoint import checkpoint as torch_checkpoint

        module, x = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Dropout(0.3)), leaf(4, 6)
        inner = lambda t: call(module, t).sin()  # noqa: E731
        of_torch = lambda t: torch_checkpoint(inner, t, use_reentrant=False).exp()  # noqa: E731
        seen = []
        for _ in range(3):
            y = call(inner, x)
            y = call(lambda t: of_torch(t).tanh() * t, y)
            y = torch_checkpoint(lambda t: call(inner, t).cos(), y, use_reentrant=False)
            y = call(lambda t: call(lambda u: call(inner, u), t) + t, y)
            y.sum().backward()
            seen.append(y.detach())
        return seen, grads(x, module)

    equal_to_plain(program)


def test_kind_076_training_inside(equal_to_plain: Any) -> None:
    """An inner optimisation loop in the region (test-time training): backward and optimizer steps included."""

    def program(call: Any) -> Any:
        outer, x = nn.Linear(4, 4), leaf(3, 4)

        def block(t: torch.Tensor) -> torch.Tensor:
            probe = nn.Linear(4, 1)
            optimizer = torch.optim.Adam(probe.parameters(), lr=0.1)
            for _ in range(3):
                optimizer.zero_grad()
                probe(t.detach()).pow(2).sum().backward()
                optimizer.step()
            return torch.tanh(outer(t)) * probe(t).detach().sigmoid()

        for _ in range(2):
            call(block, x).sum().backward()
        return grads(x, outer)

    equal_to_plain(program)


def test_kind_threads(equal_to_plain: Any) -> None:
    """Forward in one thread and backward in another; four threads with regions of their own over shared weights."""

    def program(call: Any) -> Any:
        module = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        inputs = [torch.randn(3, 6, requires_grad=True) for _ in range(4)]
        failures: list[BaseException] = []

        def work(x: torch.Tensor) -> None:
            try:
                for _ in range(5):
                    y = call(module, x.sin())
                    torch.autograd.grad(y.pow(2).sum(), list(module.parameters()), retain_graph=True)
                    y.sum().backward(inputs=[x])
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(x,)) for x in inputs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures, failures[0]
        y = call(module, inputs[0])
        crossing = threading.Thread(target=lambda: y.sum().backward())
        crossing.start()
        crossing.join()
        return grads(*inputs, module)

    equal_to_plain(program)


def test_kind_threads_share_one_graph(contender: Any) -> None:
    """Eight threads ask the same retained graph for gradients at once: each gets them whole."""
    x, w = leaf(64), leaf(64)
    y = contender.checkpoint(lambda t: ((t * w).sin().exp() * w).tanh(), x).sum()
    expected = torch.autograd.grad(y, [x, w], retain_graph=True)
    found: list[Any] = []

    def work() -> None:
        for _ in range(10):
            found.append(torch.autograd.grad(y, [x, w], retain_graph=True))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 80
    for gradients in found:
        assert_same_bits(expected, gradients)
