"""The trade-off: even budgets from the least to plain, every point as simulated, never slower with more memory."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings

from elbowroom.errors import InfeasibleBudgetError
from elbowroom.planning import front as fronts
from elbowroom.planning.allocate import allocate
from elbowroom.planning.baselines import baselines
from elbowroom.planning.front import front, point
from elbowroom.planning.options import menus_of
from elbowroom.planning.profile import StepProfile
from elbowroom.planning.simulate import Choice, run_call, simulate
from tests.planning.random_steps import gpt_like_step, steps


def test_budgets_are_even_and_every_plan_keeps_to_its_own() -> None:
    step = gpt_like_step(4)
    found = front(step, 6)
    budgets = [p.budget_bytes for p in found.plans]
    assert budgets[0] == found.least_bytes
    assert budgets[-1] == found.plain_peak_bytes == simulate(step, [Choice(plain=True)] * 4).peak_bytes
    assert len(budgets) == 6
    widths = [b - a for a, b in pairwise(budgets)]  # type: ignore[operator]
    assert max(widths) - min(widths) <= 1
    assert all(p.peak_bytes <= p.budget_bytes for p in found.plans)  # type: ignore[operator]
    seconds = [p.step_s for p in found.plans]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] > seconds[-1] == found.plain_step_s
    assert found.plans[0].kept_bytes < found.plans[-1].kept_bytes
    assert (found.plans[-1].replayed, found.plans[-1].n_plain) == (0, 4)


def test_baselines_are_there_by_name_with_the_simulators_numbers() -> None:
    step = gpt_like_step(4)
    found = front(step, 2)
    choices = baselines(step)
    assert {p.name for p in found.baselines} == set(choices)
    for p in found.baselines:
        outcome = simulate(step, choices[p.name])
        assert (p.peak_bytes, p.step_s, p.budget_bytes) == (outcome.peak_bytes, outcome.step_s, None)
    for p, rival in zip(found.baselines, found.rivals, strict=True):
        assert rival.peak_bytes <= rival.budget_bytes == p.peak_bytes
        assert rival.step_s <= p.step_s
    by_name = {p.name: rival for p, rival in zip(found.baselines, found.rivals, strict=True)}
    assert by_name["replay all"].step_s < 0.99 * next(p.step_s for p in found.baselines if p.name == "replay all")


def test_a_point_adds_up_what_its_calls_keep_and_replay() -> None:
    step = gpt_like_step(4)
    program = step.programs[0]
    choices = [Choice(plain=True), Choice(False, frozenset()), Choice(False, program.saved), Choice(plain=False)]
    runs = [run_call(program, None if c.plain else c.keep, step.costs) for c in choices]
    found = point(step, choices, name="by hand")
    assert found.name == "by hand"
    assert found.kept_bytes == sum(run.kept_bytes for run in runs)
    assert found.replayed == sum(run.replayed for run in runs)
    assert found.n_plain == 1


@given(step=steps(max_calls=3, max_values=5))
@settings(max_examples=25, deadline=None)
def test_on_any_step(step: StepProfile) -> None:
    found = front(step, 3)
    assert found.plans
    assert all(p.budget_bytes is not None and p.peak_bytes <= p.budget_bytes for p in found.plans)
    seconds = [p.step_s for p in found.plans]
    assert seconds == sorted(seconds, reverse=True)
    assert found.plans[-1].step_s <= found.plain_step_s * 1.001 + 1e-9
    assert all(p.peak_bytes >= found.least_bytes for p in found.baselines)
    assert all(rival.step_s <= p.step_s + 1e-9 for p, rival in zip(found.baselines, found.rivals, strict=True))


def test_the_front_is_data_that_json_can_hold() -> None:
    found = front(gpt_like_step(2), 3).to_dict()
    again = json.loads(json.dumps(found))
    assert again["plans"] == [dict(p) for p in found["plans"]]
    assert again["baselines"][0]["name"] == found["baselines"][0]["name"]
    assert again["least_where"] == found["least_where"] != ""


def test_where_nothing_can_be_gained_there_is_one_point() -> None:
    step = gpt_like_step(1)
    # Whatever is kept: nothing of the call is alive when the step is at its highest.
    moments = tuple(replace(m, peak_bytes=1 << 40) if m.label == "" and m.kind == "gap" else m for m in step.moments)
    moments = (*moments, replace(step.moments[1], level_bytes=0, peak_bytes=1 << 40, label="the optimizer's step"))
    found = front(replace(step, moments=moments), 5)
    assert found.least_bytes == found.plain_peak_bytes
    assert [p.budget_bytes for p in found.plans] == [found.least_bytes]


def test_a_budget_that_turns_out_too_small_gives_way_to_the_least_that_is_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step = gpt_like_step(2)
    menus = menus_of(step)
    least_bytes = front(step, 2, menus=menus).least_bytes
    asked: list[int] = []

    def strict(step: StepProfile, menus: fronts.Menus, budget_bytes: int, *, time_limit_s: float) -> object:
        asked.append(budget_bytes)
        if budget_bytes < least_bytes + 100:
            raise InfeasibleBudgetError(budget_bytes, least_bytes + 100, "here")
        return allocate(step, menus, budget_bytes, time_limit_s=time_limit_s)

    monkeypatch.setattr(fronts, "allocate", strict)
    found = front(step, 2, menus=menus)
    assert asked[:2] == [least_bytes, least_bytes + 100]
    assert [p.budget_bytes for p in found.plans] == [least_bytes + 100, found.plain_peak_bytes]


def test_more_memory_is_never_slower_whatever_the_solver_says(monkeypatch: pytest.MonkeyPatch) -> None:
    step = gpt_like_step(2)
    least = front(step, 2)

    def lazy(step: StepProfile, menus: fronts.Menus, budget_bytes: int, *, time_limit_s: float) -> object:
        found = allocate(step, menus, least.least_bytes if budget_bytes == least.plain_peak_bytes else budget_bytes)
        return replace(found, budget_bytes=budget_bytes)

    monkeypatch.setattr(fronts, "allocate", lazy)
    *_, before, last = front(step, 4).plans
    assert last.step_s <= before.step_s < least.plans[0].step_s
    assert (last.budget_bytes, last.name) == (least.plain_peak_bytes, "plan")


def test_a_refusal_that_contradicts_itself_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(step: StepProfile, menus: fronts.Menus, budget_bytes: int, *, time_limit_s: float) -> object:
        raise InfeasibleBudgetError(budget_bytes, budget_bytes, "here")

    monkeypatch.setattr(fronts, "allocate", refuse)
    with pytest.raises(InfeasibleBudgetError):
        front(gpt_like_step(1), 2)
