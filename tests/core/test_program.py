"""Counts, layouts and sweeps of a program, against brute force on small random programs."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import elbowroom
from elbowroom.core import replayer
from elbowroom.core.geometry import geometry_of
from elbowroom.core.operators import facts_of
from elbowroom.core.program import MADE, OPAQUE, SOURCE, Operator, Program, Slot, Sweep, Value
from elbowroom.core.replayer import Tape
from tests.core.counting import assert_equal_to_plain, fresh, needed_operators, programs_of, tape_of

CPU = torch.device("cpu")
GEOMETRY = geometry_of(torch.zeros(1))
FACTS = facts_of(torch.ops.aten.sin.default)


@st.composite
def programs(draw: Any) -> Program:
    """Small programs: sources, and operators that read newest versions, make one or two values, sometimes write one."""
    program = Program("random")
    newest: list[int] = []  # storages by their newest value
    for _ in range(draw(st.integers(1, 3))):
        newest.append(len(program.values))
        program.values.append(Value(SOURCE, -1, 4, GEOMETRY, CPU))
    for k in range(draw(st.integers(1, 9))):
        op = Operator(None, FACTS, (), {})
        reads = draw(st.lists(st.sampled_from(range(len(newest))), min_size=1, max_size=3, unique=True))
        op.reads = tuple(newest[i] for i in reads)
        made = [i for i in reads if program.values[newest[i]].kind == MADE]
        if made and draw(st.booleans()):
            storage = made[0]
            op.writes = ((newest[storage], len(program.values), True),)
            newest[storage] = len(program.values)
            program.values.append(Value(MADE, k, 4, GEOMETRY, CPU))
        for _ in range(draw(st.integers(0 if op.writes else 1, 2))):
            op.outputs += (len(program.values),)
            newest.append(len(program.values))
            value = Value(draw(st.sampled_from([MADE, MADE, MADE, OPAQUE])), k, 4, GEOMETRY, CPU)
            value.keep = value.kind == MADE and draw(st.integers(0, 5)) == 0
            program.values.append(value)
        program.ops.append(op)
    for v in draw(st.lists(st.sampled_from(range(len(program.values))), min_size=1, max_size=7)):
        program.slots.append(Slot(v, GEOMETRY, v, draw(st.sampled_from(["", "", "", "", "refused by plain autograd"]))))
    program.finish()
    return program


def reachable(program: Program, slots: list[int]) -> set[int]:
    """By brute force: values that the slots need, down to the ones at hand."""
    found: set[int] = set()
    waiting = [program.slots[i].bound for i in slots if not program.slots[i].dead]
    while waiting:
        v = waiting.pop()
        if v not in found:
            found.add(v)
            if not program.values[v].at_hand or v in program.remade:
                waiting += program.ops[program.values[v].maker].reads
    return found


@settings(max_examples=150, deadline=None)
@given(programs())
def test_counts_are_positive_exactly_for_what_is_needed(program: Program) -> None:
    needed = reachable(program, list(range(len(program.slots))))
    assert {v for v, n in enumerate(program.counts) if n} == needed
    assert {k for k, n in enumerate(program.op_counts) if n} == needed_operators(program, remade=True)
    layout = program.layout(frozenset())
    assert set(layout.needed) == {v for v in needed if program.values[v].at_hand}
    assert set(layout.unneeded) == set(range(len(program.values))) - needed


@settings(max_examples=150, deadline=None)
@given(programs(), st.randoms(use_true_random=False))
def test_releasing_handles_frees_what_nobody_can_need_any_more(program: Program, rng: random.Random) -> None:
    tape = Tape(program)
    tape.held = [torch.zeros(1) if value.at_hand else None for value in program.values]
    tape.close()  # it holds a value as long as a live handle can need it, and what remakes a kept one for free (rule 7)
    alive = list(range(len(program.slots)))
    while True:
        needed = {v for v in reachable(program, alive) if program.values[v].at_hand}
        assert {v for v, held in enumerate(tape.held) if held is not None} == needed
        if not alive:
            break
        tape.release(alive.pop(rng.randrange(len(alive))))


def brute_force_sweep(program: Program, target: int, hand: bytearray, waiting: set[int]) -> set[int]:
    """Rule 3, said naively: what leads to the target, and what leads to every waiting value whose way crosses it."""

    def way(v: int, made: set[int]) -> set[int]:
        if hand[v] or v in made or program.values[v].maker < 0:
            return set()
        k = program.values[v].maker
        return {k}.union(*(way(u, made) for u in program.ops[k].reads))

    run = way(target, set())
    while True:
        made = {v for k in run for v in program.ops[k].made if v in waiting}
        crossing = [way(v, made) for v in waiting if v not in made and way(v, made) & run]
        if not crossing:
            return run
        run = run.union(*crossing)


def assert_runs(program: Program, sweep: Sweep, hand: bytearray, target: int) -> None:
    """Walk through a sweep: everything is there when it is read, and only what is cached is left."""
    env = set(sweep.leaves)
    for k, frees, ours in sweep.steps:
        op = program.ops[k]
        assert set(op.reads) <= env, "a value was freed before its last reader, or never made"
        for old in ours:
            assert old in frees, "somebody reads the old version later"
            assert not hand[old], "a replay must not write to what is held"
            assert old not in sweep.leaves
        env |= {v for v in op.made if not hand[v]}  # what is kept stays what it is
        assert set(frees) <= env
        env -= set(frees)
    assert target in env
    assert env == set(sweep.cached) | set(sweep.leaves)


@settings(max_examples=200, deadline=None)
@given(programs(), st.data())
def test_a_sweep_makes_exactly_what_is_needed_once_and_in_order(program: Program, data: Any) -> None:
    live = [i for i, slot in enumerate(program.slots) if not slot.dead]
    hand = bytearray(value.at_hand for value in program.values)
    for i in live:  # some values may be cached already
        if not hand[program.slots[i].bound] and data.draw(st.integers(0, 3)) == 0:
            hand[program.slots[i].bound] = 2
    asked = [i for i in live if not hand[program.slots[i].bound]]
    if not asked:
        return
    target = program.slots[data.draw(st.sampled_from(asked))].bound
    waits = bytearray(i in live and data.draw(st.booleans()) for i in range(len(program.slots)))
    sweep = program.sweep(target, hand, waits)
    order = [k for k, _, _ in sweep.steps]
    assert order == sorted(set(order)), "every operator at most once, in program order"
    waiting = {program.slots[i].bound for i, w in enumerate(waits) if w}
    assert set(order) == brute_force_sweep(program, target, hand, waiting)
    made = {v for k in order for v in program.ops[k].made if not hand[v]}
    assert set(sweep.cached) == made & (waiting | {target})
    assert_runs(program, sweep, hand, target)
    for v, n in sweep.pending.items():
        assert n == sum(v in on for on in sweep.by_slot.values())


def test_sweeps_are_remembered_but_not_without_bound() -> None:
    program = Program("chain")
    program.values = [Value(SOURCE, -1, 4, GEOMETRY, CPU), Value(MADE, 0, 4, GEOMETRY, CPU)]
    op = Operator(None, FACTS, (), {})
    op.reads, op.outputs = (0,), (1,)
    program.ops, program.slots = [op], [Slot(1, GEOMETRY, 1)]
    program.finish()
    hand, waits = bytearray([1, 0]), bytearray([1])
    assert program.sweep(1, hand, waits) is program.sweep(1, hand, waits)
    for i in range(500):
        program.sweep(1, bytearray([1, 0]) + bytearray(i), waits)
    assert len(program.sweeps) <= 4 * len(program.slots) + 64


# A whole backward, with real operators ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    name: str
    first: int
    second: int


STEPS = st.lists(
    st.builds(
        Step,
        st.sampled_from(["sin", "mul", "add", "times", "plus_", "tanh"]),
        st.integers(0, 99),
        st.integers(0, 99),
    ),
    min_size=2,
    max_size=12,
)


def run_steps(steps: list[Step], x: torch.Tensor) -> torch.Tensor:
    values = [x]
    for step in steps:
        a, b = values[step.first % len(values)], values[step.second % len(values)]
        if step.name == "plus_":
            values.append((a * 2).add_(b))
        else:
            values.append({"sin": a.sin, "tanh": a.tanh, "mul": lambda a=a, b=b: a * b, "add": lambda a=a, b=b: a + b,
                           "times": lambda a=a: a * 1.5}[step.name]())  # fmt: skip
    return torch.stack(values).sum()


@settings(max_examples=60, deadline=None)
@given(STEPS, st.randoms(use_true_random=False))
def test_each_needed_operator_is_replayed_once_in_any_order_of_asking(steps: list[Step], rng: random.Random) -> None:
    fn = fresh(run_steps)
    x = torch.randn(3, requires_grad=True)
    out = elbowroom.checkpoint(fn, steps, x, verify="never")
    (program,) = programs_of(fn)
    if not program.slots:
        return
    tape = tape_of(program)
    order = [i for i, slot in enumerate(program.slots) if not slot.dead]
    rng.shuffle(order)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch._C, "_current_graph_task_id", lambda: 12345)
        patch.setattr(replayer, "_at_end_of_task", lambda tape: None)
        for i in order:
            tape.fetch(i)
    assert program.replays == len(needed_operators(program))
    assert tape._cache == {}, "asked for once each, nothing stays cached"
    del out


@settings(max_examples=40, deadline=None)
@given(STEPS)
def test_autograd_asks_and_each_needed_operator_runs_once(steps: list[Step]) -> None:
    fn = fresh(run_steps)
    x = torch.randn(3, requires_grad=True)
    out = elbowroom.checkpoint(fn, steps, x)
    if not out.requires_grad:
        return
    out.backward()
    (program,) = programs_of(fn)
    assert elbowroom.proof(fn).replays == len(needed_operators(program))


@settings(max_examples=30, deadline=None)
@given(STEPS)
def test_random_regions_equal_plain(steps: list[Step]) -> None:
    fn = fresh(lambda x, s: run_steps(s, x))
    assert_equal_to_plain(fn, torch.randn(3, requires_grad=True), steps, calls=3)


def test_program_forks_share_operators_and_copy_values() -> None:
    program = Program("p")
    program.values = [Value(SOURCE if k < 0 else MADE, k, 4, GEOMETRY, CPU) for k in (-1, 0, 1)]
    for k in range(2):
        op = Operator(None, FACTS, (), {})
        op.reads, op.outputs = (k,), (k + 1,)
        program.ops.append(op)
    program.slots = [Slot(1, GEOMETRY, 1), Slot(2, GEOMETRY, 2)]
    program.finish()
    fork = program.fork(1, 2, 1)
    assert fork.ops == program.ops[:1]
    assert [v is w for v, w in zip(fork.values, program.values, strict=False)] == [False, False]
    assert len(fork.slots) == 1
    assert not fork.finished
