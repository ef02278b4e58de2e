"""State that the forward changes, beyond cases 003-018, 061, 063, 073 and 074: it changes once, as in a plain call."""

from __future__ import annotations

import contextlib
import contextvars
import copy
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.conformance.equality import grads, training


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, requires_grad=True)


NORMS = {
    "batch_norm_1d": (lambda: nn.BatchNorm1d(6), (8, 6)),
    "batch_norm_2d": (lambda: nn.BatchNorm2d(3), (4, 3, 5, 5)),
    "batch_norm_3d": (lambda: nn.BatchNorm3d(2), (3, 2, 3, 3, 3)),
    "cumulative_average": (lambda: nn.BatchNorm1d(6, momentum=None), (8, 6)),
    "not_affine": (lambda: nn.BatchNorm1d(6, affine=False), (8, 6)),
    "instance_norm": (lambda: nn.InstanceNorm2d(3, track_running_stats=True, affine=True), (2, 3, 5, 5)),
    "lazy": (lambda: nn.LazyBatchNorm1d(), (8, 6)),
}


@pytest.mark.parametrize("norm", NORMS)
def test_kind_010_norm_statistics(equal_to_plain: Any, norm: str) -> None:
    """Running statistics after three training steps, each with other data."""
    make, shape = NORMS[norm]

    def program(call: Any) -> Any:
        module = nn.Sequential(make(), nn.Tanh())
        seen = []
        for _ in range(3):
            x = leaf(*shape)
            call(module, x).pow(2).sum().backward()
            seen.append([grads(x, module), copy.deepcopy(dict(module.named_buffers()))])
        return seen

    equal_to_plain(program)


def test_kind_010_norm_used_twice_and_in_eval(equal_to_plain: Any) -> None:
    """One BatchNorm in two regions of a step (tied), its statistics read between them and in eval mode."""

    def program(call: Any) -> Any:
        module = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh())
        seen = []
        for _ in range(2):
            x = leaf(8, 6)
            y = call(module, x)
            middle = module[1].running_mean.clone()
            y = call(module, y)
            module.eval()
            y = call(module, y)
            module.train()
            y.pow(2).sum().backward()
            seen.append([middle, grads(x, module), list(module[1].state_dict().values())])
        return copy.deepcopy(seen)

    equal_to_plain(program)


def test_kind_011_parametrized_spectral_norm(equal_to_plain: Any) -> None:
    """The new-style spectral norm: power iteration in a parametrization, its buffers written in place."""
    make = lambda: torch.nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6))  # noqa: E731
    equal_to_plain(training(make, lambda: [leaf(4, 6)]))


class Codebook(nn.Module):
    """A vector-quantised bottleneck whose codebook follows a moving average (VQ-EMA)."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(5, 4))
        self.register_buffer("counts", torch.ones(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        index = torch.cdist(x.detach(), self.codes).argmin(-1)
        chosen = F.one_hot(index, 5).type_as(x)
        quantized = self.codes[index]
        if self.training:
            self.counts.mul_(0.9).add_(chosen.sum(0), alpha=0.1)
            self.codes.lerp_((chosen.t() @ x.detach()) / self.counts[:, None], 0.1)
        return (x + (quantized - x).detach()).sin() + (x - quantized).pow(2)


def test_kind_011_moving_average_codebook(equal_to_plain: Any) -> None:
    equal_to_plain(training(Codebook, lambda: [leaf(7, 4)], steps=4))


@pytest.mark.parametrize("preallocated", [True, False])
def test_kind_013_cache_over_several_calls(equal_to_plain: Any, preallocated: bool) -> None:
    """A key-value cache that two layers fill over three positions, in a list or in a preallocated tensor."""

    def program(call: Any) -> Any:
        weights = [leaf(8, 8) for _ in range(2)]
        store, lists, outs = torch.zeros(2, 6, 8), [[], []], []

        def attend(q: torch.Tensor, layer: int, position: int) -> torch.Tensor:
            k = q @ weights[layer]
            if preallocated:
                store[layer, position : position + 2] = k.detach()
                keys = torch.cat([store[layer, :position], k])
            else:
                lists[layer].append(k)
                keys = torch.cat(lists[layer])
            return torch.softmax(q @ keys.t(), -1) @ keys

        x = leaf(2, 8)
        for position in (0, 2, 4):
            h = x.sin()
            for layer in range(2):
                h = call(attend, h, layer, position)
            outs.append(h)
        torch.cat(outs).pow(2).sum().backward()
        return [grads(x, *weights), store, [len(kept) for kept in lists]]

    equal_to_plain(program)


def test_kind_014_containers_rewritten(equal_to_plain: Any) -> None:
    """Lists popped, extended and sorted, a set and an object's attributes rewritten inside the region."""

    class Box:
        def __init__(self, value: torch.Tensor) -> None:
            self.value = value

    def block(items: list[torch.Tensor], box: Box, table: dict[str, Any]) -> torch.Tensor:
        items.append(items.pop(0).sin())
        items.insert(0, items[-1].exp() * box.value)
        box.value = items[0].tanh()
        table.setdefault("seen", []).append(len(items))
        table["last"] = box.value
        return box.value + items[1].cos()

    def program(call: Any) -> Any:
        x, w = leaf(5), leaf(5)
        items, box, table = [x, w], Box(w), {}
        for _ in range(3):
            y = call(block, items, box, table)
        y.sum().backward()
        return [grads(x, w), len(items), table["seen"]]

    equal_to_plain(program)


