"""From parts of options to whole ones: within the budget, and never slower than before."""

from __future__ import annotations

from random import Random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from elbowroom.planning.linear import LinearProgram
from elbowroom.planning.profile import StepProfile
from elbowroom.planning.rounding import improved, rounded
from tests.planning.random_steps import steps
from tests.planning.test_linear import problem


@settings(max_examples=40)
@given(step=steps(max_calls=3), rng=st.randoms(use_true_random=False))
def test_rounding_keeps_to_the_budget_and_improving_never_slows(step: StepProfile, rng: Random) -> None:
    peaks, plans, budget_bytes, best_s = problem(step, rng)
    relaxed = LinearProgram(peaks, budget_bytes, step.plain_s).relaxed(10.0)
    picks = rounded(peaks, budget_bytes, relaxed, np.inf)
    if picks is not None:
        assert peaks.peak_bytes(picks) <= budget_bytes
    for start in plans[:: max(1, len(plans) // 5)]:
        if peaks.peak_bytes(start) <= budget_bytes:
            better = improved(peaks, budget_bytes, start, np.inf)
            assert peaks.peak_bytes(better) <= budget_bytes
            assert best_s - 1e-9 <= peaks.extra(better) <= peaks.extra(start) + 1e-9
