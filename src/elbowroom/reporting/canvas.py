"""What our pictures share: paper and ink that read on light and dark pages, byte axes, labels that avoid each other.

matplotlib is loaded when a picture is drawn and not before; pyplot and its process-wide state are never touched.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# A card of its own colour: neither a white slab on a dark page nor a black one on paper.
PAPER, PANEL = "#eef1f4", "#f8fafb"
INK, FAINT_INK, GRID = "#25303b", "#5d6975", "#d5dbe1"
ACCENT, ALERT, BEYOND = "#0f766e", "#c2410c", "#64748b"

_GIB, _MIB = 2**30, 2**20
_DPI = 160

# In pixels: a place; a rectangle's left, bottom, right, top.
Spot = tuple[float, float]
Box = tuple[float, float, float, float]


@contextmanager
def picture(path: Path, *, title: str, subtitle: str, size_inches: tuple[float, float]) -> Iterator[Axes]:
    """A pair of axes to draw on; written to ``path`` as PNG afterwards. Raises OSError if that cannot be."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"font.family": ["DejaVu Sans"], "font.size": 10, "text.color": INK}):
        figure = Figure(figsize=size_inches, dpi=_DPI, facecolor=PAPER)
        FigureCanvasAgg(figure)
        width, height = size_inches
        margin = 0.3
        axes = figure.add_axes((0.86 / width, 0.62 / height, 1 - (0.86 + margin) / width, 1 - (0.62 + 0.95) / height))
        axes.set_facecolor(PANEL)
        axes.grid(color=GRID, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.tick_params(colors=FAINT_INK, length=0, pad=6)
        for side in ("top", "right", "left", "bottom"):
            axes.spines[side].set_visible(False)
        figure.text(0.3 / width, 1 - 0.36 / height, title, fontsize=13.5, fontweight="bold", va="center")
        figure.text(0.3 / width, 1 - 0.64 / height, subtitle, fontsize=9.5, color=FAINT_INK, va="center")
        yield axes
        figure.savefig(path, format="png", facecolor=PAPER)


def byte_unit(n_bytes: int) -> tuple[int, str]:
    """What an axis that reaches ``n_bytes`` counts in: bytes per unit, and its name."""
    return (_GIB, "GiB") if n_bytes >= 2 * _GIB else (_MIB, "MiB")


def legend(axes: Axes, **where: Any) -> None:
    """The legend, on the panel's own ground so that no grid runs through its words."""
    box = axes.legend(frameon=True, fancybox=False, edgecolor="none", facecolor=PANEL, framealpha=1, fontsize=9,
                      labelcolor=FAINT_INK, borderaxespad=0.7, **where)  # fmt: skip
    box.set_zorder(2)


def stairs(points: Sequence[Spot]) -> Iterator[Spot]:
    """A line that is level until its next point, corner by corner."""
    for (x, y), (next_x, _) in pairwise([*points, points[-1]]):
        yield x, y
        yield next_x, y


class Labels:
    """Texts beside points: each is put where it meets neither a point, a curve nor another text."""

    def __init__(self, axes: Axes, *lines: Iterable[Spot]) -> None:
        """``lines``: corners (data coordinates) of lines that no text should cross."""
        self._axes = axes
        axes.set_autoscale_on(False)  # what is placed by pixels must stay there
        self._taken: list[Box] = []
        for line in lines:
            corners = [self._pixel(x, y) for x, y in line]
            self._taken += [_around(at, 3) for a, b in pairwise(corners) for at in _along(a, b)]
        self._points: list[Spot] = []
        self._avoid_legend()

    def avoid(self, x: float, y: float, *, radius_px: float = 11) -> None:
        """No text may touch the point (x, y), data coordinates."""
        self._points.append(self._pixel(x, y))
        self._taken.append(_around(self._points[-1], radius_px))

    def place(self, x: float, y: float, text: str, **style: Any) -> None:
        """Puts ``text`` near the point (x, y), with a thin line to it if it ends up further away."""
        renderer = self._axes.figure.canvas.get_renderer()  # type: ignore[attr-defined]
        ground = {"facecolor": PANEL, "edgecolor": "none", "alpha": 0.8, "pad": 1}
        artist = self._axes.text(0, 0, text, bbox=ground, zorder=6, **style)
        extent = artist.get_window_extent(renderer)
        at = self._pixel(x, y)
        frame = self._axes.get_window_extent(renderer)
        boxes = [_offset_box(at, dx, dy, extent.width, extent.height) for dx, dy in _offsets()]
        best = min(boxes, key=lambda box: self._cost(box, (frame.x0, frame.y0, frame.x1, frame.y1), at))
        artist.set_position(self._data(best[0], best[1]))
        artist.set_verticalalignment("bottom")
        self._taken.append(best)
        near = _nearest(best, at)
        distance = _distance(at, near)
        other = min((_distance(point, _nearest(best, point)) for point in self._points if point != at), default=1e9)
        if distance > 20 and (distance > 40 or other < distance + 4):
            begin, end = (self._data(*_between(at, near, px / distance)) for px in (16, distance - 4))
            self._axes.plot(*zip(begin, end, strict=True), color=FAINT_INK, linewidth=0.8, zorder=1.5)

    def _pixel(self, x: float, y: float) -> Spot:
        return tuple(map(float, self._axes.transData.transform((x, y))))  # type: ignore[return-value]

    def _data(self, x: float, y: float) -> Spot:
        return tuple(map(float, self._axes.transData.inverted().transform((x, y))))  # type: ignore[return-value]

    def _avoid_legend(self) -> None:
        box = self._axes.get_legend()
        if box is not None:
            extent = box.get_window_extent(self._axes.figure.canvas.get_renderer())  # type: ignore[attr-defined]
            self._taken.append((extent.x0, extent.y0, extent.x1, extent.y1))

    def _cost(self, box: Box, frame: Box, at: Spot) -> float:
        outside = max(frame[0] - box[0], box[2] - frame[2], frame[1] - box[1], box[3] - frame[3], 0)
        overlaps = [area for area in (_common_area(box, other) for other in self._taken) if area]
        middle = ((box[0] + box[2]) / 2, (box[1] + box[3]) / 2)
        return 1000 * outside + 200 * len(overlaps) + 5 * sum(overlaps) + _distance(at, middle)


def _offsets() -> Iterator[tuple[float, float]]:
    """Directions (-1 to 1 in x and y) times distances in pixels, near ones first."""
    for distance in (14, 22, 34, 50, 70, 95, 130):
        for dx, dy in ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (1, -1), (-1, 1), (-1, -1)):
            yield dx * distance, dy * distance


