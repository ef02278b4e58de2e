"""Programs under a plan: variants, orders, watches, and what runs around a whole model."""

from __future__ import annotations

import copy
import pickle
import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import elbowroom
from elbowroom.core.checkpoint import around_of, bare, surround, wrapped_region
from elbowroom.core.program import MADE, Program
from elbowroom.core.region import Order, Region


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = F.dropout(F.gelu(self.up(self.norm(x))), 0.2)
        return x + torch.tanh(self.down(y)) * y.sum(-1, keepdim=True)


class Ordering:
    """A conductor that says what it is told."""

    def __init__(self) -> None:
        self.next = Order()
        self.n_asked = 0

    def order(self, region: Region) -> Order:
        self.n_asked += 1
        return self.next


def conducted() -> tuple[Block, Region, Ordering]:
    block = elbowroom.wrap(Block())
    region = wrapped_region(block)
    assert region is not None
    conductor = region.conductor = Ordering()
    return block, region, conductor


def gradients(block: nn.Module, x: Tensor) -> list[Tensor]:
    torch.manual_seed(5)
    return list(torch.autograd.grad(block(x).square().sum(), [*block.parameters(), x]))


def program_of(region: Region) -> Program:
    assert region.last is not None
    return region.last


def test_any_set_of_kept_values_has_the_same_bits() -> None:
    block, region, conductor = conducted()
    x = torch.randn(4, 16, requires_grad=True)
    plain = gradients(copy.deepcopy(elbowroom.unwrap(copy.deepcopy(block))), x)
    gradients(block, x)
    root = program_of(region)
    made = [i for i, v in enumerate(root.values) if v.kind == MADE]
    chance = random.Random(0)
    replays = set()
    for _ in range(40):
        keep = frozenset(v for v in made if chance.random() < 0.5)
        variant = root.variant(keep)
        conductor.next = Order(program=variant, thrifty=True)
        before = variant.replays
        found = gradients(block, x)
        assert all(torch.equal(a, b) for a, b in zip(plain, found, strict=True))
        assert variant.keeps == keep
        replays.add(variant.replays - before)
    assert len(replays) > 3  # they do differ in what is replayed
    assert root.keeps == frozenset()
    assert region.programs == [root]


def test_a_variant_holds_what_it_keeps_and_no_more() -> None:
    block, region, conductor = conducted()
    x = torch.randn(4, 16, requires_grad=True)
    gradients(block, x)
    root = program_of(region)
    gelu = next(op for op in root.ops if "gelu" in str(op.func)).outputs[0]
    held: list[set[int]] = []

    class Looks:
        def forward_ended(self, program: Program, tape: Any, storages: list[int]) -> None:
            held.append({v for v, t in enumerate(tape.held) if t is not None and program.values[v].kind == MADE})

        def __getattr__(self, name: str) -> Any:
            return lambda *_: None

    for keep in (frozenset(), frozenset({gelu})):
        conductor.next = Order(program=root.variant(keep), watch=Looks())
        gradients(block, x)
    assert held == [set(), {gelu}]


@pytest.mark.parametrize("seed", range(8))
def test_between_forward_and_backward_there_is_what_is_kept_to_the_byte(seed: int) -> None:
    block, region, conductor = conducted()
    x = torch.randn(64, 16, requires_grad=True)
    gradients(block, x)
    gradients(block, x)  # proves again, and allocates once what it needs for that
    root = program_of(region)
    made = [i for i, v in enumerate(root.values) if v.kind == MADE]
    chance = random.Random(seed)
    keep = frozenset(v for v in made if chance.random() < 0.5)
    looks: dict[frozenset[int], tuple[set[int], dict[int, int], int]] = {}

    class Looks:
        """What the tape holds once the forward is over: values, bytes by storage, states of the random generator."""

        def forward_ended(self, program: Program, tape: Any, storages: list[int]) -> None:
            values = {v for v in made if tape.held[v] is not None}
            held = {storages[v]: program.values[v].nbytes for v in values}
            looks[program.keeps] = values, held, len(tape.rng)

        def __getattr__(self, name: str) -> Any:
            return lambda *_: None

    left: dict[frozenset[int], int] = {}
    for kept in (frozenset[int](), keep):
        conductor.next = Order(program=root.variant(kept))
        left[kept], _ = forward_bytes(block, x)
        conductor.next = Order(program=root.variant(kept), watch=Looks())
        _, out = forward_bytes(block, x)
        looks[kept][1].pop(out, None)  # it is there anyway
    values, held, n_states = looks[keep]
    holdable = keep - {old for op in root.ops for old, _, _ in op.writes}  # of what is overwritten nothing is left
    assert values == holdable & needed_of(root, holdable)
    more_bytes = sum(held.values()) + (n_states - looks[frozenset()][2]) * torch.get_rng_state().nbytes
    assert left[keep] - left[frozenset()] == more_bytes


