"""The trade-off's picture shows every plan, every baseline by name, and the chosen plan."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from elbowroom.planning.front import Front, Point
from elbowroom.reporting import pareto
from elbowroom.reporting.pareto import draw_pareto

MIB = 2**20


def point(name: str, mib: float, step_s: float, budget_bytes: int | None = None) -> Point:
    return Point(name, budget_bytes, int(mib * MIB), step_s, 0, 0, 0)


PLANS = tuple(point("plan", mib, step_s) for mib, step_s in [(200, 2.6), (312, 2.2), (400, 2.05), (500, 2.0)])
BASELINES = (
    point("keep all", 500, 2.0),
    point("replay all", 210, 2.8),
    point("every second block", 355, 2.4),
    point("sqrt(n)", 355.1, 2.4),
)
RIVALS = (PLANS[-1], point("plan", 205, 2.5), point("plan", 350, 2.1), point("plan", 350, 2.1))
FRONT = Front("print", "cpu", 50 * MIB, 4, 500 * MIB, 2.0, 200 * MIB, "backward of blocks.3", PLANS, BASELINES, RIVALS)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The axes that were drawn on."""
    axes_seen: list[Any] = []

    @contextmanager
    def picture(*arguments: Any, **options: Any) -> Iterator[Any]:
        with real(*arguments, **options) as axes:
            axes_seen.append(axes)
            yield axes

    real = pareto.picture
    monkeypatch.setattr(pareto, "picture", picture)
    return axes_seen


def test_points_are_in_mib_and_in_steps_of_plain(tmp_path: Path, drawn: list[Any]) -> None:
    draw_pareto(FRONT, tmp_path / "a.png", title="a model", chosen=point("plan", 310, 2.2))
    (axes,) = drawn
    curve = axes.lines[0].get_xydata().tolist()
    assert curve == [[200, 1.3], [205, 1.25], [310, 1.1], [350, 1.05], [400, 1.025], [500, 1.0]]
    assert axes.lines[0].get_drawstyle() == "steps-post"
    baselines, ring, dot = (collection.get_offsets().tolist() for collection in axes.collections)
    assert baselines == [[500, 1.0], [210, 1.4], [355, 1.2]]
    assert ring == dot == [[310, 1.1]]
    assert axes.get_xlabel() == "peak of the step, MiB"
    assert (tmp_path / "a.png").stat().st_size > 10_000


def test_every_baseline_is_named_and_two_on_one_spot_share_a_label(tmp_path: Path, drawn: list[Any]) -> None:
    draw_pareto(FRONT, tmp_path / "a.png", title="a model", chosen=PLANS[1])
    assert {text.get_text() for text in drawn[0].texts} == {
        "the plan: 312.0 MiB, time 1.100",
        "keep all",
        "replay all",
        "every second block, sqrt(n)",
    }


def test_without_a_chosen_plan_nothing_is_marked(tmp_path: Path, drawn: list[Any]) -> None:
    draw_pareto(FRONT, tmp_path / "a.png", title="a model")
    assert len(drawn[0].collections) == 1
    assert not any(text.get_text().startswith("the plan") for text in drawn[0].texts)


def test_one_point_alone_can_be_drawn(tmp_path: Path) -> None:
    alone = Front("print", "cpu", 0, 1, 5 * MIB, 2.0, 5 * MIB, "", PLANS[-1:], BASELINES[:1], PLANS[-1:])
    draw_pareto(alone, tmp_path / "a.png", title="nothing to gain", chosen=PLANS[-1])
    assert (tmp_path / "a.png").exists()


def test_a_place_that_cannot_be_written_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        draw_pareto(FRONT, tmp_path / "missing" / "a.png", title="a model")
