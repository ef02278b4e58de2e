"""Labels go where they meet nothing; drawing leaves no trace in the process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from elbowroom.reporting.canvas import Labels, byte_unit, picture

PNG = b"\x89PNG\r\n\x1a\n"


def test_a_picture_is_a_png_of_the_asked_size(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    with picture(path, title="title", subtitle="subtitle", size_inches=(4, 3)) as axes:
        axes.plot([0, 1], [1, 0])
    content = path.read_bytes()
    assert content[:8] == PNG
    assert (int.from_bytes(content[16:20], "big"), int.from_bytes(content[20:24], "big")) == (4 * 160, 3 * 160)


@pytest.mark.parametrize("seed", range(8))
def test_labels_meet_neither_each_other_nor_points_nor_the_frame(tmp_path: Path, seed: int) -> None:
    rng = Random(seed)
    points = [(rng.uniform(0.1, 0.9), rng.uniform(0.1, 0.9)) for _ in range(7)]
    with picture(tmp_path / "a.png", title="", subtitle="", size_inches=(8, 5)) as axes:
        axes.set_xlim(0, 1)
        axes.set_ylim(0, 1)
        labels = Labels(axes)
        for point in points:
            labels.avoid(*point, radius_px=8)
        for number, point in enumerate(points):
            labels.place(*point, f"every {number}th block", fontsize=9)
        renderer = axes.figure.canvas.get_renderer()  # type: ignore[attr-defined]
        boxes = [text.get_window_extent(renderer) for text in axes.texts]
        frame = axes.get_window_extent(renderer)
        pixels = axes.transData.transform(points)
    assert len(boxes) == len(points)
    for number, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[:number])
        assert not any(box.contains(x, y) for x, y in pixels)
        assert frame.x0 <= box.x0 < box.x1 <= frame.x1
        assert frame.y0 <= box.y0 < box.y1 <= frame.y1


def test_a_label_keeps_off_the_curve_and_a_far_one_has_a_line_to_its_point(tmp_path: Path) -> None:
    levels = (0.36, 0.405, 0.45, 0.495, 0.54)  # too close for a text between two of them
    curve = [(x, y) for y in levels for x in (0.0, 1.0, 0.0)]
    with picture(tmp_path / "a.png", title="", subtitle="", size_inches=(8, 5)) as axes:
        axes.set_xlim(0, 1)
        axes.set_ylim(0, 1)
        labels = Labels(axes, curve)
        labels.place(0.5, 0.45, "in the middle", fontsize=12)
        box = axes.texts[0].get_window_extent(axes.figure.canvas.get_renderer())  # type: ignore[attr-defined]
        heights = [axes.transData.transform((0.5, y))[1] for y in levels]
        n_lines = len(axes.lines)
    assert not any(box.y0 <= y <= box.y1 for y in heights)
    assert n_lines == 1


@pytest.mark.parametrize(
    ("n_bytes", "unit"), [(0, (2**20, "MiB")), (2**31 - 1, (2**20, "MiB")), (2**31, (2**30, "GiB"))]
)
def test_byte_axes_are_in_mib_below_two_gib(n_bytes: int, unit: tuple[int, str]) -> None:
    assert byte_unit(n_bytes) == unit


def test_matplotlib_loads_when_something_is_drawn_and_pyplot_never(tmp_path: Path) -> None:
    program = (
        "import sys, pathlib\n"
        "import elbowroom.reporting.canvas as canvas, elbowroom.reporting.pareto, elbowroom.reporting.timeline\n"
        "assert 'matplotlib' not in sys.modules\n"
        "with canvas.picture(pathlib.Path(sys.argv[1]), title='', subtitle='', size_inches=(2, 2)): pass\n"
        "assert 'matplotlib' in sys.modules\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "a.png")], check=True)