def needed_of(program: Program, keep: frozenset[int]) -> set[int]:
    """What backward asks for, and what replays of what is not kept read."""
    needed: set[int] = set()
    asked = [s.bound for s in program.slots if not s.dead]
    while asked:
        v = asked.pop()
        if v in needed:
            continue
        needed.add(v)
        if program.values[v].kind == MADE and v not in keep:
            asked += program.ops[program.values[v].maker].reads
    return needed


def forward_bytes(block: nn.Module, x: Tensor) -> tuple[int, int]:
    """What a forward leaves allocated while its output lives, and the address of the output's storage."""
    torch.manual_seed(5)
    with elbowroom.Meter(collect_garbage=False) as meter:
        out = block(x)
    out.square().sum().backward()
    return meter.end_bytes, out.untyped_storage()._cdata


def test_variants_are_remembered_and_bounded() -> None:
    block, region, _ = conducted()
    gradients(block, torch.randn(4, 16, requires_grad=True))
    root = program_of(region)
    made = [i for i, v in enumerate(root.values) if v.kind == MADE]
    one = root.variant(frozenset(made[:1]))
    assert root.variant(frozenset(made[:1])) is one
    assert one.variant(frozenset()) is root
    assert one.root is root
    for bits in range(1, 200):
        root.variant(frozenset(v for i, v in enumerate(made) if bits >> i & 1))
    assert len(root.variants) <= 64


def test_a_call_that_leaves_its_plan_loses_nothing() -> None:
    block, region, conductor = conducted()
    x = torch.randn(4, 16, requires_grad=True)
    gradients(block, x)
    root = program_of(region)
    conductor.next = Order(program=root.variant(frozenset(i for i, v in enumerate(root.values) if v.kind == MADE)))
    longer = torch.randn(6, 16, requires_grad=True)
    plain = gradients(elbowroom.unwrap(copy.deepcopy(block)), longer)
    for _ in range(3):
        found = gradients(block, longer)
        assert all(torch.equal(a, b) for a, b in zip(plain, found, strict=True))


def test_a_switch_to_a_known_program_drops_what_that_does_not_keep() -> None:
    def fn(x: Tensor, n: int) -> Tensor:
        y = torch.sin(x)
        for _ in range(n):
            y = torch.cos(y)
        return torch.tanh(y)

    region = Region("fn", elbowroom.core.region.Family(), None, "first")
    x = torch.randn(64, requires_grad=True)
    for n in (1, 2):
        region.run(fn, (x, n), {}).sum().backward()
    one, two = (p for _, p in sorted((len(p.ops), p) for p in region.programs))
    conductor = region.conductor = Ordering()
    conductor.next = Order(program=one.variant(frozenset({one.ops[0].outputs[0]})))
    x.grad = None
    out = region.run(fn, (x, 2), {})
    assert region.last is two
    out.sum().backward()
    expected = torch.autograd.grad(fn(x, 2).sum(), x)[0]
    assert x.grad is not None
    assert torch.equal(x.grad, expected)


def test_a_plain_order_records_nothing_and_the_conductor_is_asked_only_when_it_matters() -> None:
    block, region, conductor = conducted()
    conductor.next = Order(plain=True)
    x = torch.randn(4, 16, requires_grad=True)
    gradients(block, x)
    assert region.calls == 0
    assert conductor.n_asked == 1
    with torch.no_grad():
        block(x)
    assert conductor.n_asked == 1


class Counting:
    """Runs around a model, and counts."""

    def __init__(self) -> None:
        self.n_runs = 0

    def run(self, module: nn.Module, fn: Any, args: Any, kwargs: Any) -> Any:
        self.n_runs += 1
        return fn(*args, **kwargs)


@pytest.mark.parametrize("is_region", [False, True])
def test_what_surrounds_a_model_is_copied_with_it_and_goes(is_region: bool) -> None:
    block: Any = Block()
    if is_region:
        elbowroom.wrap(block)
    kind = type(block)
    around = Counting()
    surround(block, around)
    x = torch.randn(4, 16, requires_grad=True)
    gradients(block, x)
    assert around.n_runs == 1
    for copied in (copy.deepcopy(block), pickle.loads(pickle.dumps(block)), copy.copy(block)):
        gradients(copied, x)
        assert isinstance(around_of(copied), Counting)
        assert (wrapped_region(copied) is not None) == is_region
    bare(block)
    assert around_of(block) is None
    assert (wrapped_region(block) is not None) == is_region
    assert type(block) is kind
    elbowroom.unwrap(block)
    assert type(block) is Block
