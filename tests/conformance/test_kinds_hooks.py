"""Hooks, exceptions and outer saved-tensor hooks, beyond cases 040-043, 058, 059, 067, 077 and 079."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.conformance.equality import grads


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, requires_grad=True)


def test_kind_040_parameter_hooks_with_accumulation(equal_to_plain: Any) -> None:
    """Hooks of a weight used in two regions, over micro-batches: how often, in which order, with what."""

    def program(call: Any) -> Any:
        tied, own = nn.Linear(4, 4), nn.Linear(4, 4)
        log: list[Any] = []
        for name, p in [("tied", tied.weight), ("own", own.weight)]:
            p.register_hook(lambda g, name=name: log.append((name, g.clone())))
            p.register_post_accumulate_grad_hook(lambda p, name=name: log.append((f"{name} done", p.grad.clone())))
        for _ in range(3):
            y = call(lambda t: torch.tanh(tied(t)).sin(), leaf(3, 4))
            y = call(lambda t: torch.tanh(own(t)).sin(), y)
            call(lambda t: torch.tanh(tied(t)).sin(), y).sum().backward()
        return log

    equal_to_plain(program)


def test_kind_041_042_all_module_hooks(equal_to_plain: Any) -> None:
    """Forward, pre-, full-backward and global hooks: how often, in which order, and results they replace."""

    def program(call: Any) -> Any:
        module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        log: list[str] = []
        for name, part in module.named_modules():
            part.register_forward_pre_hook(lambda m, i, name=name: log.append(f"pre {name}"))
            part.register_forward_hook(lambda m, i, o, name=name: log.append(f"forward {name}"), always_call=True)
            part.register_full_backward_pre_hook(lambda m, g, name=name: log.append(f"backward pre {name}"))
            part.register_full_backward_hook(lambda m, gi, go, name=name: log.append(f"backward {name}"))
        module[1].register_forward_hook(lambda m, i, o: o * 2)
        module[0].register_full_backward_hook(lambda m, gi, go: (gi[0] * 0.5,))
        world = nn.modules.module.register_module_forward_hook(lambda m, i, o: log.append(type(m).__name__))
        try:
            x = leaf(2, 4)
            for _ in range(3):
                call(module, x).sum().backward()
        finally:
            world.remove()
        return log, grads(x, module)

    equal_to_plain(program)


def test_kind_043_hooks_come_and_go(equal_to_plain: Any) -> None:
    """Hooks added after the forward, and hooks that remove themselves."""

    def program(call: Any) -> Any:
        module, x, calls = nn.Linear(4, 4), leaf(3, 4), []
        for n in range(3):
            handles: list[Any] = []
            hook = lambda m, i, o, n=n, h=handles: (calls.append(n), h.pop().remove(), o.sin())[2]  # noqa: E731
            handles.append(module.register_forward_hook(hook))
            y = call(lambda t: torch.tanh(module(t)), x)
            late = module.register_forward_hook(lambda m, i, o: o * 100)
            y.sum().backward()
            late.remove()
        return calls, grads(x, module)

    equal_to_plain(program)


def test_kind_058_exceptions_of_all_kinds(contender: Any) -> None:
    """The very exception object comes out, also of a nested region, and nothing is left switched on."""

    class Stop(BaseException):
        pass

    x = leaf(5)
    for error in (
        ValueError("bad batch"),
        KeyboardInterrupt(),
        torch.OutOfMemoryError("full"),
        Stop(),
        StopIteration(3),
    ):

        def bad(t: torch.Tensor, error: BaseException = error) -> torch.Tensor:
            h = t.sin().exp()
            raise error
            return h

        for fn in (bad, lambda t: contender.checkpoint(bad, t.sin()).exp()):
            state = torch.get_rng_state()
            with pytest.raises(type(error)) as raised:
                contender.checkpoint(fn, x)
            assert raised.value is error
            assert torch.equal(state, torch.get_rng_state())
            assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
            assert torch.is_grad_enabled()
            x.grad = None
            contender.checkpoint(lambda t: t.sin().exp(), x).sum().backward()
            assert torch.equal(x.grad, torch.exp(torch.sin(x.detach())) * torch.cos(x.detach()))


def test_kind_058_torch_error_inside(contender: Any) -> None:
    """A shape error of torch's own is the same error, and can be caught inside the region too."""
    w = leaf(3, 4)
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        contender.checkpoint(lambda t: (t.sin() @ w).exp(), leaf(2, 2))

    def recovers(t: torch.Tensor) -> torch.Tensor:
        try:
            t = t @ w
        except RuntimeError:
            t = t @ t
        return t.sin().exp()

    for _ in range(3):
        x = leaf(2, 2)
        contender.checkpoint(recovers, x).sum().backward()
        found, x.grad = x.grad, None
        recovers(x).sum().backward()
        assert torch.equal(found, x.grad)


