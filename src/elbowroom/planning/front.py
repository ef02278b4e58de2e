"""The trade-off of one step: what each byte of budget buys in time, and what plans by rule of thumb would get.

Numbers in, numbers out: every point is simulated, none is the solver's own claim.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from elbowroom.errors import InfeasibleBudgetError
from elbowroom.planning.allocate import allocate, least_bytes
from elbowroom.planning.baselines import baselines
from elbowroom.planning.options import Option, menus_of
from elbowroom.planning.plan import Plan
from elbowroom.planning.profile import StepProfile
from elbowroom.planning.simulate import Decided, run_call, simulate

Menus = Sequence[Sequence[Option]]


@dataclass(frozen=True)
class Point:
    """One plan for the whole step, as the simulator sees it.

    ``name``: of the baseline; ``"plan"`` for one that was made for ``budget_bytes`` (None for baselines).
    ``peak_bytes``: of the whole step, resting bytes included. ``kept_bytes``: what all its region calls hold between
    their forward and their backward, added up. ``replayed``: operators run in backward. ``n_plain``: calls that run as
    without checkpointing.
    """

    name: str
    budget_bytes: int | None
    peak_bytes: int
    step_s: float
    kept_bytes: int
    replayed: int
    n_plain: int


@dataclass(frozen=True)
class Front:
    """What the planner can do with a step, beside what rules of thumb do.

    ``plans``: from the least feasible budget to the one that needs no help, in even steps of bytes. ``rivals``: for
    each of ``baselines`` the plan for a budget of its peak. No plan is slower than one for a smaller budget.
    ``least_where``: the part of the step that needs the least peak.
    """

    fingerprint: str
    device: str
    resting_bytes: int
    n_calls: int
    plain_peak_bytes: int
    plain_step_s: float
    least_bytes: int
    least_where: str
    plans: tuple[Point, ...]
    baselines: tuple[Point, ...]
    rivals: tuple[Point, ...]

    def to_dict(self) -> dict[str, Any]:
        """The front as JSON-able data."""
        return asdict(self)


def front(step: StepProfile, n_points: int = 23, *, menus: Menus | None = None, time_limit_s: float = 2.0) -> Front:
    """The plans at ``n_points`` (at least 2) even budgets from the least feasible peak to the plain one, the baselines,
    and their rivals.

    ``menus``: those of the step's programs, if they are made already. ``time_limit_s`` is the solver's, for each plan.
    Where the least plan is no better than the plain step there is one plan: nothing is to be gained.
    """
    menus = menus_of(step) if menus is None else menus
    rules = tuple(point(step, choices, name=name) for name, choices in baselines(step).items())
    plain = simulate(step, baselines(step)["keep all"])
    least_peak_bytes, where = least_bytes(step, menus)
    even = _even_budgets(least_peak_bytes, plain.peak_bytes, n_points)
    found = _plans_within(step, menus, {*even, *(rule.peak_bytes for rule in rules)}, time_limit_s)
    return Front(
        fingerprint=step.fingerprint,
        device=step.device,
        resting_bytes=step.resting_bytes,
        n_calls=len(step.calls),
        plain_peak_bytes=plain.peak_bytes,
        plain_step_s=plain.step_s,
        least_bytes=least_peak_bytes,
        least_where=where,
        plans=tuple(found[budget_bytes] for budget_bytes in even),
        baselines=rules,
        rivals=tuple(found[rule.peak_bytes] for rule in rules),
    )


def point(
    step: StepProfile, choices: Sequence[Decided], *, name: str = "plan", budget_bytes: int | None = None
) -> Point:
    """What these choices (one per region call of the step) come to."""
    outcome = simulate(step, choices)
    # Identical blocks with the same choice are interpreted once.
    kinds = Counter(
        (call.program, choice.plain, frozenset(choice.keep)) for call, choice in zip(step.calls, choices, strict=True)
    )
    kept_bytes = replayed = n_plain = 0
    for (program, is_plain, keep), count in kinds.items():
        run = run_call(step.programs[program], None if is_plain else keep, step.costs)
        kept_bytes += count * run.kept_bytes
        replayed += count * run.replayed
        n_plain += count * is_plain
    return Point(name, budget_bytes, outcome.peak_bytes, outcome.step_s, kept_bytes, replayed, n_plain)


def _even_budgets(least_peak_bytes: int, plain_peak_bytes: int, n_points: int) -> list[int]:
    """From the least to the plain peak, both included; rounded down, as budgets are."""
    span_bytes = plain_peak_bytes - least_peak_bytes
    if span_bytes <= 0:
        return [least_peak_bytes]
    return sorted({least_peak_bytes + span_bytes * number // (n_points - 1) for number in range(n_points)})


def _plans_within(step: StepProfile, menus: Menus, budgets: set[int], time_limit_s: float) -> dict[int, Point]:
    """A plan for each budget. One that turns out a little too small has the plan for the least that is enough."""
    found: dict[int, Point] = {}
    last: Point | None = None
    for budget_bytes in sorted(budgets):
        plan = _plan_within(step, menus, budget_bytes, time_limit_s)
        here = point(step, plan.decisions, budget_bytes=plan.budget_bytes)
        # A plan that fits a smaller budget fits this one: the solver's gap never makes more memory slower.
        if last is not None and last.step_s <= here.step_s:
            here = replace(last, budget_bytes=plan.budget_bytes)
        found[budget_bytes] = last = here
    return found


def _plan_within(step: StepProfile, menus: Menus, budget_bytes: int, time_limit_s: float) -> Plan:
    try:
        return allocate(step, menus, budget_bytes, time_limit_s=time_limit_s)
    except InfeasibleBudgetError as error:
        if error.least_bytes <= budget_bytes:
            raise  # it contradicts itself: not ours to repair
        return _plan_within(step, menus, error.least_bytes, time_limit_s)
