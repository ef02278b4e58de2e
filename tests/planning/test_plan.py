"""A plan as data: there and back as JSON, refused when it is none, and what it says on one screen."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from elbowroom.planning.plan import Decision, Plan, Prediction


def plan_of(*decisions: Decision, bound_s: float = 1.0) -> Plan:
    predicted = Prediction(900, "backward of blocks.1", 1.25, 2000, 1.0, bound_s)
    return Plan("model-1234", "cpu", 1000, 300, decisions, predicted)


PLAIN = Decision("blocks.0", "p1", True, (), 800, 10, 0.0, 0)
SOME = Decision("blocks.0", "p1", False, (3, 5), 400, 50, 0.125, 7)


def test_json_there_and_back() -> None:
    plan = plan_of(SOME, replace(PLAIN, region="blocks.1"))
    assert Plan.from_json(plan.to_json()) == plan
    assert json.loads(plan.to_json())["format"] == 1
    assert json.loads(plan.to_json())["decisions"][0]["keep"] == [3, 5]
    assert Plan.from_json(plan_of().to_json()) == plan_of()


@pytest.mark.parametrize("text", ["[]", "{}", '"plan"', '{"format": 2}', '{"format": null}'])
def test_what_is_no_plan_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a plan of format 1"):
        Plan.from_json(text)


def test_a_later_format_is_refused_though_the_rest_is_right() -> None:
    tree = json.loads(plan_of(SOME).to_json()) | {"format": 2}
    with pytest.raises(ValueError, match="not a plan of format 1"):
        Plan.from_json(json.dumps(tree))


def test_the_gap_is_relative_to_the_bound() -> None:
    assert plan_of().predicted.gap == 0.25
    assert plan_of(bound_s=1.25).predicted.gap == 0.0
    assert plan_of(bound_s=0.0).predicted.gap == 0.0
    assert plan_of().extra_s == 0.25


def test_neighbours_that_decide_alike_are_a_group() -> None:
    calls = [
        SOME,
        SOME,
        PLAIN,
        SOME,
        replace(SOME, keep=(3,)),
        replace(SOME, program="p2"),
        replace(SOME, program="p2"),
    ]
    plan = plan_of(*(replace(d, region=f"blocks.{i}") for i, d in enumerate(calls)))
    assert [(name, len(group)) for name, group in plan.groups()] == [
        ("blocks.0 ... blocks.1", 2),
        ("blocks.2", 1),
        ("blocks.3", 1),
        ("blocks.4", 1),
        ("blocks.5 ... blocks.6", 2),
    ]


def test_one_screen() -> None:
    plan = plan_of(SOME, replace(SOME, region="blocks.1"), replace(PLAIN, region="blocks.2"))
    lines = str(plan).splitlines()
    assert len(lines) == 1 + 2 + 3
    assert lines[1].split("  ")[0] == "blocks.0 ... blocks.1"
    assert "400 B" in lines[1]
    assert "7 operators" in lines[1]
    assert "250.0 ms" in lines[1]
    assert "all, 800 B" in lines[2]
    assert "nothing" in lines[2]
    assert "900 B of 1000 B allowed, backward of blocks.1; 300 B of it rest" in lines[3]
    assert "+25.0% on 1.0 s" in lines[4]
    assert "25.0% faster" in lines[5]
