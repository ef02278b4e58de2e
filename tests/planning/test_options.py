"""Menus: the hull against every keep set there is, whole cuts, shorter sweeps, nothing beaten, and quickly."""

from __future__ import annotations

import time
from itertools import combinations, pairwise
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elbowroom.planning.options import MinimumCut, Option, lower_hull, menu, menus_of
from elbowroom.planning.profile import (
    ASK,
    MADE,
    PARAMETER,
    RELEASE,
    SOURCE,
    BackwardEvent,
    OperatorProfile,
    ProgramProfile,
    ValueProfile,
)
from elbowroom.planning.simulate import run_call
from elbowroom.planning.tapes import Interpreter, members
from tests.planning.random_steps import COSTS, FREE, distinct_step, gpt_like_program, gpt_like_step, programs


def keep_sets(program: ProgramProfile) -> list[frozenset[int]]:
    """All of them: every made value may be kept, unless it is written over."""
    written = {old for op in program.operators for old, _, _ in op.writes}
    made = [i for i, v in enumerate(program.values) if v.kind == MADE and i not in written]
    return [frozenset(keep) for n in range(len(made) + 1) for keep in combinations(made, n)]


def held_and_replayed(program: ProgramProfile, keep: frozenset[int]) -> tuple[int, float]:
    """Bytes held and seconds replayed, straight from what the words mean: no counts, no events."""
    held: set[int] = set()
    replayed: set[int] = set()

    def need(v: int) -> None:
        value = program.values[v]
        if value.kind != MADE or v in keep:
            held.add(v)
        elif value.maker not in replayed:
            replayed.add(value.maker)
            for u in program.operators[value.maker].reads:
                need(u)

    for v in program.saved:
        need(v)
    seconds = sum(program.operators[k].seconds + COSTS.replay_s for k in replayed)
    return sum(program.values[v].nbytes for v in held), seconds


@settings(max_examples=80, deadline=None)
@given(programs(max_values=9))
def test_the_hull_is_that_of_all_keep_sets(program: ProgramProfile) -> None:
    corners = lower_hull(program, COSTS)
    everything = [held_and_replayed(program, keep) for keep in keep_sets(program)]
    for corner in corners:
        keep = frozenset(members(corner.keep))
        assert (corner.nbytes, corner.seconds) == pytest.approx(held_and_replayed(program, keep))
    assert corners[0].nbytes == min(nbytes for nbytes, _ in everything)
    assert corners[-1].seconds == pytest.approx(min(seconds for _, seconds in everything))
    for nbytes, seconds in everything:
        for a, b in pairwise(corners):
            assert a.nbytes < b.nbytes
            assert a.seconds > b.seconds
            line_s = a.seconds + (b.seconds - a.seconds) * (nbytes - a.nbytes) / (b.nbytes - a.nbytes)
            assert seconds >= line_s - 1e-6
        assert corners[0].seconds <= seconds + 1e-6 or nbytes > corners[0].nbytes
        assert nbytes >= corners[-1].nbytes or seconds > corners[-1].seconds - 1e-6


@settings(max_examples=60, deadline=None)
@given(programs(max_values=9), st.randoms(use_true_random=False))
def test_cuts_are_whole_and_the_best_at_their_price(program: ProgramProfile, rng: Random) -> None:
    prices = [rng.choice([0.0, 0.001, 0.03, 0.1, 1.0, 20.0]) for _ in range(3)]
    cut = MinimumCut(Interpreter(program, COSTS))
    everything = [held_and_replayed(program, keep) for keep in keep_sets(program)]
    for price, row in zip(prices, cut.solve(prices, free=0), strict=True):
        assert np.abs(row - row.round()).max(initial=0.0) < 1e-6
        keep = frozenset(v for v in np.flatnonzero(row[: len(program.values)] > 0.5))
        nbytes, seconds = held_and_replayed(program, keep)
        assert seconds + price * nbytes == pytest.approx(min(s + price * b for b, s in everything), abs=1e-6)


