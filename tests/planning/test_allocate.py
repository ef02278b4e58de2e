"""Plans for a whole step: within the budget, the fastest of all, and an error with numbers where there is none."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise, product

import pytest
from hypothesis import given, settings

from elbowroom.errors import InfeasibleBudgetError
from elbowroom.planning import allocate as allocating
from elbowroom.planning.allocate import GAP, allocate, least_bytes
from elbowroom.planning.baselines import baselines, every
from elbowroom.planning.linear import STOPPED, Answer, LinearProgram
from elbowroom.planning.options import Option, menu, menus_of
from elbowroom.planning.peaks import peaks_of
from elbowroom.planning.plan import Plan
from elbowroom.planning.profile import BACKWARD, FORWARD, MADE, EngineCosts, Moment, StepProfile
from elbowroom.planning.profile import GAP as BETWEEN
from elbowroom.planning.simulate import Choice, Decided, Simulator, simulate
from tests.planning.random_steps import FREE, distinct_step, gpt_like_step, steps

Menus = Sequence[Sequence[Option]]


def every_plan(step: StepProfile, menus: Menus) -> list[tuple[int, float]]:
    """(peak bytes, step seconds) of every plan from the menus and the baselines, as simulated."""
    per_call: list[dict[tuple[bool, frozenset[int]], Decided]] = [
        {(o.plain, o.keep): o for o in menus[call.program]} for call in step.calls
    ]
    for choices in baselines(step).values():
        for c, choice in enumerate(choices):
            program = step.calls[c].program
            for d, call in enumerate(step.calls):
                if call.program == program:
                    per_call[d].setdefault((choice.plain, choice.keep), choice)
    judge = Simulator(step)
    outcomes = (judge.run(plan, timeline=False) for plan in product(*(c.values() for c in per_call)))
    return [(o.peak_bytes, o.step_s) for o in outcomes]


def check_against(step: StepProfile, menus: Menus, plans: list[tuple[int, float]]) -> None:
    """Plans for budgets from the least to the highest are as good as any; below the least there is none."""
    least = min(peak for peak, _ in plans)
    highest = max(peak for peak, _ in plans)
    assert least_bytes(step, menus)[0] == least
    with pytest.raises(InfeasibleBudgetError) as caught:
        allocate(step, menus, least - 1)
    assert (caught.value.budget_bytes, caught.value.least_bytes) == (least - 1, least)
    assert caught.value.where
    before_s = None
    for budget_bytes in (least, least + (highest - least) // 4, (least + highest) // 2, highest):
        plan = allocate(step, menus, budget_bytes)
        best_s = min(seconds for peak, seconds in plans if peak <= budget_bytes)
        outcome = simulate(step, plan.decisions)
        assert outcome.peak_bytes == plan.predicted.peak_bytes <= budget_bytes
        assert outcome.step_s == pytest.approx(plan.predicted.step_s)
        assert plan.predicted.where == outcome.where
        assert plan.predicted.step_s == pytest.approx(best_s, abs=1e-9)  # so few options: the best one itself
        assert plan.predicted.bound_s <= best_s + 1e-6
        assert before_s is None or plan.predicted.step_s <= before_s + 1e-9
        before_s = plan.predicted.step_s


@settings(max_examples=40, deadline=None)
@given(step=steps(max_calls=3, max_values=6))
def test_plans_are_as_good_as_the_best_of_all_plans(step: StepProfile) -> None:
    menus = menus_of(step, max_options=4)
    check_against(step, menus, every_plan(step, menus))


@settings(max_examples=25, deadline=None)
@given(step=steps(max_calls=3, max_values=6))
def test_so_they_are_in_steps_that_do_not_nest(step: StepProfile) -> None:
    step = crossed(step)
    menus = menus_of(step, max_options=3)
    check_against(step, menus, every_plan(step, menus))


@settings(max_examples=15, deadline=None)
@given(step=steps(max_calls=3, max_values=6))
def test_the_mixed_integer_program_finds_what_nesting_finds(step: StepProfile) -> None:
    menus = menus_of(step, max_options=4)
    least, _ = least_bytes(step, menus)
    budgets = (least, least + 20, least + 100)
    known = [allocate(step, menus, b).predicted for b in budgets]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(allocating, "nest_of", lambda peaks: None)
        assert least_bytes(step, menus)[0] == least
        for budget_bytes, predicted in zip(budgets, known, strict=True):
            found = allocate(step, menus, budget_bytes).predicted
            assert found.step_s == pytest.approx(predicted.step_s, abs=1e-9)


def crossed(step: StepProfile) -> StepProfile:
    """Backwards in the order of the forwards: what runs first lets go first."""
    calls = iter([m.call for m in step.moments if m.kind == BACKWARD][::-1])
    return replace(step, moments=tuple(replace(m, call=next(calls)) if m.kind == BACKWARD else m for m in step.moments))


@pytest.mark.parametrize("has_solver", [False, True])
@pytest.mark.parametrize("is_crossed", [False, True])
def test_no_baseline_that_fits_the_budget_is_faster(
    monkeypatch: pytest.MonkeyPatch, is_crossed: bool, has_solver: bool
) -> None:
    if not has_solver:  # its time was up before it had anything
        monkeypatch.setattr(LinearProgram, "relaxed", lambda self, time_limit_s: Answer(STOPPED))
    step = distinct_step(2)
    step = replace(
        step,
        calls=tuple(replace(step.calls[c % 2], region=f"blocks.{c}") for c in range(6)),
        moments=_stack(6, head_bytes=10 << 20),
    )
    step = crossed(step) if is_crossed else step
    menus = menus_of(step, max_options=16)
    plain, replay = Choice(plain=True), Choice(plain=False)
    rules = baselines(step)
    assert len(rules) > 8
    if has_solver:
        rules |= {f"replay one in {k}": every(k, 6, replay, plain) for k in (5, 6)}
        rules |= {f"keep one in {k}": every(k, 6, plain, replay) for k in (5, 6)}
    for name, choices in rules.items():
        rule = simulate(step, choices)
        plan = allocate(step, menus, rule.peak_bytes)
        assert plan.predicted.peak_bytes <= rule.peak_bytes, name
        assert plan.predicted.step_s <= rule.step_s + 1e-12, name


def _stack(n_calls: int, head_bytes: int) -> tuple[Moment, ...]:
    forward = [Moment(FORWARD, c, 0, 0, 0.0) for c in range(n_calls)]
    backward = [Moment(BACKWARD, c, 0, 0, 0.0) for c in reversed(range(n_calls))]
    return (*forward, Moment(BETWEEN, -1, 0, head_bytes, 0.01, "head and loss"), *backward)


def test_more_budget_is_never_slower_on_a_bigger_step() -> None:
    step = gpt_like_step(24)
    menus = menus_of(step)
    least, _ = least_bytes(step, menus)
    plain_bytes = simulate(step, [Choice(plain=True)] * 24).peak_bytes
    plans = [allocate(step, menus, least + (plain_bytes - least) * i // 10) for i in range(11)]
    seconds = [p.predicted.step_s for p in plans]
    assert all(later <= earlier + 1e-9 for earlier, later in pairwise(seconds))
    assert all(p.predicted.peak_bytes <= p.budget_bytes for p in plans)
    assert plans[-1].extra_s == 0
    assert all(p.predicted.gap <= 0.02 for p in plans[1:])


def test_the_last_blocks_are_kept() -> None:
    """Where backward's own work decides the peak, what the last block keeps instead of replaying is free.

    Nobody told the planner: blocks and menus are the same, only their places differ.
    """
    step = gpt_like_step(8)
    step = replace(step, moments=_stack(8, head_bytes=0))
    menus = menus_of(step)
    least, _ = least_bytes(step, menus)
    plain_bytes = simulate(step, [Choice(plain=True)] * 8).peak_bytes
    plan = allocate(step, menus, least + (plain_bytes - least) // 10)
    kept = [d.kept_bytes for d in plan.decisions]
    assert kept == sorted(kept)
    assert kept[-1] > 2 * kept[0]
    assert plan.decisions[-1].extra_s < min(d.extra_s for d in plan.decisions[:-1]) / 2
    # The same options, but the first block keeps what the last one did: that does not fit.
    moved = (plan.decisions[-1], *plan.decisions[:-1])
    assert simulate(step, moved).peak_bytes > plan.budget_bytes


def test_with_enough_budget_every_call_is_plain() -> None:
    step = gpt_like_step(3)
    plain = simulate(step, [Choice(plain=True)] * 3)
    plan = allocate(step, menus_of(step), plain.peak_bytes)
    assert all(d.plain and not d.replayed for d in plan.decisions)
    assert plan.predicted.step_s == plan.predicted.plain_step_s == plan.predicted.bound_s == plain.step_s
    assert plan.predicted.gap == 0
    below = allocate(step, menus_of(step), plain.peak_bytes - 1)
    assert below.predicted.plain_peak_bytes == plain.peak_bytes
    assert not all(d.plain for d in below.decisions)
    assert below.predicted.bound_s <= below.predicted.step_s


def test_a_plan_says_what_its_options_take() -> None:
    step = gpt_like_step(2)
    menus = menus_of(step)
    least, where = least_bytes(step, menus)
    plan = allocate(step, menus, least + (1 << 20))
    assert (plan.fingerprint, plan.device, plan.resting_bytes) == (step.fingerprint, step.device, step.resting_bytes)
    assert plan.budget_bytes == least + (1 << 20)
    assert [d.region for d in plan.decisions] == ["blocks.0", "blocks.1"]
    assert {d.program for d in plan.decisions} == {step.programs[0].digest}
    judge = Simulator(step)
    for c, decision in enumerate(plan.decisions):
        run = judge.call_run(c, decision)
        assert (decision.kept_bytes, decision.working_bytes) == (run.kept_bytes, run.working_bytes)
        assert (decision.extra_s, decision.replayed) == (run.extra_s, run.replayed)
    assert Plan.from_json(plan.to_json()) == plan
    assert where


def test_of_equally_fast_options_the_one_that_keeps_less_is_taken() -> None:
    """Checkpointing costs nothing here, and neither does replaying: everything is as fast as anything."""
    step = gpt_like_step(3)
    operators = tuple(replace(o, seconds=0.0) for o in step.programs[0].operators)
    step = replace(step, programs=(replace(step.programs[0], operators=operators),), costs=FREE)
    menus = [full_menu(step)]
    least = min(o.kept_bytes for o in menus[0])
    assert least < max(o.kept_bytes for o in menus[0])
    for budget_bytes in (1 << 40, simulate(step, [Choice(plain=True)] * 3).peak_bytes - 1):
        assert [d.kept_bytes for d in allocate(step, menus, budget_bytes).decisions] == [least] * 3


def full_menu(step: StepProfile) -> list[Option]:
    judge = Simulator(step)
    saved = sorted(v for v in step.programs[0].saved if step.programs[0].values[v].kind == MADE)
    choices = [Choice(plain=True), *(Choice(plain=False, keep=frozenset(saved[:n])) for n in range(len(saved)))]
    runs = [(choice, judge.call_run(0, choice)) for choice in choices]
    return [
        Option(c.plain, c.keep, r.kept_bytes, r.forward_bytes, r.working_bytes, r.extra_s, r.replayed) for c, r in runs
    ]


@pytest.mark.parametrize("is_crossed", [False, True])
def test_without_time_there_still_is_a_plan_within_the_budget(is_crossed: bool) -> None:
    step = crossed(gpt_like_step(12)) if is_crossed else gpt_like_step(12)
    menus = menus_of(step)
    least, _ = least_bytes(step, menus)
    plain_bytes = simulate(step, [Choice(plain=True)] * 12).peak_bytes
    for budget_bytes in (least, (least + plain_bytes) // 2):
        hasty = allocate(step, menus, budget_bytes, time_limit_s=0.0)
        assert simulate(step, hasty.decisions).peak_bytes <= budget_bytes
        patient = allocate(step, menus, budget_bytes)
        assert patient.predicted.step_s <= hasty.predicted.step_s
        assert hasty.predicted.bound_s <= patient.predicted.step_s


@pytest.mark.parametrize("missing_bytes", [1, 3 << 20])
def test_the_solver_is_not_its_own_judge(monkeypatch: pytest.MonkeyPatch, missing_bytes: int) -> None:
    """Rows that say too little are found out by the simulator, and the plan keeps to the budget all the same."""
    step = gpt_like_step(6)
    menus = menus_of(step)
    least, _ = least_bytes(step, menus)
    budget_bytes = (least + simulate(step, [Choice(plain=True)] * 6).peak_bytes) // 2
    honest = allocate(step, menus, budget_bytes)

    def too_little(step: StepProfile, options: Menus) -> object:
        peaks = peaks_of(step, options)
        return replace(peaks, constant=peaks.constant - missing_bytes)

    monkeypatch.setattr(allocating, "peaks_of", too_little)
    plan = allocate(step, menus, budget_bytes)
    assert simulate(step, plan.decisions).peak_bytes <= budget_bytes
    assert plan.predicted.step_s >= honest.predicted.step_s - 1e-9


def test_calls_that_hold_one_storage_pay_for_it_once() -> None:
    """Each block's last value is saved by itself and by the next block: the step nests, and the best plan is found."""
    step = gpt_like_step(3)
    program = step.programs[0]
    last = max(v for v, value in enumerate(program.values) if value.kind == MADE)
    program = replace(program, slots=(*program.slots, last))
    step = replace(step, programs=(program,))
    menus = [menu(program, step.costs, max_options=6)]
    check_against(step, menus, every_plan(step, menus))


