"""Tiny models to fit, and a trial: the same training run plainly and under ``fit``, compared bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import elbowroom
from elbowroom.fitting.fit import Fitting, fitting_of
from elbowroom.fitting.memory import resting_bytes

DIM = 32
TOKENS = 32


class Block(nn.Module):
    """A residual block with dropout; attention if ``heads``."""

    def __init__(self, dim: int = DIM, heads: int = 0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim) if heads else None
        self.heads = heads
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, D)
        if self.qkv is not None:
            q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
            x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class Net(nn.Module):
    """Equal blocks between two layers."""

    def __init__(self, n_blocks: int = 4, dim: int = DIM, heads: int = 0) -> None:
        super().__init__()
        self.enter = nn.Linear(dim, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(n_blocks))
        self.leave = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.leave(x)


def batch(n_sequences: int = 8, n_tokens: int = TOKENS, dim: int = DIM) -> Tensor:
    return torch.randn(n_sequences, n_tokens, dim)


Step = Callable[[Any, torch.optim.Optimizer, int], None]


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    """One step as most people write it."""
    optimizer.zero_grad()
    model(batch()).square().mean().backward()
    optimizer.step()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def state_of(model: nn.Module) -> list[Tensor | None]:
    """Copies of everything that training changes: parameters, gradients, buffers."""
    found: list[Tensor | None] = []
    for p in model.parameters():
        found += [p.detach().clone(), None if p.grad is None else p.grad.clone()]
    return found + [b.clone() for b in model.buffers()]


def differences(expected: list[Tensor | None], found: list[Tensor | None]) -> list[int]:
    """The entries that are not the same bits."""
    assert len(expected) == len(found)
    pairs = zip(expected, found, strict=True)
    return [
        i for i, (a, b) in enumerate(pairs) if (a is None) != (b is None) or (a is not None and not torch.equal(a, b))
    ]


@dataclass
class Plainly:
    """A training run without ``fit``: what was there after each step, and the bytes of its last one."""

    states: list[list[Tensor | None]]
    start_bytes: int  # at the beginning of the last step, beyond what was there before training
    peak_bytes: int  # highest of the last step above that


def train_plainly(model: nn.Module, step: Step, n_steps: int, optimizer_of: Callable[..., Any] = sgd) -> Plainly:
    model = copy.deepcopy(model)
    before_bytes = resting_bytes()
    optimizer = optimizer_of(model)
    states = []
    for number in range(n_steps - 1):
        torch.manual_seed(number)
        step(model, optimizer, number)
        states.append(state_of(model))
    rested_bytes = sum(t.nbytes for state in states for t in state if t is not None)
    torch.manual_seed(n_steps - 1)
    with elbowroom.Meter() as meter:
        step(model, optimizer, n_steps - 1)
    states.append(state_of(model))
    return Plainly(states, meter.start_bytes - before_bytes - rested_bytes, meter.peak_bytes)


@dataclass
class Trial:
    """What came of training under ``fit``."""

    model: Any
    fitting: Fitting
    budget_bytes: int
    peaks_bytes: list[int] = field(default_factory=list)  # of the steps that were metered from outside


def trial(
    model: nn.Module,
    step: Step,
    n_steps: int = 6,
    *,
    fraction: float = 0.6,
    optimizer_of: Callable[..., Any] = sgd,
    metered: tuple[int, ...] = (-1,),
    **settings: Any,
) -> Trial:
    """Train ``model`` under ``fraction`` of the peak that its plain twin takes above its rest.

    Asserts that every step leaves the same bits as the twin's, and that the steps in ``metered`` stay in the budget.
    """
    expected = train_plainly(model, step, n_steps, optimizer_of)
    budget_bytes = resting_bytes() + expected.start_bytes + int(fraction * expected.peak_bytes)
    elbowroom.fit(model, budget=budget_bytes, **settings)
    fitting = fitting_of(model)
    assert fitting is not None
    found = Trial(model, fitting, budget_bytes)
    try:
        _train_fitted(found, step, expected, optimizer_of, metered)
    except BaseException:
        fitting.let_go()  # a meter that runs would be in the way of other tests
        raise
    assert all(peak <= budget_bytes for peak in found.peaks_bytes), (found.peaks_bytes, budget_bytes)
    return found


def _train_fitted(
    found: Trial, step: Step, expected: Plainly, optimizer_of: Callable[..., Any], metered: tuple[int, ...]
) -> None:
    model, n_steps = found.model, len(expected.states)
    optimizer = optimizer_of(model)
    for number in range(n_steps):
        torch.manual_seed(number)
        if number in metered or number - n_steps in metered:
            meter = elbowroom.Meter()
            with meter:
                step(model, optimizer, number)
            found.peaks_bytes.append(meter.start_bytes + meter.peak_bytes)
        else:
            step(model, optimizer, number)
        wrong = differences(expected.states[number], state_of(model))
        assert not wrong, f"step {number}: entries {wrong} differ"
