"""The data: JSON there and back, and what a profile knows of itself."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings

from elbowroom.planning.plan import Decision, Plan, Prediction
from elbowroom.planning.profile import OperatorProfile, StepProfile, digest_of
from tests.planning.random_steps import gpt_like_step, steps

PLAN = Plan(
    "fingerprint",
    "cpu",
    1000,
    100,
    (
        Decision("blocks.0", "digest", False, (1, 5), 10, 20, 0.5, 3),
        Decision("blocks.1", "digest", True, (), 30, 0, 0.0, 0),
    ),
    Prediction(900, "backward of blocks.0", 2.5, 1200, 2.0, 2.4),
)


@settings(max_examples=50, deadline=None)
@given(steps())
def test_a_profile_goes_through_json(step: StepProfile) -> None:
    back = StepProfile.from_json(step.to_json())
    assert back == step
    assert hash(back) == hash(step)  # tuples all the way down, no lists left


def test_a_plan_goes_through_json() -> None:
    back = Plan.from_json(PLAN.to_json())
    assert back == PLAN
    assert hash(back) == hash(PLAN)
    assert json.loads(PLAN.to_json())["format"] == 1


@pytest.mark.parametrize("text", ["[]", "{}", '{"format": 2}', "3"])
def test_other_json_is_no_plan(text: str) -> None:
    with pytest.raises(ValueError, match="not a plan of format 1"):
        Plan.from_json(text)


def test_the_gap_of_a_prediction_is_relative_to_its_bound() -> None:
    assert PLAN.predicted.gap == pytest.approx(2.5 / 2.4 - 1)
    assert replace(PLAN.predicted, bound_s=0.0).gap == 0.0


def test_a_plain_step_takes_its_calls_and_gaps() -> None:
    one, three = gpt_like_step(1), gpt_like_step(3)
    program = one.programs[0]
    call_s = program.forward_s + sum(e.seconds for e in program.events)
    assert one.plain_s == pytest.approx(call_s + 0.02)
    assert three.plain_s == pytest.approx(3 * call_s + 0.02)
    assert three.program_of(2) is three.programs[0]


def test_saved_values_are_those_of_slots_that_have_one() -> None:
    program = gpt_like_step(1).programs[0]
    assert replace(program, slots=(3, -1, 3, 0)).saved == {0, 3}


def test_an_operator_makes_its_outputs_and_new_versions() -> None:
    assert list(OperatorProfile("op", (1,), (2, 3), ((1, 4, True),), 1.0).made) == [2, 3, 4]


def test_digests_tell_parts_apart() -> None:
    assert digest_of((1, "a")) == digest_of((1, "a")) != digest_of((1, "b"))
    assert len(digest_of(())) == 16
