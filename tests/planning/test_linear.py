"""The linear program: what it says no plan can beat, and whole answers that are the best of all."""

from __future__ import annotations

from itertools import product
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elbowroom.planning.linear import INFEASIBLE, OPTIMAL, LinearProgram
from elbowroom.planning.peaks import Ints, Peaks, peaks_of
from elbowroom.planning.profile import StepProfile
from elbowroom.planning.rounding import largest_parts
from tests.planning.random_steps import steps
from tests.planning.test_peaks import some_options


def all_picks(peaks: Peaks) -> list[Ints]:
    return [np.array(p, dtype=np.int64) for p in product(*(range(len(o)) for o in peaks.options))]


def problem(step: StepProfile, rng: Random) -> tuple[Peaks, list[Ints], int, float]:
    """Rows, every plan, a budget that some plan keeps to, and the extra seconds of the best one."""
    peaks = peaks_of(step, [some_options(rng, p, step.costs, 4) for p in step.programs])
    plans = all_picks(peaks)
    budget_bytes = rng.choice([peaks.peak_bytes(p) for p in plans]) + rng.choice([0, 0, 3])
    return peaks, plans, budget_bytes, min(peaks.extra(p) for p in plans if peaks.peak_bytes(p) <= budget_bytes)


@settings(max_examples=40)
@given(step=steps(max_calls=3), rng=st.randoms(use_true_random=False))
def test_no_plan_beats_the_relaxation_nor_the_reduced_cost_of_what_it_picks(step: StepProfile, rng: Random) -> None:
    peaks, plans, budget_bytes, best_s = problem(step, rng)
    relaxed = LinearProgram(peaks, budget_bytes, step.plain_s).relaxed(10.0)
    assert relaxed.status == OPTIMAL
    assert relaxed.value is not None
    assert relaxed.reduced is not None
    assert relaxed.prices is not None
    assert relaxed.value <= best_s + 1e-6
    assert (relaxed.prices >= 0).all()
    for picks in plans:
        if peaks.peak_bytes(picks) <= budget_bytes:
            assert peaks.extra(picks) >= relaxed.value + relaxed.reduced[peaks.columns(picks)].max() - 1e-6


@settings(max_examples=40)
@given(step=steps(max_calls=3), rng=st.randoms(use_true_random=False))
def test_whole_answers_are_the_best_plan_and_the_least_peak(step: StepProfile, rng: Random) -> None:
    peaks, plans, budget_bytes, best_s = problem(step, rng)
    answer = LinearProgram(peaks, budget_bytes, step.plain_s).whole(10.0, gap=0.0)
    picks = largest_parts(peaks, answer)
    assert peaks.peak_bytes(picks) <= budget_bytes
    assert peaks.extra(picks) == pytest.approx(best_s, abs=1e-6)
    assert answer.value == pytest.approx(best_s, abs=1e-6)
    least_bytes = min(peaks.peak_bytes(p) for p in plans)
    answer = LinearProgram(peaks, None, 0.0).whole(10.0, gap=0.0)
    assert peaks.peak_bytes(largest_parts(peaks, answer)) == least_bytes
    assert answer.value == pytest.approx(least_bytes, abs=1e-3)
    assert LinearProgram(peaks, least_bytes - 1, step.plain_s).whole(10.0, gap=0.0).status == INFEASIBLE
