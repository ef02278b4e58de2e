"""The course of a step as a picture: both lines, the budget, the peak."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from elbowroom.reporting import timeline
from elbowroom.reporting.timeline import draw_timeline

MIB = 2**20
PLAIN = [(0.0, 10 * MIB, "begin"), (0.5, 60 * MIB, "forward"), (1.0, 100 * MIB, "head"), (2.0, 10 * MIB, "end")]
PLANNED = [(0.0, 10 * MIB, "begin"), (0.5, 20 * MIB, "forward"), (1.0, 40 * MIB, "head"), (2.4, 10 * MIB, "end")]


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    axes_seen: list[Any] = []

    @contextmanager
    def picture(*arguments: Any, **options: Any) -> Iterator[Any]:
        with real(*arguments, **options) as axes:
            axes_seen.extend([axes, options["subtitle"]])
            yield axes

    real = timeline.picture
    monkeypatch.setattr(timeline, "picture", picture)
    return axes_seen


def test_both_courses_the_budget_and_the_peak(tmp_path: Path, drawn: list[Any]) -> None:
    draw_timeline(PLANNED, PLAIN, tmp_path / "a.png", title="t", budget_bytes=44 * MIB, where="backward of blocks.3")
    axes, subtitle = drawn
    plain, planned, budget = (line.get_xydata().tolist() for line in axes.lines[:3])
    assert plain == [[0, 10], [500, 60], [1000, 100], [2000, 10]]
    assert planned == [[0, 10], [500, 20], [1000, 40], [2400, 10]]
    assert {y for _, y in budget} == {44}
    assert axes.collections[-1].get_offsets().tolist() == [[1000, 40]]
    assert {text.get_text() for text in axes.texts} == {"budget 44.0 MiB", "peak 40.0 MiB"}
    assert subtitle.endswith("the plan's peak: backward of blocks.3")
    assert axes.get_xlim()[1] == 2400
    assert axes.get_ylim()[1] > 100
    assert (tmp_path / "a.png").stat().st_size > 10_000


def test_long_steps_are_in_seconds(tmp_path: Path, drawn: list[Any]) -> None:
    slow = [(40 * seconds, n_bytes, label) for seconds, n_bytes, label in PLAIN]
    draw_timeline(slow, slow, tmp_path / "a.png", title="t", budget_bytes=100 * MIB, where="head")
    assert drawn[0].get_xlim()[1] == 80
    assert drawn[0].get_xlabel().endswith(", s")
