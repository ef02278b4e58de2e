"""A plan: for every region call of a step, what is kept; and what that is predicted to take. Frozen data, JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

from elbowroom.units import format_bytes, format_seconds

FORMAT = 1


@dataclass(frozen=True)
class Decision:
    """What one region call keeps.

    ``plain``: the region runs without recording, as without checkpointing. Else ``keep`` has the numbers of the values
    that its program keeps; everything else that backward asks for is replayed. ``kept_bytes``: held from the end of its
    forward to the beginning of its backward. ``working_bytes``: the highest bytes of its backward beyond what was there
    when it began. ``extra_s``: what this costs beyond a plain call. ``replayed``: operators run in backward.
    """

    region: str
    program: str  # digest
    plain: bool
    keep: tuple[int, ...]
    kept_bytes: int
    working_bytes: int
    extra_s: float
    replayed: int


@dataclass(frozen=True)
class Prediction:
    """What the simulator says of a plan, and of the step without checkpointing. Peaks are whole: resting included."""

    peak_bytes: int
    where: str
    step_s: float
    plain_peak_bytes: int
    plain_step_s: float
    bound_s: float  # no plan from these options under this budget is faster: the linear relaxation over the whole step

    @property
    def gap(self) -> float:
        """How far the step time may be above the best possible one: 0.004 is 0.4 percent."""
        return self.step_s / self.bound_s - 1 if self.bound_s else 0.0


@dataclass(frozen=True)
class Plan:
    """Decisions for one kind of step, in the order of its region calls."""

    fingerprint: str
    device: str
    budget_bytes: int
    resting_bytes: int
    decisions: tuple[Decision, ...]
    predicted: Prediction

    @property
    def extra_s(self) -> float:
        """What the plan costs beyond a step without checkpointing."""
        return self.predicted.step_s - self.predicted.plain_step_s

    def groups(self) -> Iterator[tuple[str, tuple[Decision, ...]]]:
        """Neighbouring calls that decided alike, and a name for them: ``blocks.0 ... blocks.5``."""
        for _, group in groupby(self.decisions, key=lambda d: (d.program, d.plain, d.keep)):
            calls = tuple(group)
            first, last = calls[0].region, calls[-1].region
            yield (first if first == last else f"{first} ... {last}"), calls

    def __str__(self) -> str:
        """One screen: what each group of regions keeps and replays, and what that is predicted to take."""
        rows = [("regions", "calls", "keep", "work in", "replay", "extra time")]
        for name, calls in self.groups():
            replays = "nothing" if calls[0].plain or not calls[0].replayed else f"{calls[0].replayed} operators"
            rows.append(
                (
                    name,
                    str(len(calls)),
                    ("all, " if calls[0].plain else "") + format_bytes(calls[0].kept_bytes),
                    format_bytes(calls[0].working_bytes),
                    replays,
                    format_seconds(sum(d.extra_s for d in calls)),
                )
            )
        widths = [max(len(row[i]) for row in rows) for i in range(6)]
        lines = [
            "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
            for row in rows
        ]
        told = self.predicted
        more = self.extra_s / told.plain_step_s if told.plain_step_s else 0.0
        return "\n".join(
            [
                *lines,
                f"peak {format_bytes(told.peak_bytes)} of {format_bytes(self.budget_bytes)} allowed, {told.where}; "
                f"{format_bytes(self.resting_bytes)} of it rest",
                f"step {format_seconds(told.step_s)}, {more:+.1%} on {format_seconds(told.plain_step_s)} without "
                f"checkpointing, which would take {format_bytes(told.plain_peak_bytes)}",
                f"no plan of these options is more than {max(0.0, told.gap):.1%} faster",
            ]
        )

    def to_json(self) -> str:
        """The plan as JSON text; ``from_json`` reads it back equal."""
        return json.dumps({"format": FORMAT} | asdict(self), indent=1)

    @staticmethod
    def from_json(text: str) -> Plan:
        """The inverse of ``to_json``. Raises ValueError for text that is no plan of this format."""
        tree: dict[str, Any] = json.loads(text)
        if not isinstance(tree, dict) or tree.pop("format", None) != FORMAT:
            raise ValueError(f"not a plan of format {FORMAT}")
        decisions = tuple(Decision(**d | {"keep": tuple(d["keep"])}) for d in tree["decisions"])
        return Plan(**tree | {"decisions": decisions, "predicted": Prediction(**tree["predicted"])})
