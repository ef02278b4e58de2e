"""From the menus of a step's programs to a plan: one option for each region call, the least extra time in the budget.

A linear program over all calls at once (``LinearProgram``) says which options are worth having and what no plan can
beat. Rounding it gives a plan; what the plan's distance from that bound leaves open goes to HiGHS as a mixed-integer
program, which is small by then. Every answer is checked in whole bytes, and the one that is returned by ``simulate``.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from elbowroom.errors import InfeasibleBudgetError
from elbowroom.planning.baselines import baselines
from elbowroom.planning.linear import Answer, LinearProgram
from elbowroom.planning.nested import Cheapest, Nest, most_frugal, nest_of
from elbowroom.planning.options import Option
from elbowroom.planning.peaks import Ints, Peaks, peaks_of
from elbowroom.planning.plan import Decision, Plan, Prediction
from elbowroom.planning.profile import StepProfile
from elbowroom.planning.rounding import improved, largest_parts, rounded
from elbowroom.planning.simulate import Choice, Simulation, Simulator

#: A plan may be this much slower than the best one, of the whole step's time.
GAP = 1e-3

#: Within the gap, a few nodes of branch and bound more are spent unless a plan is as near as this already.
_FINE_GAP = 1e-4
_FINE_NODES = 20

#: That no plan fits is said after so many seconds of looking for one at least, whatever the time limit.
_LEAST_S = 10.0

#: With so few options open (beyond one for each call) the best plan itself is found, whatever the gap.
_FEW_OPEN = 80

Menus = Sequence[Sequence[Option]]


# Public verbs --------------------------------------------------------------------------------------------------------


def allocate(step: StepProfile, menus: Menus, budget_bytes: int, *, time_limit_s: float = 10.0) -> Plan:
    """The plan of least extra time whose simulated peak is at most ``budget_bytes``, resting bytes included.

    ``menus``: the options of each of the step's programs, in their order; what the baselines keep is added to them, so
    that no baseline which fits the budget is faster than the plan. The plan is within ``GAP`` of the fastest one of
    these options, unless ``time_limit_s`` was too short for the solver: then it is the best that was found.
    ``predicted.bound_s`` is the step's plain time and what the linear relaxation over the whole step, with the same
    options, takes on top: no plan from them is faster. Of equally fast options the one that keeps fewer bytes is taken.

    Raises InfeasibleBudgetError with the least bytes if no plan fits.
    """
    deadline_s = time.monotonic() + time_limit_s
    table = _table(step, menus)
    limit_bytes = budget_bytes
    picks, bound_s = _cheapest(table, limit_bytes, deadline_s)
    while True:
        outcome = table.judged(picks)
        if outcome.peak_bytes <= budget_bytes:
            return _plan(table, budget_bytes, picks, outcome, bound_s)
        if table.peaks.peak_bytes(picks) > limit_bytes:
            raise InfeasibleBudgetError(budget_bytes, outcome.peak_bytes, outcome.where)
        # The judge found more than the rows say: ask for that much less.
        limit_bytes -= outcome.peak_bytes - budget_bytes
        picks, _ = _cheapest(table, limit_bytes, deadline_s)


def least_bytes(step: StepProfile, menus: Menus, *, time_limit_s: float = 10.0) -> tuple[int, str]:
    """The smallest simulated peak over all plans from these options (and the baselines'), and where it is.

    ``allocate`` has a plan for exactly that budget, and none for less.
    """
    table = _table(step, menus)
    outcome = table.judged(_least(table, time.monotonic() + time_limit_s))
    return outcome.peak_bytes, outcome.where


# What to choose from -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Table:
    """The rows of a step, the baselines as picks of its options, and the judge of all answers."""

    step: StepProfile
    peaks: Peaks
    nest: Nest | None
    known: tuple[Ints, ...]
    judge: Simulator

    def judged(self, picks: Ints) -> Simulation:
        return self.judge.run(self.peaks.chosen(picks), timeline=False)


def _table(step: StepProfile, menus: Menus) -> _Table:
    judge = Simulator(step)
    options = [list(menu) for menu in menus]
    index = [{(o.plain, o.keep): i for i, o in reversed(list(enumerate(menu)))} for menu in menus]
    plans = list(baselines(step).values())
    # Where no storage is shared and no tape outlives its backward, four numbers are all that matters of an option.
    apart = [True] * len(step.programs)
    for call in step.calls:
        apart[call.program] &= not call.storages
    for plan in plans:
        for c, choice in enumerate(plan):
            p = step.calls[c].program
            key = (choice.plain, choice.keep)
            if key not in index[p]:
                option, left_bytes = _option(judge, c, choice)
                better = (i for i, o in enumerate(options[p]) if apart[p] and not left_bytes and _beats(o, option))
                found = next(better, len(options[p]))
                index[p][key] = found
                if found == len(options[p]):
                    options[p].append(option)
    known = tuple(
        _ints(index[call.program][c.plain, c.keep] for call, c in zip(step.calls, plan, strict=True)) for plan in plans
    )
    peaks = peaks_of(step, options)
    return _Table(step, peaks, nest_of(peaks), known, judge)


def _option(judge: Simulator, call: int, choice: Choice) -> tuple[Option, int]:
    """What a baseline does as an option, and the bytes that it leaves behind."""
    run = judge.call_run(call, choice)
    option = Option(
        choice.plain, choice.keep, run.kept_bytes, run.forward_bytes, run.working_bytes, run.extra_s, run.replayed
    )
    return option, run.left_bytes


def _beats(a: Option, b: Option) -> bool:
    return (
        a.kept_bytes <= b.kept_bytes
        and a.forward_bytes <= b.forward_bytes
        and a.kept_bytes + a.working_bytes <= b.kept_bytes + b.working_bytes
        and a.extra_s <= b.extra_s
    )


# Searching -----------------------------------------------------------------------------------------------------------


def _cheapest(table: _Table, budget_bytes: int, deadline_s: float) -> tuple[Ints, float]:
    """The cheapest picks whose rows are within the budget, or those of the least peak if none are; and the bound of the
    extra seconds."""
    rows = table.peaks.above(budget_bytes)
    if not len(rows):
        picks = _fastest(table.peaks)
        return picks, table.peaks.extra(picks)
    peaks = table.peaks.part(rows)
    known = [picks for picks in table.known if peaks.peak_bytes(picks) <= budget_bytes]
    relaxed = LinearProgram(peaks, budget_bytes, table.step.plain_s).relaxed(_left_s(deadline_s))
    if relaxed.x is not None:
        if table.nest is not None:
            found = _nested(table, table.nest, rows, budget_bytes, relaxed, deadline_s)
        else:
            found = rounded(peaks, budget_bytes, relaxed, deadline_s)
        known += [] if found is None else [found]
    if not known:
        picks = _least(table, max(deadline_s, time.monotonic() + _LEAST_S))
        if peaks.peak_bytes(picks) > budget_bytes:
            return picks, 0.0
        known.append(picks)
    best = improved(peaks, budget_bytes, min(known, key=lambda p: _cost(peaks, p)), deadline_s)
    if relaxed.value is None:
        return best, 0.0
    if table.nest is None:
        best = _refined(table, peaks, budget_bytes, best, relaxed, deadline_s)
    return _tidied(table, peaks, budget_bytes, best), relaxed.value


def _tidied(table: _Table, peaks: Peaks, budget_bytes: int, picks: Ints) -> Ints:
    """The same options for the calls of each program, those that keep most last, where the budget allows that order.

    It costs the same, and a plan reads better in which neighbours do alike.
    """
    programs = np.array([call.program for call in table.step.calls])
    for p in range(len(table.step.programs)):
        calls = np.flatnonzero(programs == p)
        if len(calls) < 2:
            continue
        options = peaks.options[calls[0]]
        tidy = picks.copy()
        tidy[calls] = sorted(picks[calls].tolist(), key=lambda i: (options[i].kept_bytes, i))
        if peaks.peak_bytes(tidy) <= budget_bytes:
            picks = tidy
    return picks


def _cost(peaks: Peaks, picks: Ints) -> tuple[float, int]:
    """What to minimise: seconds, and of equal seconds the bytes."""
    return peaks.extra(picks), peaks.kept(picks)


def _nested(
    table: _Table, nest: Nest, rows: Ints, budget_bytes: int, relaxed: Answer, deadline_s: float
) -> Ints | None:
    """The best plan of a step that nests: looked for near the relaxation first, where there is little to look at."""
    assert relaxed.value is not None
    assert relaxed.prices is not None
    prices = np.zeros(len(table.peaks.constant))
    prices[rows] = relaxed.prices
    search = Cheapest(table.peaks, nest, budget_bytes, prices)
    found = None
    for width in (GAP / 64, GAP / 16, GAP / 4, GAP, 4 * GAP, 16 * GAP, np.inf):
        known_s = relaxed.value + width * (table.step.plain_s + relaxed.value)
        if found is not None:
            known_s = min(known_s, table.peaks.extra(found))
        picks = search.plan(known_s)
        if picks is not None:
            found = picks if found is None else min(found, picks, key=lambda p: _cost(table.peaks, p))
            if table.peaks.extra(found) <= known_s:
                break
        if time.monotonic() > deadline_s:
            break
    return found


def _fastest(peaks: Peaks) -> Ints:
    """Without a limit on bytes: the fastest option of each call."""
    return _ints(min(range(len(o)), key=lambda i: (o[i].extra_s, o[i].kept_bytes)) for o in peaks.options)


def _refined(table: _Table, peaks: Peaks, budget_bytes: int, best: Ints, relaxed: Answer, deadline_s: float) -> Ints:
    """A better plan than ``best`` if branch and bound finds one, among the options that could belong to it.

    A plan with an option costs at least the option's reduced cost more than the relaxation: what comes out above
    ``best`` by that is left out (Dantzig, Fulkerson and Johnson 1954).
    """
    assert relaxed.value is not None
    assert relaxed.reduced is not None
    above_s = peaks.extra(best) - relaxed.value
    gap = above_s / (table.step.plain_s + relaxed.value or 1.0)
    columns = np.flatnonzero(relaxed.reduced <= above_s * (1 + 1e-6))
    few = len(columns) - len(peaks.options) <= _FEW_OPEN
    if gap <= (1e-9 if few else _FINE_GAP):
        return best
    program = LinearProgram(peaks, budget_bytes, table.step.plain_s, columns)
    if few:
        answer = program.whole(_left_s(deadline_s), gap=0.0)
    elif gap > GAP:
        answer = program.whole(_left_s(deadline_s), gap=GAP)
    else:
        answer = program.whole(_left_s(deadline_s), gap=_FINE_GAP, node_limit=_FINE_NODES)
    if answer.x is None:
        return best
    picks = rounded(peaks, budget_bytes, answer._replace(reduced=relaxed.reduced), deadline_s)
    if picks is None:
        return best
    return min(best, improved(peaks, budget_bytes, picks, deadline_s), key=lambda p: _cost(peaks, p))


def _least(table: _Table, deadline_s: float) -> Ints:
    """The picks of the least peak."""
    peaks = table.peaks
    if table.nest is not None:
        return most_frugal(peaks, table.nest)
    low = [
        [min(range(len(o)), key=lambda i: o[i].kept_bytes + part * o[i].working_bytes) for o in peaks.options]
        for part in (0, 1)
    ]
    best = min((*table.known, *(np.array(picks, dtype=np.int64) for picks in low)), key=peaks.peak_bytes)
    relaxed = LinearProgram(peaks, None, 0.0).relaxed(_left_s(deadline_s))
    if relaxed.value is not None and relaxed.reduced is not None:
        above = peaks.peak_bytes(best) - relaxed.value
        columns = np.flatnonzero(relaxed.reduced <= above * (1 + 1e-6))
        if above >= 0.5:
            answer = LinearProgram(peaks, None, 0.0, columns).whole(_left_s(deadline_s), gap=0.0)
            if answer.x is not None:
                best = min(best, largest_parts(peaks, answer), key=peaks.peak_bytes)
    return best


def _ints(numbers: Iterable[int]) -> Ints:
    return np.array(list(numbers), dtype=np.int64)


def _left_s(deadline_s: float) -> float:
    return max(0.01, deadline_s - time.monotonic())


# The answer ----------------------------------------------------------------------------------------------------------


def _plan(table: _Table, budget_bytes: int, picks: Ints, outcome: Simulation, bound_extra_s: float) -> Plan:
    step = table.step
    decisions = tuple(
        Decision(
            region=call.region,
            program=step.programs[call.program].digest,
            plain=option.plain,
            keep=tuple(sorted(option.keep)),
            kept_bytes=option.kept_bytes,
            working_bytes=option.working_bytes,
            extra_s=option.extra_s,
            replayed=option.replayed,
        )
        for call, option in zip(step.calls, table.peaks.chosen(picks), strict=True)
    )
    plain = table.judge.run([Choice(plain=True)] * len(step.calls), timeline=False)
    bound_s = min(outcome.step_s, step.plain_s + max(0.0, bound_extra_s))
    predicted = Prediction(outcome.peak_bytes, outcome.where, outcome.step_s, plain.peak_bytes, plain.step_s, bound_s)
    return Plan(step.fingerprint, step.device, budget_bytes, step.resting_bytes, decisions, predicted)
