"""In-place work and things changed between forward and backward, beyond cases 017-020, 030, 038, 046 and 052."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from tests.conformance.equality import grads, plain, seed_everything, training


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, requires_grad=True)


def fill_rows(t: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(t)
    for n, row in enumerate(t):
        out[n] = row.sin() * (n + 1)
    return out.exp()


def swap_halves(t: torch.Tensor) -> torch.Tensor:
    t = t * 1.0
    a, b = t[:2], t[2:]
    a.mul_(2)
    b.add_(a)
    return t.t().sigmoid_().t().sin()


def masked(t: torch.Tensor) -> torch.Tensor:
    t = t * 2
    t = t.masked_fill_(t.detach() > 1.5, 0.5).mul_(1.2)
    return t.cumsum_(0).sin()


def diagonal(t: torch.Tensor) -> torch.Tensor:
    t = t @ t
    t.diagonal().add_(1.0)
    t[0].copy_(t[1].detach())
    t.unsqueeze_(0).squeeze_(0).t_()
    return t.tanh()


def out_variants(t: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        scratch = torch.empty_like(t)
        torch.exp(t, out=scratch)
        torch.add(scratch, 1.0, out=scratch)
    return (t * scratch).sin() * scratch


def foreach(t: torch.Tensor) -> torch.Tensor:
    parts = [p * 1.0 for p in t.unbind(0)]
    torch._foreach_mul_(parts, 2.0)
    torch._foreach_sin_(parts)
    return torch.stack(parts).exp()


def chain_in_place(t: torch.Tensor) -> torch.Tensor:
    h = t * 2
    for _ in range(3):
        h = F.relu(F.leaky_relu(h + 0.1, 0.2, inplace=True) + 0.3, inplace=True)
        h = F.silu(h, inplace=False).add_(t)
    return h


def zero_then_add(t: torch.Tensor) -> torch.Tensor:
    total = torch.zeros_like(t)
    for n in range(4):
        total += t.sin() * n
        total.mul_(0.9)
    return total.exp()


WRITES = [fill_rows, swap_halves, masked, diagonal, out_variants, foreach, chain_in_place, zero_then_add]


@pytest.mark.parametrize("write", WRITES, ids=lambda f: f.__name__)
def test_kind_017_writes_inside(equal_to_plain: Any, write: Any) -> None:
    equal_to_plain(training(lambda: write, lambda: [leaf(4, 4)]))


def test_kind_017_in_place_on_the_output(equal_to_plain: Any) -> None:
    """Outputs of a region written in place afterwards, where plain autograd allows it; views of them too."""

    def program(call: Any) -> Any:
        x = leaf(6)
        seen = []
        for _ in range(3):
            y, view = call(lambda t: ((h := (t * 2).sin() + 1), h[:3]), x)
            y.mul_(3)
            y[1:2].add_(view[0:1])
            call(lambda t: t.mul_(2).exp(), y).sum().backward()
            seen.append(y.detach().clone())
        return seen, grads(x)

    equal_to_plain(program)


def test_kind_017_in_place_on_the_input(equal_to_plain: Any) -> None:
    """A region that writes over its input, which another region saved nothing of."""

    def program(call: Any) -> Any:
        x = leaf(6)
        for _ in range(3):
            h = x + 1
            y = call(lambda t: t.mul_(2).add_(1).sigmoid_(), h)
            y.pow(2).sum().backward()
        return [h.detach(), grads(x)]

    equal_to_plain(program)


WRITERS = {
    "mul_": lambda s: s.mul_(5),
    "copy_": lambda s: s.copy_(torch.zeros(4)),
    "setitem": lambda s: s.__setitem__(slice(0, 2), 3.0),
    "view": lambda s: s.view(2, 2)[0].zero_(),
    "foreach": lambda s: torch._foreach_add_([s], 1.0),
    "out": lambda s: torch.add(s, 1.0, out=s),
}


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("hidden_in", ["argument", "closure", "attribute", "dict"])
def test_kind_019_020_changed_source_never_silent(contender: Any, writer: str, hidden_in: str) -> None:
    """However a source is passed and overwritten: an error that says so, or the gradient of the old values."""
    w, s = torch.linspace(0.5, 2.0, 4).requires_grad_(), torch.ones(4)
    expected = torch.cos(w.detach())
    holder = nn.Module()
    holder.register_buffer("s", s)
    blocks = {
        "argument": (lambda w, s: (w * s).sin(), (w, s)),
        "closure": (lambda w: (w * s).sin(), (w,)),
        "attribute": (lambda w, m: (w * m.s).sin(), (w, holder)),
        "dict": (lambda w, d: (w * d["a"][0]).sin(), (w, {"a": [s]})),
    }
    fn, args = blocks[hidden_in]
    for _ in range(2):
        w.grad = None
        s.fill_(1.0)
        y = contender.checkpoint(fn, *args)
        WRITERS[writer](s)
        said = None
        try:
            y.sum().backward()
        except RuntimeError as error:
            said = str(error)
        if said is None:
            assert torch.equal(w.grad, expected)
        else:
            assert "modified" in said or "changed" in said


def test_kind_019_saved_activation_changed(contender: Any) -> None:
    """An activation that plain autograd saves and the user overwrites: an error there, so an error here."""
    x = leaf(4)
    for _ in range(2):
        h = x.exp()
        y = contender.checkpoint(lambda t: t.sin().exp(), h)
        h.detach().add_(1)
        with pytest.raises(RuntimeError, match=r"modified|changed"):
            y.sum().backward()


def test_kind_019_residual_added_in_place(equal_to_plain: Any) -> None:
    """``x += f(x)``, where plain autograd need not save x: right there, so right here."""

    def program(call: Any) -> Any:
        x, w = leaf(3, 4), leaf(4, 4)
        for _ in range(3):
            h = x * 1.0
            for _ in range(2):
                h += call(lambda t: (t + 1).mean(0, keepdim=True).expand(3, 4) @ w, h)
            h.pow(2).sum().backward()
        return grads(x, w)

    equal_to_plain(program)


@pytest.mark.parametrize("to", [True, False])
def test_kind_030_requires_grad_switched(equal_to_plain: Any, to: bool) -> None:
    """Parameters frozen or thawed after the forward, of one region and of a shared module."""

    def program(call: Any) -> Any:
        module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        module[0].requires_grad_(not to)
        x = leaf(3, 4)
        seen = []
        for _ in range(2):
            module[0].requires_grad_(not to)
            y = call(module, call(module, x))
            module[0].requires_grad_(to)
            y.sum().backward()
            seen.append(grads(x, module))
        return seen

    equal_to_plain(program)


def test_kind_038_functional_parameters(equal_to_plain: Any) -> None:
    """functional_call inside and around a region, with fast weights of an inner step (meta-learning)."""

    def program(call: Any) -> Any:
        net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
        x = leaf(5, 4)
        slow = dict(net.named_parameters())
        for _ in range(2):
            inner = functional_call(net, slow, (x,)).pow(2).mean()
            step = torch.autograd.grad(inner, list(slow.values()), create_graph=True)
            fast = {k: p - 0.1 * g for (k, p), g in zip(slow.items(), step, strict=True)}
            loss = call(lambda t, fast=fast: functional_call(net, fast, (t,)), x).pow(2).mean()
            loss.backward()
        return [loss.detach(), grads(x, net)]

    equal_to_plain(program)


def test_kind_038_optimizer_step_before_backward(contender: Any) -> None:
    """Weights stepped between forward and backward: plain autograd refuses, so must a region."""
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(2):
        x = leaf(3, 4)
        contender.checkpoint(module, x).sum().backward()
        y = contender.checkpoint(module, x)
        optimizer.step()
        with pytest.raises(RuntimeError, match=r"modified|changed"):
            y.sum().backward()
        optimizer.zero_grad()


def test_kind_046_weights_replaced_for_a_while(equal_to_plain: Any) -> None:
    """Weights moved away and back before backward (``p.data``), whole and as slices of one flat tensor."""

    def program(call: Any) -> Any:
        module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        x, seen = leaf(3, 4), []
        for flat in (False, True, True):
            if flat:
                store = torch.cat([torch.zeros(3), *[p.detach().flatten() for p in module.parameters()]])
                start = 3
                for p in module.parameters():
                    p.data = store[start : start + p.numel()].view_as(p)
                    start += p.numel()
            y = call(module, x)
            kept = [p.data.clone() for p in module.parameters()]
            for p in module.parameters():
                p.data = torch.empty(0)
            for p, full in zip(module.parameters(), kept, strict=True):
                p.data = full
            y.pow(2).sum().backward()
            seen.append(grads(x, module))
        return seen

    equal_to_plain(program)


def test_kind_052_mode_switched_between(equal_to_plain: Any) -> None:
    """train() and eval() switched between forward and backward, for dropout, BatchNorm and an own flag."""

    class Gate(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sin() if self.training else x.exp()

    def program(call: Any) -> Any:
        module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), Gate(), nn.Dropout(0.5), nn.Linear(4, 4))
        x, seen = leaf(6, 4), []
        for training_now in (True, False, True):
            module.train(training_now)
            y = call(module, x)
            module.train(not training_now)
            y.pow(2).sum().backward()
            seen.append([grads(x, module), module[1].running_var.clone()])
        return seen

    equal_to_plain(program)


def test_kind_052_attributes_switched_between(equal_to_plain: Any) -> None:
    """Layers replaced, deleted and reconfigured between forward and backward."""

    def program(call: Any) -> Any:
        module = nn.Sequential(nn.Linear(4, 4), nn.LeakyReLU(0.3), nn.Linear(4, 4))
        first, x = module[0], leaf(3, 4)
        y = call(module, x)
        module[1].negative_slope = 0.9
        module[0] = nn.Identity()
        del module[2]
        y.pow(2).sum().backward()
        return grads(x, first)

    equal_to_plain(program)


def test_plain_agrees_with_itself() -> None:
    """The control of the controls: the programs here are reproducible at all."""
    for write in WRITES:
        results = []
        for _ in range(2):
            seed_everything(3)
            results.append(plain(write, leaf(4, 4)))
        assert torch.equal(*results)
