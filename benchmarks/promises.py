"""What is promised of a budget, and whether what was measured keeps it. Numbers in, verdicts out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

VANILLA, AGAIN = "vanilla", "vanilla, again"
BLOCK = "torch every block"
LEAST, SEVENTY, WHOLE = "least feasible", "70% of vanilla", "peak of vanilla"


@dataclass
class Row:
    """What one contender took. Bytes are above the start of a step, unless said; seconds are per step, by round."""

    name: str
    kind: str  # "vanilla", "peer" or "plan"
    peak_bytes: int = 0  # of a usual step
    highest_bytes: int = 0  # of all metered steps, one that proves among them
    resting_bytes: int = 0  # there at the start of the step that was highest
    keeps_buffers: bool = True  # the buffers are vanilla's after each step
    allowed_bytes: int | None = None  # plans: what the budget leaves for the step
    budget_bytes: int | None = None  # plans: of the whole process, what rests included
    least_bytes: int | None = None  # plans that are infeasible: the least budget, of the whole process
    predicted: dict[str, Any] | None = None
    replanned: bool = False  # later another plan was in force than the first
    complaints: list[str] = field(default_factory=list)  # fit's own warnings
    warmup_s: list[float] = field(default_factory=list)
    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)

    def ratio(self, vanilla: Row, clock: str) -> float:
        """Median time over vanilla's. ``clock``: cpu or wall."""
        own_s, unit_s = ((row.cpu_s if clock == "cpu" else row.wall_s) for row in (self, vanilla))
        return median(own_s) / median(unit_s)


@dataclass(frozen=True)
class Check:
    """One of the promises, whether it was kept, and the numbers that decide."""

    promise: str
    kept: bool
    numbers: str


def budget_of(peer: Row) -> str:
    """The name of the budget of a peer's own peak."""
    return f"peak of {peer.name}"


def predicted_bytes(plan: Row) -> int:
    assert plan.predicted is not None
    return int(plan.predicted["peak_bytes"] - plan.predicted["resting_bytes"])


def predicted_ratio(plan: Row) -> float:
    assert plan.predicted is not None
    return float(plan.predicted["step_s"] / plan.predicted["plain_step_s"])


def checks(rows: Sequence[Row], clock: str) -> list[Check]:
    """What was promised of the plans, each with the number that is nearest to breaking it."""
    vanilla = rows[0]
    by_name = {row.name: row for row in rows}
    plans = [row for row in rows if row.predicted is not None]
    times = {row.name: row.ratio(vanilla, clock) for row in rows if row.cpu_s}
    if not plans:
        return [_all_feasible(rows, by_name[LEAST])]
    block = by_name[BLOCK]
    both = [p for p in plans if p.highest_bytes < block.peak_bytes and times[p.name] < times[block.name]]
    best = min(plans, key=lambda p: (p.highest_bytes >= block.peak_bytes, times[p.name]))
    return [
        _all_feasible(rows, by_name[LEAST]),
        _peak_under_budget(plans),
        _least(
            "predicted peak is within 3% of the measured one",
            0.03,
            {p.name: abs(predicted_bytes(p) / p.peak_bytes - 1) for p in plans},
        ),
        _least(
            f"predicted step-time ratio is within 0.05 of the measured one ({clock})",
            0.05,
            {p.name: abs(predicted_ratio(p) - times[p.name]) for p in plans},
        ),
        *(_no_slower(peer, rows, times) for peer in rows if peer.kind == "peer"),
        _least(f"extra time at 70% of vanilla's peak is at most 3% ({clock})", 0.03, _extra(times, SEVENTY)),
        Check(
            "one plan has both peak and time below torch's checkpoint of every block",
            bool(both),
            f"{best.name}: peak {best.highest_bytes / vanilla.peak_bytes:.3f} against "
            f"{block.peak_bytes / vanilla.peak_bytes:.3f}, time {times[best.name]:.3f} against {times[block.name]:.3f}",
        ),
        _least("gap to the bound is at most 2%", 0.02, {p.name: p.predicted["gap"] for p in plans if p.predicted}),
        _least(f"with a budget of vanilla's peak, extra time is at most 1% ({clock})", 0.01, _extra(times, WHOLE)),
        _least(
            "the first step takes at most 2.5 vanilla steps (wall)",
            2.5,
            {p.name: p.warmup_s[0] / median(vanilla.wall_s) for p in plans},
        ),
    ]


def _all_feasible(rows: Sequence[Row], least: Row) -> Check:
    refused = [r for r in rows if r.least_bytes is not None and (r.allowed_bytes or 0) >= (least.allowed_bytes or 0)]
    numbers = [f"{r.name}: budget {r.budget_bytes:,} bytes, later least {r.least_bytes:,}" for r in refused]
    return Check("every budget from the least feasible on has a plan", not refused, "; ".join(numbers) or "all")


def _peak_under_budget(plans: Sequence[Row]) -> Check:
    """By our meter, and by the one of ``fit``, which complains."""
    promise = f"measured peak is never above the budget ({len(plans)} plans)"
    over = {p.name: p.resting_bytes + p.highest_bytes - (p.budget_bytes or 0) for p in plans}
    worst = max(over, key=lambda name: over[name])
    numbers = f"{worst}: {abs(over[worst]):,} bytes {'above' if over[worst] > 0 else 'below'}"
    complaints = [f"{p.name}: {complaint}" for p in plans for complaint in p.complaints]
    if complaints:
        numbers += f"; {len(complaints)} warnings of fit, such as {complaints[0]}"
    return Check(promise, over[worst] <= 0 and not complaints, numbers)


def _least(promise: str, limit: float, found: dict[str, float]) -> Check:
    if not found:
        return Check(promise, False, "no such plan")
    worst = max(found, key=lambda name: found[name])
    return Check(promise, found[worst] <= limit, f"worst {found[worst]:.4f}, {worst}")


def _extra(times: dict[str, float], name: str) -> dict[str, float]:
    return {name: times[name] - 1} if name in times else {}


def _no_slower(peer: Row, rows: Sequence[Row], times: dict[str, float]) -> Check:
    """At the peer's own peak, and at every budget above it."""
    promise = f"no plan with as much memory as '{peer.name}' is slower"
    for row in rows:
        if row.name == budget_of(peer) and row.least_bytes is not None:
            least_bytes = row.least_bytes + peer.peak_bytes - (row.budget_bytes or 0)
            return Check(promise, False, f"no plan: the least is {least_bytes:,} bytes, the peer {peer.peak_bytes:,}")
    margins = {
        row.name: times[row.name] - times[peer.name]
        for row in rows
        if row.predicted is not None and (row.allowed_bytes or 0) >= peer.peak_bytes
    }
    if not margins:
        return Check(promise, False, "no such plan")
    worst = max(margins, key=lambda name: margins[name])
    numbers = f"{worst}: {times[worst]:.3f} against {times[peer.name]:.3f}"
    return Check(promise, margins[worst] <= 0, numbers)