def test_kind_059_exception_in_backward(contender: Any) -> None:
    """A Function's or a hook's error comes out of backward as it is; random streams and the next step are unharmed."""

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
            raise OverflowError("in backward")

    x = leaf(6)
    y = contender.checkpoint(lambda t: F.dropout(Fails.apply(F.dropout(t, 0.5).sin()), 0.5).exp(), x)
    state = torch.get_rng_state()
    with pytest.raises(OverflowError, match="in backward"):
        y.sum().backward()
    assert torch.equal(state, torch.get_rng_state())
    x.grad = None
    contender.checkpoint(lambda t: t.sin(), x).sum().backward()
    assert torch.equal(x.grad, torch.cos(x.detach()))


def test_kind_067_outer_hooks_see_sources_and_results(equal_to_plain: Any) -> None:
    """Offloading hooks around, inside and nested around regions; torch's save_on_cpu."""

    def program(call: Any) -> Any:
        module, x = nn.Linear(4, 4), leaf(3, 4)

        def offloaded(t: torch.Tensor) -> torch.Tensor:
            with torch.autograd.graph.save_on_cpu():
                return torch.tanh(module(t)).exp()

        seen = []
        for _ in range(3):
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone() * 2, lambda t: t / 2):
                y = call(offloaded, x)
                y = call(lambda t: torch.sin(module(t)).exp(), y)
            with torch.autograd.graph.save_on_cpu():
                y = call(lambda t: call(lambda u: torch.cos(module(u)), t).exp(), y)
            y.sum().backward()
            seen.append(y.detach())
        return seen, grads(x, module)

    equal_to_plain(program)


def test_kind_067_hooks_disabled_around(equal_to_plain: Any) -> None:
    """Where saved-tensor hooks are disabled a region is a plain call."""

    def program(call: Any) -> Any:
        x = leaf(4)
        with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
            call(lambda t: t.sin().exp(), x).sum().backward()
        return grads(x)

    equal_to_plain(program)


def test_kind_067_mutation_allowed_around(equal_to_plain: Any) -> None:
    """allow_mutation_on_saved_tensors: torch clones what is overwritten, inside regions too."""

    def program(call: Any) -> Any:
        x = leaf(4)
        with torch.autograd.graph.allow_mutation_on_saved_tensors():
            h = x.exp()
            y = call(lambda t: t.sin().exp(), h)
            h.add_(3)
            y.sum().backward()
        return grads(x)

    equal_to_plain(program)


def test_kind_077_steps_inside_backward(equal_to_plain: Any) -> None:
    """Adam stepping each weight from its post-accumulate hook, gradient set to None, over several steps."""

    def program(call: Any) -> Any:
        module, x = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)]), leaf(3, 4)
        optimizers = {p: torch.optim.Adam([p], lr=0.05, foreach=False) for p in module.parameters()}

        def step(p: torch.Tensor) -> None:
            optimizers[p].step()
            optimizers[p].zero_grad()

        for p in module.parameters():
            p.register_post_accumulate_grad_hook(step)
        for _ in range(4):
            y = x
            for block in module:
                y = call(block, y)
            y.pow(2).sum().backward()
        return [p.detach().clone() for p in module.parameters()], grads(x)

    equal_to_plain(program)


def test_kind_079_hooks_on_values_inside(equal_to_plain: Any) -> None:
    """register_hook, retain_grad, grad_fn pre- and post-hooks and multi-grad hooks on activations inside a region."""

    def program(call: Any) -> Any:
        module, x = nn.Linear(4, 4), leaf(3, 4)
        log: list[Any] = []
        kept: list[torch.Tensor] = []

        def block(t: torch.Tensor) -> torch.Tensor:
            h = torch.tanh(module(t))
            h.retain_grad()
            kept.append(h)
            h.register_hook(lambda g: g * 2)
            e = h.exp()
            e.grad_fn.register_hook(lambda gi, go: log.append((gi[0].clone(), go[0].clone())))
            e.grad_fn.register_prehook(lambda go: log.append(go[0].clone()))
            torch.autograd.graph.register_multi_grad_hook([h, e], lambda gs: log.append(len(gs)))
            return e.sin()

        for _ in range(3):
            call(block, x).sum().backward()
        return log, [h.grad for h in kept], grads(x, module)

    equal_to_plain(program)