def _offset_box(at: Spot, dx: float, dy: float, width: float, height: float) -> Box:
    left = at[0] + dx if dx > 0 else at[0] + dx - width if dx < 0 else at[0] - width / 2
    bottom = at[1] + dy if dy > 0 else at[1] + dy - height if dy < 0 else at[1] - height / 2
    return left, bottom, left + width, bottom + height


def _nearest(box: Box, at: Spot) -> Spot:
    """The place in the box that is nearest."""
    return min(max(at[0], box[0]), box[2]), min(max(at[1], box[1]), box[3])


def _around(at: Spot, radius: float) -> Box:
    return at[0] - radius, at[1] - radius, at[0] + radius, at[1] + radius


def _between(a: Spot, b: Spot, share: float) -> Spot:
    return a[0] + (b[0] - a[0]) * share, a[1] + (b[1] - a[1]) * share


def _along(a: Spot, b: Spot) -> Iterator[Spot]:
    """Points from a to b, some 6 pixels apart."""
    n = max(1, int(_distance(a, b) / 6))
    for k in range(n + 1):
        yield _between(a, b, k / n)


def _common_area(one: Box, other: Box) -> float:
    width = min(one[2], other[2]) - max(one[0], other[0])
    height = min(one[3], other[3]) - max(one[1], other[1])
    return width * height if width > 0 and height > 0 else 0.0


def _distance(a: Spot, b: Spot) -> float:
    return float(((a[0] - b[0]) ** 2 + (a[1] - b[1]) ** 2) ** 0.5)