@settings(max_examples=80, deadline=None)
@given(programs(max_values=9), st.randoms(use_true_random=False))
def test_sweeps_replay_what_the_cut_says_and_nothing_twice(program: ProgramProfile, rng: Random) -> None:
    # every slot asked once, in any order
    slots = [i for i, v in enumerate(program.slots) if v >= 0]
    rng.shuffle(slots)
    events = tuple(BackwardEvent(kind, i, 0, 0, 0.0) for i in slots for kind in (ASK, RELEASE))
    asked = ProgramProfile("", "f", program.operators, program.values, program.slots, events, 1.0)
    keep = rng.choice(keep_sets(program))
    run = run_call(asked, keep, COSTS)
    assert (run.kept_bytes, run.extra_s - run.recording_s) == pytest.approx(held_and_replayed(asked, keep))


@settings(max_examples=60, deadline=None)
@given(programs(max_values=9))
def test_a_menu_has_what_it_says_and_nothing_beaten(program: ProgramProfile) -> None:
    options = menu(program, COSTS)
    assert [o.plain for o in options].count(True) == 1
    for option in options:
        run = run_call(program, None if option.plain else option.keep, COSTS)
        assert option == Option(
            option.plain, option.keep, run.kept_bytes, run.forward_bytes, run.working_bytes, run.extra_s, run.replayed
        )
    all_kept = [held_and_replayed(program, keep)[0] for keep in keep_sets(program)]
    assert min(o.kept_bytes for o in options) == min(all_kept)
    for a in options:
        for b in options:
            better = (
                a.kept_bytes <= b.kept_bytes
                and a.forward_bytes <= b.forward_bytes
                and a.kept_bytes + a.working_bytes <= b.kept_bytes + b.working_bytes
                and a.extra_s <= b.extra_s
            )
            assert a is b or b.plain or not better
    assert list(options) == sorted(options, key=lambda o: (o.extra_s, o.kept_bytes))


def chain(nbytes: list[int], seconds: list[float], saved: list[int]) -> ProgramProfile:
    """x -> 1 -> 2 -> ... with these bytes, made in these seconds; ``saved`` are asked for last first."""
    values = [ValueProfile(SOURCE, -1, 1), *(ValueProfile(MADE, k, n) for k, n in enumerate(nbytes))]
    operators = [OperatorProfile(f"op{k}", (k,), (k + 1,), (), s) for k, s in enumerate(seconds)]
    events = [BackwardEvent(kind, i, 0, 0, 0.0) for i in reversed(range(len(saved))) for kind in (ASK, RELEASE)]
    return ProgramProfile("", "chain", tuple(operators), tuple(values), tuple(saved), tuple(events), sum(seconds))


def test_a_narrow_value_that_splits_the_sweep_is_offered() -> None:
    # Eight wide saved values, a narrow one that nobody saved (value 9), eight wide ones: keeping it saves no time.
    seconds = [1.0] * 8 + [0.0] + [1.0] * 8
    waist = chain([100] * 8 + [10] + [100] * 8, seconds, [*range(1, 9), *range(10, 18)])
    assert all(not corner.keep >> 9 & 1 for corner in lower_hull(waist, FREE))
    frugal, split = run_call(waist, (), FREE), run_call(waist, (9,), FREE)
    assert (frugal.kept_bytes, frugal.working_bytes) == (1, 1600)
    assert (split.kept_bytes, split.working_bytes) == (11, 800)
    assert split.replayed == frugal.replayed - 1
    options = menu(waist, FREE)
    assert any(9 in o.keep and o.kept_bytes + o.working_bytes == 811 for o in options)
    assert min(o.kept_bytes + o.working_bytes for o in options) < 811  # and split again


