"""What was decided, predicted and measured: the report of a fitted model."""

from __future__ import annotations

from dataclasses import dataclass

from torch.nn import Module

from elbowroom.core.program import Program
from elbowroom.fitting.fit import fitted
from elbowroom.fitting.memory import resident_bytes
from elbowroom.fitting.planned import Planned
from elbowroom.planning.plan import Plan
from elbowroom.units import format_bytes, format_seconds


@dataclass(frozen=True)
class RegionRow:
    """One group of neighbouring region calls that decided alike.

    ``kept_bytes`` and ``extra_s`` are of one call. ``opaque_bytes``: held since it cannot be replayed. ``largest``: the
    value that backward needs and that takes most bytes: its operator and source line, and whether it is kept.
    """

    regions: str
    n_calls: int
    plain: bool
    kept_bytes: int
    n_operators: int
    n_replayed: int
    extra_s: float
    n_proved: int
    opaque_bytes: int
    largest: str


@dataclass(frozen=True)
class Report:
    """Predicted beside measured. Measured numbers are None until a step under the plan was measured."""

    plan: Plan | None
    regions: str  # what was chosen, in words
    rows: tuple[RegionRow, ...]
    budget_bytes: int
    predicted_peak_bytes: int | None
    measured_peak_bytes: int | None
    predicted_step_s: float | None
    measured_step_s: float | None
    plain_step_s: float | None
    plain_peak_bytes: int | None
    resident_bytes: int
    n_kinds: int

    def __str__(self) -> str:
        if self.plan is None:
            return (
                f"{self.regions}\nbudget {format_bytes(self.budget_bytes)}; no plan yet: it is made after the first "
                f"training step (resident set {format_bytes(self.resident_bytes)})"
            )
        head = ("regions", "calls", "kept", "replayed", "extra", "proved", "opaque", "largest value backward needs")
        cells = [head]
        for r in self.rows:
            cells.append(
                (
                    r.regions,
                    str(r.n_calls),
                    ("all, " if r.plain else "") + format_bytes(r.kept_bytes),
                    f"{r.n_replayed} of {r.n_operators}",
                    format_seconds(r.extra_s),
                    f"{r.n_proved} of {r.n_operators}",
                    format_bytes(r.opaque_bytes) if r.opaque_bytes else "none",
                    r.largest,
                )
            )
        widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
        lines = [self.regions]
        lines += ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in cells]
        measured = "not measured yet" if self.measured_peak_bytes is None else format_bytes(self.measured_peak_bytes)
        seconds = "not measured yet" if self.measured_step_s is None else format_seconds(self.measured_step_s)
        told = self.plan.predicted
        lines += [
            f"budget {format_bytes(self.budget_bytes)}; without checkpointing {format_bytes(told.plain_peak_bytes)}",
            f"peak   predicted {format_bytes(told.peak_bytes)}, measured {measured}; {told.where}",
            f"step   predicted {format_seconds(told.step_s)}, measured {seconds}; "
            f"without checkpointing {format_seconds(told.plain_step_s)}",
            f"resident set of the process {format_bytes(self.resident_bytes)}; "
            f"{self.n_kinds} {'kind' if self.n_kinds == 1 else 'kinds'} of steps planned",
        ]
        return "\n".join(lines)


def report(model: Module) -> Report:
    """What ``fit`` decided for ``model``, what it predicted, and what was measured. ``str()`` is a table.

    Raises UsageError if the model is not fitted.
    """
    fitting = fitted(model)
    fitting.catch_up()
    planned = fitting.last
    plan = planned.plan if planned is not None else None
    told = plan.predicted if plan is not None else None
    return Report(
        plan=plan,
        regions=fitting.described,
        rows=() if planned is None or plan is None else tuple(_rows(model, planned, plan)),
        budget_bytes=fitting.budget_bytes,
        predicted_peak_bytes=told.peak_bytes if told else None,
        measured_peak_bytes=planned.measured_peak_bytes if planned else None,
        predicted_step_s=told.step_s if told else None,
        measured_step_s=planned.step_s if planned else None,
        plain_step_s=told.plain_step_s if told else None,
        plain_peak_bytes=told.plain_peak_bytes if told else None,
        resident_bytes=resident_bytes(),
        n_kinds=sum(1 for p in fitting.kinds.values() if p.plan is not None),
    )


def _rows(model: Module, planned: Planned, plan: Plan) -> list[RegionRow]:
    rows = []
    number = 0
    for name, calls in plan.groups():
        program = planned.roots[planned.profile.calls[number].program]
        number += len(calls)
        first = calls[0]
        rows.append(
            RegionRow(
                regions=name,
                n_calls=len(calls),
                plain=first.plain,
                kept_bytes=first.kept_bytes,
                n_operators=len(program.ops),
                n_replayed=first.replayed,
                extra_s=first.extra_s,
                n_proved=sum(op.proved for op in program.ops),
                opaque_bytes=sum(row.nbytes for row in program.kept_rows),
                largest=_largest(program, frozenset(first.keep), first.plain),
            )
        )
    return rows


def _largest(program: Program, keep: frozenset[int], plain: bool) -> str:
    saved = {s.bound for s in program.slots if not s.dead and program.values[s.bound].maker >= 0}
    if not saved:
        return "none"
    v = max(saved, key=lambda v: program.values[v].nbytes)
    op = program.ops[program.values[v].maker]
    done = "kept" if plain or v in keep else "replayed"
    path, _, place = op.line.rpartition("/")
    return f"{format_bytes(program.values[v].nbytes)} of {op.func} ({done}), {path.rpartition('/')[2]}/{place}"
