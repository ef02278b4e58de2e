"""One kind of step: its profile, its plan, how its region calls are to run, and what was measured of it."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from statistics import median

import torch

from elbowroom.core.program import Program
from elbowroom.core.region import Order
from elbowroom.errors import InfeasibleBudgetError, PlanMismatchError
from elbowroom.fitting.steps import Kind, Step
from elbowroom.planning.allocate import allocate
from elbowroom.planning.options import Option, menus_of
from elbowroom.planning.plan import Plan
from elbowroom.planning.profile import GAP, Moment, StepProfile

OPTIMIZER = "the optimizer's step"

#: The longest that a step waits for its plan; the best one found by then is taken.
PLANNING_LIMIT_S = 5.0

#: This part of what the step itself may take is left free: predictions are within a few thousandths.
MARGIN = 256

#: Step times remembered for the report.
N_TIMES = 64

_FRUGAL = Order()


class Planned:
    """A kind of step that was profiled. ``roots``: the engine's programs by their number in the profile."""

    def __init__(self, kind: Kind, profile: StepProfile, roots: dict[int, Program]) -> None:
        self.kind = kind
        self.profile = profile
        self.roots = roots
        self.plan: Plan | None = None
        self.followed_by: Kind | None = None
        self.is_followed_for_sure = False  # it was followed by the same kind twice in a row
        self.n_steps = 0  # under a plan
        self.measured_peak_bytes: int | None = None
        self.times_s: deque[float] = deque(maxlen=N_TIMES)
        self._menus: tuple[tuple[Option, ...], ...] | None = None
        self._orders: tuple[tuple[str, Order], ...] = ()
        self._correction_bytes = 0  # measured beyond predicted
        self._stale = True
        self.is_given = False

    def adopt(self, plan: Plan) -> None:
        """Take a plan made before. Raises PlanMismatchError if the regions ran other operators then."""
        found = tuple(self.profile.program_of(c).digest for c in range(len(self.profile.calls)))
        planned = tuple(d.program for d in plan.decisions)
        if found != planned:
            raise PlanMismatchError(
                f"{plan.fingerprint}/{'+'.join(dict.fromkeys(planned))}",
                f"{self.profile.fingerprint}/{'+'.join(dict.fromkeys(found))}",
                "version of the model's code: its regions run other operators",
            )
        self._put_in_force(plan)
        self.is_given = True

    def prepare(self, budget_bytes: int, resting_bytes: int, optimizer_bytes: int) -> None:
        """Have a plan for ``budget_bytes``, given what rests now. Raises InfeasibleBudgetError."""
        if self.is_given:
            return
        plan = self.plan
        if plan is not None and not self._stale:
            grown_bytes = resting_bytes - plan.resting_bytes
            if plan.predicted.peak_bytes + max(0, grown_bytes) + self._correction_bytes <= budget_bytes:
                return
        self.profile = now(self.profile, resting_bytes, optimizer_bytes)
        if self._menus is None:
            self._menus = menus_of(self.profile)
        allowed_bytes = budget_bytes - self._correction_bytes
        try:
            plan = self._allocated(allowed_bytes - max(0, allowed_bytes - resting_bytes) // MARGIN)
        except InfeasibleBudgetError as error:
            if error.least_bytes > allowed_bytes and not self._correction_bytes:
                raise InfeasibleBudgetError(budget_bytes, error.least_bytes, error.where) from None
            # Infeasible only by the margin, or by what was measured: training goes on, in the least it can do with.
            plan = self._allocated(max(error.least_bytes, allowed_bytes))
        self._put_in_force(plan)
        assert self.plan is not None
        self.plan = replace(self.plan, budget_bytes=budget_bytes)

    def _allocated(self, allowed_bytes: int) -> Plan:
        assert self._menus is not None
        return allocate(self.profile, self._menus, allowed_bytes, time_limit_s=PLANNING_LIMIT_S)

    def note_follower(self, kind: Kind) -> None:
        """A step of ``kind`` came after one of this kind."""
        self.is_followed_for_sure = self.followed_by == kind
        self.followed_by = kind

    def _put_in_force(self, plan: Plan) -> None:
        self.plan = plan
        self._stale = False
        self.n_steps = 0
        self.times_s.clear()
        self.measured_peak_bytes = None
        self._orders = tuple(
            (d.region, Order(plain=True) if d.plain else self._order(c, frozenset(d.keep)))
            for c, d in enumerate(plan.decisions)
        )

    def _order(self, call: int, keep: frozenset[int]) -> Order:
        root = self.roots[self.profile.calls[call].program]
        return Order(program=root.variant(keep), thrifty=True)

    def order(self, number: int, region: str) -> Order:
        """How region call ``number`` of the step runs; the frugal way if it is not the planned region."""
        if number < len(self._orders) and self._orders[number][0] == region:
            return self._orders[number][1]
        return _FRUGAL

    def is_to_be_measured(self, device: torch.device) -> bool:
        """Accelerators count at no cost. On CPU the meter takes time: the first two steps of a plan, then the steps
        that prove again (the regions' calls 4, 8, 16, ...), which take most.
        """
        number = self.n_steps + 2
        return device.type != "cpu" or number == 3 or number & (number - 1) == 0

    def note(self, step: Step, measured_bytes: int | None, budget_bytes: int) -> int:
        """A step under the plan is over. Returns by how much it was above the budget; then the plan is stale."""
        self.n_steps += 1
        if measured_bytes is None:
            if step.end_s is not None:
                self.times_s.append(step.end_s - step.begin_s)
            return 0
        self.measured_peak_bytes = max(measured_bytes, self.measured_peak_bytes or 0)
        over_bytes = measured_bytes - budget_bytes
        if over_bytes > 0 and self.plan is not None and not self.is_given:
            self._correction_bytes += max(over_bytes, measured_bytes - self.plan.predicted.peak_bytes)
            self._stale = True
        return over_bytes

    @property
    def step_s(self) -> float | None:
        """Median of the steps' forward and backward under the plan, those that were metered left out."""
        return median(self.times_s) if self.times_s else None


def now(profile: StepProfile, resting_bytes: int, optimizer_bytes: int) -> StepProfile:
    """The profile with what rests now, and with the optimizer's step at its end."""
    moments = [m for m in profile.moments if m.label != OPTIMIZER]
    ends = moments[-1]
    level_bytes = ends.level_bytes if ends.kind == GAP else 0
    moments.append(Moment(GAP, -1, level_bytes, level_bytes + optimizer_bytes, 0.0, OPTIMIZER))
    return replace(profile, resting_bytes=resting_bytes, moments=tuple(moments))