def seconds_of(step: StepProfile, menus: Menus) -> list[float]:
    """CPU seconds of allocating at budgets between the least and the plain peak."""
    least, _ = least_bytes(step, menus)
    plain_bytes = simulate(step, [Choice(plain=True)] * len(step.calls)).peak_bytes
    took = []
    for part in (0.1, 0.4, 0.8):
        begin_s = time.process_time()
        plan = allocate(step, menus, least + int(part * (plain_bytes - least)))
        took.append(time.process_time() - begin_s)
        assert plan.predicted.gap <= GAP
    return took


def test_96_blocks_of_60_values_take_a_second() -> None:
    step = gpt_like_step(96)
    begin_s = time.process_time()
    menus = menus_of(step)
    menu_s = time.process_time() - begin_s
    took = seconds_of(step, menus)
    print(f"96 identical: menu {menu_s:.2f} s, allocate {', '.join(f'{s:.2f}' for s in took)} s")
    assert menu_s + max(took) <= 1.0


@pytest.mark.slow
def test_200_distinct_programs_take_ten_seconds() -> None:
    step = distinct_step(200)
    begin_s = time.process_time()
    menus = menus_of(step)
    menu_s = time.process_time() - begin_s
    took = seconds_of(step, menus)
    print(f"200 distinct: menu {menu_s:.2f} s, allocate {', '.join(f'{s:.2f}' for s in took)} s")
    assert menu_s + max(took) <= 10.0


def test_a_step_without_region_calls_is_a_step() -> None:
    moments = (Moment(BETWEEN, -1, 5, 70, 1.0, "all of it"),)
    step = StepProfile("none", "cpu", 30, (), (), moments, EngineCosts(0.0, 0.0, 0.0))
    plan = allocate(step, [], 100)
    assert (plan.decisions, plan.predicted.peak_bytes, plan.predicted.step_s) == ((), 100, 1.0)
    with pytest.raises(InfeasibleBudgetError, match="all of it") as caught:
        allocate(step, [], 99)
    assert caught.value.least_bytes == 100
