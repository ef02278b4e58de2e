"""The trade-off as a picture: peak bytes of a step against its time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from elbowroom.planning.front import Front, Point
from elbowroom.reporting.canvas import (
    ACCENT,
    ALERT,
    BEYOND,
    FAINT_INK,
    PANEL,
    Labels,
    byte_unit,
    legend,
    picture,
    stairs,
)

# Points nearer than this share of the picture are one point with two names.
_SAME = 0.006


def draw_pareto(front: Front, path: Path, *, title: str, chosen: Point | None = None) -> None:
    """Writes a PNG to ``path``: the planner's curve, the baselines as named points, ``chosen`` marked.

    x: peak of the whole step, resting bytes included. y: step time, the plain step's is 1. Raises OSError if the file
    cannot be written.
    """
    unit_bytes, unit = byte_unit(front.plain_peak_bytes)

    def at(point: Point) -> tuple[float, float]:
        return point.peak_bytes / unit_bytes, point.step_s / front.plain_step_s

    # Between two plans the one with fewer bytes is what a budget gets: a staircase.
    plans = {*front.plans, *front.rivals} | ({chosen} if chosen else set())
    curve = _best([at(point) for point in plans])
    named = _merged([(*at(point), point.name) for point in front.baselines])
    subtitle = "peak of a whole step against its time, as predicted; further down and left is better"
    with picture(path, title=title, subtitle=subtitle, size_inches=(8.4, 5.0)) as axes:
        axes.plot(*zip(*curve, strict=True), color=ACCENT, linewidth=2.2, drawstyle="steps-post", zorder=3,
                  marker="o", markersize=3.5, label="plans of elbowroom")  # fmt: skip
        axes.scatter([x for x, _, _ in named], [y for _, y, _ in named], s=44, color=BEYOND, marker="s",
                     edgecolor=PANEL, linewidth=1, zorder=4, label="rules of thumb")  # fmt: skip
        if chosen is not None:
            axes.scatter(*at(chosen), s=170, facecolor="none", edgecolor=ALERT, linewidth=2.2, zorder=5)
            axes.scatter(*at(chosen), s=40, color=ALERT, linewidth=0, zorder=5)
        axes.set_xlabel(f"peak of the step, {unit}", color=FAINT_INK, labelpad=8)
        axes.set_ylabel("step time (plain: 1)", color=FAINT_INK, labelpad=8)
        axes.margins(0.09, 0.14)
        axes.autoscale_view()
        legend(axes, loc="upper right")

        labels = Labels(axes, stairs(curve))
        for x, y, _ in named:
            labels.avoid(x, y)
        if chosen is not None:
            x, y = at(chosen)
            labels.avoid(x, y, radius_px=15)
            words = f"the plan: {x:,.1f} {unit}, time {y:.3f}"
            labels.place(x, y, words, color=ALERT, fontweight="bold", fontsize=10)
        for x, y, name in named:
            labels.place(x, y, name, color=FAINT_INK, fontsize=9)


def _best(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Those that no other point undercuts in one and equals in the other, in order of x."""
    best: list[tuple[float, float]] = []
    for x, y in sorted(set(points)):
        if not best or y < best[-1][1]:
            best.append((x, y))
    return best


def _merged(named: Sequence[tuple[float, float, str]]) -> list[tuple[float, float, str]]:
    """Points (x, y, name); those that would cover each other are one, with all their names."""
    xs, ys = [x for x, _, _ in named], [y for _, y, _ in named]
    width, height = max(xs) - min(xs), max(ys) - min(ys)
    merged: list[tuple[float, float, str]] = []
    for x, y, name in named:
        for number, (other_x, other_y, other_name) in enumerate(merged):
            if abs(x - other_x) <= _SAME * width and abs(y - other_y) <= _SAME * height:
                merged[number] = (other_x, other_y, f"{other_name}, {name}")
                break
        else:
            merged.append((x, y, name))
    return merged