def test_a_small_derived_value_is_kept_instead_of_a_source_that_nobody_saved() -> None:
    # A mask of 1000 bytes is cast to one of 10, and only that is used for the saved value.
    values = (ValueProfile(SOURCE, -1, 1000), ValueProfile(MADE, 0, 10), ValueProfile(MADE, 1, 500))
    operators = (OperatorProfile("cast", (0,), (1,), (), 1.0), OperatorProfile("exp", (1,), (2,), (), 5.0))
    events = (BackwardEvent(ASK, 0, 0, 0, 0.0), BackwardEvent(RELEASE, 0, 0, 0, 0.0))
    program = ProgramProfile("", "f", operators, values, (2,), events, 6.0)
    corners = [(set(members(c.keep)), c.nbytes, c.seconds) for c in lower_hull(program, FREE)]
    assert corners == [({1}, 10, 5.0), ({2}, 500, 0.0)]


def test_what_the_next_call_holds_anyway_is_offered_for_nothing() -> None:
    # x -10 s-> 1 -5 s-> 2, both saved; 2 is the source of the next block. Alone, keeping 1 is the better choice.
    block = gpt_like_step(2)
    values = (ValueProfile(SOURCE, -1, 0), ValueProfile(MADE, 0, 100), ValueProfile(MADE, 1, 100))
    operators = (OperatorProfile("mm", (0,), (1,), (), 10.0), OperatorProfile("relu", (1,), (2,), (), 5.0))
    events = tuple(BackwardEvent(kind, i, 0, 0, 0.0) for i in (1, 0) for kind in (ASK, RELEASE))
    program = ProgramProfile("", "f", operators, values, (1, 2), events, 15.0)
    assert frozenset({2}) not in {o.keep for o in menu(program, COSTS)}
    assert frozenset({2}) in {o.keep for o in menu(program, COSTS, shared=(2,))}
    calls = tuple(
        type(call)(call.region, 0, ((0, 10 + j), (2, 11 + j))) for j, call in enumerate(block.calls)
    )  # fmt: skip
    step = type(block)("", "cpu", 0, (program,), calls, block.moments, COSTS)
    assert menus_of(step) == (menu(program, COSTS, shared=(2,)),)


def test_a_call_with_nothing_to_replay_has_one_option() -> None:
    values = (ValueProfile(SOURCE, -1, 8), ValueProfile(PARAMETER, -1, 0), ValueProfile(MADE, 0, 10))
    program = ProgramProfile("", "f", (OperatorProfile("mm", (0, 1), (2,), (), 1.0),), values, (0, 1), (), 1.0)
    assert [o.plain for o in menu(program, COSTS)] == [True]
    nothing = ProgramProfile("", "f", (), (), (), (), 1.0)
    assert [o.plain for o in menu(nothing, COSTS)] == [True]


def test_a_short_menu_has_the_frugal_ends_and_plain() -> None:
    step = gpt_like_step(1)
    whole = menu(step.programs[0], step.costs)
    short = menu(step.programs[0], step.costs, max_options=5)
    assert len(whole) > 5 == len(short)
    assert set(short) <= set(whole)
    assert short[0].plain
    assert min(o.kept_bytes for o in short) == min(o.kept_bytes for o in whole)
    heights = [min(o.kept_bytes + o.working_bytes for o in options) for options in (short, whole)]
    assert heights[0] == heights[1]


def test_a_transformers_menu_is_rich_and_quick() -> None:
    program = gpt_like_program(60)
    options = menu(program, COSTS)
    kept = sorted(o.kept_bytes for o in options)
    assert len(program.values) == 60
    assert len(options) >= 15
    assert kept[-1] > 10 * kept[0]
    # The least keep set is not the one with the lowest backward.
    frugal = min(options, key=lambda o: o.kept_bytes)
    lowest = min(options, key=lambda o: o.kept_bytes + o.working_bytes)
    assert lowest.kept_bytes > frugal.kept_bytes
    assert lowest.kept_bytes + lowest.working_bytes < 0.6 * (frugal.kept_bytes + frugal.working_bytes)
    step = distinct_step(5)
    began = time.process_time()
    menus_of(step)
    assert (time.process_time() - began) / 5 < 0.2  # about 0.04 on an idle core of 2024
