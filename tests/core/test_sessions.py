"""Random sessions: calls of one region that go ever other ways, with writes, views, draws, labels and policies.

A session is some calls of the same code, each with its own list of instructions (most share a beginning), each followed
by a backward of some kind: whole, output by output on a retained graph, partial, double. Where the plain session works,
the checkpointed one has its bits: outputs, gradients, buffers, random stream. Where plain autograd refuses a write, the
comparison ends.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import elbowroom
from tests.conformance.equality import assert_same_bits
from tests.core.counting import fresh

N = 4

#: Instructions that make a value of register p (and q), with a constant c, the weight w, the input x and the buffer b.
MAKING: dict[str, Callable[..., Tensor]] = {
    "sin": lambda p, q, c, w, x, b: p.sin(),
    "tanh": lambda p, q, c, w, x, b: p.tanh(),
    "scale": lambda p, q, c, w, x, b: p * c,
    "shift": lambda p, q, c, w, x, b: p + c,
    "product": lambda p, q, c, w, x, b: (p @ w).tanh(),
    "add": lambda p, q, c, w, x, b: p + q,
    "mul": lambda p, q, c, w, x, b: p * q,
    "add input": lambda p, q, c, w, x, b: p + x,
    "mul input": lambda p, q, c, w, x, b: p * x,
    "transpose": lambda p, q, c, w, x, b: p.t(),
    "flip": lambda p, q, c, w, x, b: p.flip(0),
    "detach": lambda p, q, c, w, x, b: p.detach(),
    "clone": lambda p, q, c, w, x, b: p.clone(),
    "dropout": lambda p, q, c, w, x, b: F.dropout(p, 0.3),
    "buffer": lambda p, q, c, w, x, b: p * b.clone(),
    "softmax": lambda p, q, c, w, x, b: p.softmax(-1),
    "expand": lambda p, q, c, w, x, b: p[:1].expand(N, N),
    "cat": lambda p, q, c, w, x, b: torch.cat([p[:2], q[2:]]),
    "norm": lambda p, q, c, w, x, b: F.layer_norm(p, (N,)),
}

#: Instructions that write.
WRITING: dict[str, Callable[..., Any]] = {
    "mul_": lambda p, q, c, b: p.mul_(c),
    "add_": lambda p, q, c, b: p.add_(c),
    "relu_": lambda p, q, c, b: p.relu_(),
    "sin_": lambda p, q, c, b: p.sin_(),
    "add_ other": lambda p, q, c, b: p.add_(q),
    "copy_": lambda p, q, c, b: p.copy_(q),
    "row mul_": lambda p, q, c, b: p[1].mul_(c),
    "quiet mul_": lambda p, q, c, b: torch.no_grad()(p.mul_)(c),
    "buffer add_": lambda p, q, c, b: torch.no_grad()(b.add_)(p.detach()[0]),
    "buffer mul_": lambda p, q, c, b: torch.no_grad()(lambda: b.mul_(c).clamp_(-2, 2))(),
    "name": lambda p, q, c, b: elbowroom.name(p, "label"),
}

Instruction = tuple[str, int, int, float]


def region(instructions: list[Instruction], x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    registers = [x]
    for name, first, second, c in instructions:
        p, q = registers[first % len(registers)], registers[second % len(registers)]
        if name in MAKING:
            registers.append(MAKING[name](p, q, c, w, x, b))
        else:
            WRITING[name](p, q, c, b)
    return registers[-1], registers[len(registers) // 2]


@dataclass(frozen=True)
class Call:
    instructions: list[Instruction]
    backward: str
    leaf: bool


def draw_instruction(rng: random.Random) -> Instruction:
    return rng.choice([*MAKING, *WRITING]), rng.randrange(100), rng.randrange(100), rng.choice([0.5, 2.0, -1.0, 1.5])


def draw_session(rng: random.Random) -> list[Call]:
    base = [draw_instruction(rng) for _ in range(rng.randrange(3, 14))]
    calls: list[Call] = []
    for _ in range(rng.randrange(2, 8)):
        instructions = list(base)
        kind = rng.random()
        if kind < 0.3:
            instructions[rng.randrange(len(base))] = draw_instruction(rng)
        elif kind < 0.4:
            instructions = instructions[: rng.randrange(len(base))]
        elif kind < 0.5 and calls:
            instructions = rng.choice(calls).instructions
        calls.append(Call(instructions, rng.choice(["whole", "each", "partial", "double"]), rng.random() < 0.5))
    return calls


def backward(kind: str, outs: list[Tensor], x: Tensor, w: Tensor) -> list[Tensor | None]:
    total = sum((o * o).sum() for o in outs)
    grads: list[Any] = []
    if kind == "each":
        for o in outs:
            grads += torch.autograd.grad(o.sum() * 1.5, (x, w), retain_graph=True, allow_unused=True)
    if kind == "partial":
        grads += torch.autograd.grad(outs[0].sum(), (x,), retain_graph=True, allow_unused=True)
    if kind == "double":
        first = torch.autograd.grad(total, (x, w), create_graph=True, allow_unused=True)  # type: ignore[arg-type]
        second = [g.pow(2).sum() for g in first if g is not None and g.requires_grad]
        if second:
            grads += torch.autograd.grad(sum(second), (x, w), allow_unused=True)  # type: ignore[arg-type]
        return grads
    return [*grads, *torch.autograd.grad(total, (x, w), allow_unused=True)]  # type: ignore[arg-type]


def run_session(calls: list[Call], call_region: Callable[..., Any]) -> list[Any]:
    """For each call what came out, or "refused" where autograd refused a write."""
    torch.manual_seed(0)
    results: list[Any] = []
    b = torch.zeros(N)
    for number, call in enumerate(calls):
        torch.manual_seed(number)
        leaf, w = torch.randn(N, N, requires_grad=True), torch.randn(N, N, requires_grad=True)
        x = leaf if call.leaf else leaf * 1
        b = b.clone()
        try:
            outs = call_region(call.instructions, x, w, b)
            seen = [o.detach().clone() for o in outs]
            wanted = [o for o in outs if o.requires_grad]
            seen += backward(call.backward, wanted, leaf, w) if wanted else []
            results.append([seen, b.clone(), torch.get_rng_state()])
        except elbowroom.ReplayError:
            raise
        except RuntimeError:
            results.append("refused")
            b = torch.zeros(N)
    return results


SEEDS_PER_TEST = 15


@pytest.mark.parametrize("start", range(0, 120, SEEDS_PER_TEST))
def test_random_sessions_are_those_of_plain_calls(start: int) -> None:
    for seed in range(start, start + SEEDS_PER_TEST):
        rng = random.Random(seed)
        calls = draw_session(rng)
        keep = rng.choice([None, "matmuls", ["label"], [torch.ops.aten.sin, torch.ops.aten.mul]])
        verify = rng.choice(["first", "first", "never", "always"])
        fn = fresh(region)

        def checkpointed(*args: Any, fn: Any = fn, keep: Any = keep, verify: str = verify) -> Any:
            return elbowroom.checkpoint(fn, *args, keep=keep, verify=verify)

        expected, found = run_session(calls, region), run_session(calls, checkpointed)
        for number, (one, other) in enumerate(zip(expected, found, strict=True)):
            if one == "refused":
                break  # what follows starts from another buffer if ours was not refused
            assert other != "refused", f"seed {seed}, call {number + 1}, keep={keep}, verify={verify!r}"
            assert_same_bits(one, other, f"seed {seed}, call {number + 1}, keep={keep}, verify={verify!r}: ")