def test_kind_015_generators_and_iterators(equal_to_plain: Any) -> None:
    """zip, map, a generator function and a shared iterator that two regions read from in turn."""

    def program(call: Any) -> Any:
        module = nn.Linear(4, 4)
        stream = iter([torch.randn(2, 4) for _ in range(6)])

        def numbers() -> Iterator[float]:
            scale = 1.0
            while True:
                yield scale
                scale /= 2

        def block(t: torch.Tensor, scales: Iterator[float], chunks: Iterator[torch.Tensor]) -> torch.Tensor:
            for chunk, scale in zip(itertools.islice(chunks, 3), scales):  # noqa: B905 the second never ends
                t = t + torch.tanh(module(t * scale + chunk))
            return t

        x, scales = leaf(2, 4), numbers()
        y = call(block, call(block, x, scales, stream), scales, stream)
        y.sum().backward()
        return [grads(x, module), next(scales), next(stream, None) is None]

    equal_to_plain(program)


def test_kind_018_buffers_written_through_arguments(equal_to_plain: Any) -> None:
    """index_copy_, scatter_, index_put_ and += on arguments, in two regions that share them."""

    def block(t: torch.Tensor, store: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        store.index_copy_(0, position, t.detach() * 2)
        store.scatter_(1, position.expand(6, 2), 0.5)
        store[position, 0] += 1.0
        h = torch.tanh(t * store.index_select(0, position)).sin()
        position += 1
        return h * store.sum(0)

    def program(call: Any) -> Any:
        seen = []
        for _ in range(2):
            x, store, position = leaf(2, 4), torch.zeros(6, 4), torch.tensor([0, 1])
            y = call(block, call(block, x, store, position), store, position)
            y.pow(2).sum().backward()
            seen.append([grads(x), store, position])
        return seen

    equal_to_plain(program)


def test_kind_061_context_variables(equal_to_plain: Any) -> None:
    """A context variable and an ExitStack that leave their mark after the region."""
    variable: contextvars.ContextVar[int] = contextvars.ContextVar("depth", default=0)

    def program(call: Any) -> Any:
        variable.set(0)
        log: list[str] = []

        @contextlib.contextmanager
        def level() -> Iterator[None]:
            token = variable.set(variable.get() + 1)
            log.append(f"in {variable.get()}")
            yield
            log.append(f"out {variable.get()}")
            variable.reset(token)

        def block(t: torch.Tensor) -> torch.Tensor:
            with level(), level():
                t = (t * variable.get()).sin()
            variable.set(variable.get() + 10)
            return t.exp()

        x = leaf(4)
        for _ in range(3):
            call(block, x).sum().backward()
        return [log, variable.get(), grads(x)]

    equal_to_plain(program)


def test_kind_063_routers(equal_to_plain: Any) -> None:
    """Data-dependent shapes: top-k routing with token counts that differ from call to call, boolean masks, nonzero."""

    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(6, 3)
            self.experts = nn.ModuleList(nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6)) for _ in range(3))
            self.register_buffer("load", torch.zeros(3, dtype=torch.long))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weight, index = self.router(x).softmax(-1).topk(2, -1)
            out = torch.zeros_like(x)
            for n, expert in enumerate(self.experts):
                token, slot = (index == n).nonzero(as_tuple=True)
                self.load[n] += token.numel()
                if token.numel():
                    out = out.index_add(0, token, expert(x[token]) * weight[token, slot, None])
            return out[out.sum(-1) > -10]

    equal_to_plain(training(Mixture, lambda: [leaf(9, 6)], steps=5))


def test_kind_073_losses_through_the_side(equal_to_plain: Any) -> None:
    """Auxiliary losses of nested and of neighbouring regions, in a module's attribute, a list and a global sum."""

    def program(call: Any) -> Any:
        module, x = nn.Linear(6, 6), leaf(8, 6)
        extra: list[torch.Tensor] = []
        module.total = torch.zeros(())

        def block(t: torch.Tensor) -> torch.Tensor:
            p = torch.softmax(module(t), -1)
            extra.append((p.mean(0) ** 2).sum())
            module.total = module.total + p.max()
            return p @ module.weight

        y = call(lambda t: call(block, t).sin(), call(block, x))
        (y.sum() + sum(extra) + 0.1 * module.total).backward()
        return [grads(x, module), len(extra)]

    equal_to_plain(program)


def test_kind_074_counters_change_the_result(equal_to_plain: Any) -> None:
    """itertools.count, a function attribute and a buffer counter: each call takes another path."""

    class Scheduled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(4, 4)
            self.register_buffer("calls", torch.zeros((), dtype=torch.long))
            self.numbers = itertools.count(1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            out = self.lin(x) * next(self.numbers)
            return out.sin() if int(self.calls) % 2 else (out * self.calls).tanh().exp()

    equal_to_plain(training(Scheduled, lambda: [leaf(3, 4)], steps=6))
