"""One step as a picture: its bytes over time, under a plan and without help."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from textwrap import shorten

from elbowroom.reporting.canvas import ACCENT, ALERT, BEYOND, FAINT_INK, Labels, byte_unit, legend, picture, stairs
from elbowroom.units import format_bytes

# (seconds from the step's begin, bytes alive from then on, what was going on)
Course = Sequence[tuple[float, int, str]]


def draw_timeline(
    planned: Course, plain: Course, path: Path, *, title: str, budget_bytes: int, where: str
) -> None:
    """Writes a PNG to ``path``: all bytes alive over one step under the plan, those of the plain step, and the budget.

    ``planned`` and ``plain`` are ``Simulation.timeline``s, ``where`` says in words where the plan's peak is. Raises
    OSError if the file cannot be written.
    """
    unit_bytes, unit = byte_unit(max(n_bytes for _, n_bytes, _ in plain))
    scale, second_unit = (1e3, "ms") if plain[-1][0] < 10 else (1.0, "s")

    def course(points: Course) -> list[tuple[float, float]]:
        return [(s * scale, n_bytes / unit_bytes) for s, n_bytes, _ in points]

    plain_course, planned_course = course(plain), course(planned)
    highest = max(planned, key=lambda point: point[1])
    subtitle = shorten(f"all bytes of one step, as predicted; the plan's peak: {where}", 105, placeholder=" …")
    with picture(path, title=title, subtitle=subtitle, size_inches=(8.4, 4.6)) as axes:
        seconds, sizes = zip(*plain_course, strict=True)
        axes.plot(seconds, sizes, drawstyle="steps-post", color=BEYOND, linewidth=1.4, label="plain autograd")
        seconds, sizes = zip(*planned_course, strict=True)
        axes.fill_between(seconds, sizes, step="post", color=ACCENT, alpha=0.18, linewidth=0)
        axes.plot(seconds, sizes, drawstyle="steps-post", color=ACCENT, linewidth=1.8, label="under the plan")
        axes.axhline(budget_bytes / unit_bytes, color=ALERT, linewidth=1.5, linestyle=(0, (5, 3)))
        axes.set_ylim(0, max(*(y for _, y in plain_course), budget_bytes / unit_bytes) * 1.2)
        axes.set_xlim(0, max(plain[-1][0], planned[-1][0]) * scale)
        axes.set_xlabel(f"time since the step began, {second_unit}", color=FAINT_INK, labelpad=8)
        axes.set_ylabel(f"bytes alive, {unit}", color=FAINT_INK, labelpad=8)
        legend(axes, loc="upper right", ncols=2)

        begin, end = axes.get_xlim()
        budget = [(begin, budget_bytes / unit_bytes), (end, budget_bytes / unit_bytes)]
        labels = Labels(axes, stairs(plain_course), stairs(planned_course), budget)
        x, y = highest[0] * scale, highest[1] / unit_bytes
        axes.scatter(x, y, s=46, color=ACCENT, zorder=5)
        labels.avoid(x, y)
        labels.place(end * 0.9, budget_bytes / unit_bytes, f"budget {format_bytes(budget_bytes)}", color=ALERT,
                     fontsize=9.5, fontweight="bold")  # fmt: skip
        labels.place(x, y, f"peak {format_bytes(highest[1])}", color=ACCENT, fontsize=9.5, fontweight="bold")

