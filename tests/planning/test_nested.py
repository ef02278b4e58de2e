"""Steps that nest: the least peak and the cheapest plan without a solver are those of trying every plan."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elbowroom.planning.nested import Cheapest, most_frugal, nest_of
from elbowroom.planning.profile import StepProfile
from tests.planning.random_steps import steps
from tests.planning.test_linear import problem


@settings(max_examples=60)
@given(step=steps(max_calls=3), rng=st.randoms(use_true_random=False))
def test_a_step_that_nests_has_the_same_answers_without_a_solver(step: StepProfile, rng: Random) -> None:
    peaks, plans, budget_bytes, best_s = problem(step, rng)
    nest = nest_of(peaks)
    if nest is None:
        return
    assert peaks.peak_bytes(most_frugal(peaks, nest)) == min(peaks.peak_bytes(p) for p in plans)
    anything = np.array([rng.choice([0.0, 0.01, 0.2]) for _ in peaks.constant])  # any prices will do
    picks = Cheapest(peaks, nest, budget_bytes, anything).plan(np.inf)
    assert picks is not None
    assert peaks.peak_bytes(picks) <= budget_bytes
    assert peaks.extra(picks) == pytest.approx(best_s, abs=1e-9)
    picks = Cheapest(peaks, nest, budget_bytes, anything).plan(best_s)
    assert picks is not None
    assert peaks.extra(picks) == pytest.approx(best_s, abs=1e-9)
    least_bytes = min(peaks.peak_bytes(p) for p in plans)
    assert Cheapest(peaks, nest, least_bytes - 1, 0 * anything).plan(np.inf) is None
