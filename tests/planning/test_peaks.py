"""The rows say what the simulator says, to the byte, whatever is picked."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from random import Random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from elbowroom.planning.nested import nest_of
from elbowroom.planning.options import Option
from elbowroom.planning.peaks import peaks_of
from elbowroom.planning.profile import MADE, EngineCosts, ProgramProfile, StepProfile
from elbowroom.planning.simulate import Simulator, run_call
from tests.planning.random_steps import gpt_like_step, steps


def some_options(rng: Random, program: ProgramProfile, costs: EngineCosts, count: int) -> tuple[Option, ...]:
    """Plain, replay all, and random keep sets."""
    made = [v for v, value in enumerate(program.values) if value.kind == MADE]
    keeps: list[frozenset[int] | None] = [None, frozenset()]
    keeps += [frozenset(v for v in made if rng.random() < 0.5) for _ in range(count - 2)]
    options = []
    for keep in dict.fromkeys(keeps):
        run = run_call(program, keep, costs)
        options.append(
            Option(
                keep is None, keep or frozenset(), run.kept_bytes, run.forward_bytes, run.working_bytes, run.extra_s,
                run.replayed,
            )
        )  # fmt: skip
    return tuple(options)


@given(step=steps(max_calls=4), rng=st.randoms(use_true_random=False))
def test_the_highest_row_is_the_simulated_peak(step: StepProfile, rng: Random) -> None:
    peaks = peaks_of(step, [some_options(rng, p, step.costs, 5) for p in step.programs])
    judge = Simulator(step)
    for _ in range(4):
        picks = np.array([rng.randrange(len(o)) for o in peaks.options], dtype=np.int64)
        outcome = judge.run(peaks.chosen(picks), timeline=False)
        assert peaks.peak_bytes(picks) == outcome.peak_bytes
        assert abs(step.plain_s + peaks.extra(picks) - outcome.step_s) < 1e-9


@given(step=steps(max_calls=4), rng=st.randoms(use_true_random=False))
def test_rows_that_are_left_out_are_below_the_budget_under_every_pick(step: StepProfile, rng: Random) -> None:
    peaks = peaks_of(step, [some_options(rng, p, step.costs, 4) for p in step.programs])
    picks = np.array([rng.randrange(len(o)) for o in peaks.options], dtype=np.int64)
    budget_bytes = peaks.peak_bytes(picks) - rng.choice([0, 1, 50])
    part = peaks.part(peaks.above(budget_bytes))
    for _ in range(4):
        picks = np.array([rng.randrange(len(o)) for o in peaks.options], dtype=np.int64)
        assert (part.peak_bytes(picks) <= budget_bytes) == (peaks.peak_bytes(picks) <= budget_bytes)


def test_a_storage_that_a_follower_holds_anyway_costs_its_maker_nothing_then() -> None:
    step = gpt_like_step(2)
    program = step.programs[0]
    last = max(v for v, value in enumerate(program.values) if value.kind == MADE)
    program = replace(program, slots=(*program.slots, last))  # its maker saves it, too
    step = replace(step, programs=(program,))
    peaks = peaks_of(step, [some_options(Random(0), program, step.costs, 2)])
    plain = np.zeros(2, dtype=np.int64)
    head = next(i for i, m in enumerate(step.moments) if m.label == "head and loss")
    found = Simulator(step).run(peaks.chosen(plain)).moment_peaks[head]
    assert found in peaks.rows(plain)
    kept_bytes = peaks.options[0][0].kept_bytes
    assert found == step.resting_bytes + step.moments[head].peak_bytes + 2 * kept_bytes - program.values[last].nbytes


def test_what_all_calls_hold_anyway_is_no_matter_of_the_plan() -> None:
    """A decoder's memory: every block reads and saves it. It is there once, from the first block's forward on."""
    step = gpt_like_step(3)
    step = replace(step, calls=tuple(replace(call, storages=((0, 7),)) for call in step.calls))
    options = some_options(Random(0), step.programs[0], step.costs, 4)
    peaks = peaks_of(step, [options])
    assert not peaks.shared
    assert nest_of(peaks) is not None
    judge = Simulator(step)
    for picks in product(range(len(options)), repeat=3):
        outcome = judge.run([options[i] for i in picks], timeline=False)
        assert peaks.peak_bytes(np.array(picks, dtype=np.int64)) == outcome.peak_bytes
