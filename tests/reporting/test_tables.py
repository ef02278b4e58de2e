"""Tables: every number they are given is on them."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console, RenderableType

from elbowroom.reporting.tables import check_table, train_table

SUMMARY: dict[str, Any] = {
    "model": "tiny",
    "n_parameters": 826112,
    "steps": 40,
    "max_steps": 50,
    "interrupted": False,
    "duration_s": 75.2,
    "tokens_seen": 81920,
    "validation_loss_start": 5.5,
    "validation_loss_end": 2.25,
    "run_dir": "runs/[red]:llama:",
    "sample": "def [bold]f(x):",
    "step_cost": {
        "plain": {"peak_bytes": 100 << 20, "step_s": 0.2},
        "checkpointed": {"peak_bytes": 25 << 20, "step_s": 0.25},
        "extra_time_pct": 25.0,
    },
}
RESULT: dict[str, Any] = {
    "model": "models.py:f",
    "equal": True,
    "first_difference": None,
    "steps": 3,
    "n_gradients": 51,
    "n_buffers": 9,
    "n_regions": 4,
    "step_cost": SUMMARY["step_cost"],
    "proof": {
        "operators": 96,
        "proved": 95,
        "kept": [
            {
                "operator": "aten.mm.default",
                "line": "models.py:7",
                "nbytes": 2048,
                "why": "differs when replayed",
            }
        ],
    },
}


def rows(table: RenderableType) -> dict[str, str]:
    """What is printed, as first column to second."""
    console = Console(file=io.StringIO(), width=120)
    console.print(table)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    cells = [line.strip("│").split("│") for line in text.splitlines() if line.startswith("│")]
    return {cell[0].strip(): cell[-1].strip() for cell in cells}


def test_a_run_with_checkpointing() -> None:
    found = rows(train_table(SUMMARY))
    assert found.pop("def [bold]f(x):") == "def [bold]f(x):"
    assert found == {
        "steps": "40 of 50",
        "time": "1 min 15 s",
        "tokens seen": "81,920",
        "validation loss at start": "5.500 nats",
        "validation loss at end": "2.250 nats",
        "peak of one step, without checkpointing": "100.0 MiB",
        "peak of one step, with": "25.0 MiB (25%)",
        "time of one step, without": "200.0 ms",
        "time of one step, with": "250.0 ms (+25.0 %)",
        "written to": "runs/[red]:llama:",
    }


def test_an_interrupted_run_says_what_was_not_measured() -> None:
    found = rows(train_table(SUMMARY | {"interrupted": True, "step_cost": None, "sample": None}))
    assert found["steps"] == "40 of 50 (interrupted)"
    assert found["peak of one step"] == "not measured"
    assert "peak of one step, with" not in found


def test_a_plain_run_has_one_contender() -> None:
    cost = {"plain": SUMMARY["step_cost"]["plain"]}
    found = rows(train_table(SUMMARY | {"step_cost": cost}))
    assert found["peak of one step, without checkpointing"] == "100.0 MiB"
    assert "peak of one step, with" not in found


def test_an_equal_check_shows_what_was_compared_and_proved() -> None:
    found = rows(check_table(RESULT))
    assert found["equal, bit for bit"] == "yes"
    assert "first difference" not in found
    assert (found["gradients compared"], found["buffers compared"], found["regions"]) == ("51", "9", "4")
    assert (found["proof: operators recorded"], found["proof: operators proved bit for bit"]) == ("96", "95")
    assert found["kept: aten.mm.default at models.py:7"] == "2.0 KiB, differs when replayed"
    assert found["peak of one step, with"] == "25.0 MiB (25%)"


def test_names_are_printed_as_they_are() -> None:
    console = Console(file=io.StringIO(), width=120)
    console.print(check_table(RESULT | {"model": "models.py:llama:[bold]"}))
    assert "models.py:llama:[bold]: checkpointed against plain" in console.file.getvalue()  # type: ignore[attr-defined]


def test_an_unequal_check_shows_the_difference() -> None:
    found = rows(check_table(RESULT | {"equal": False, "first_difference": "step 1: loss differs", "step_cost": None}))
    assert found["equal, bit for bit"] == "NO"
    assert found["first difference"] == "step 1: loss differs"
    assert found["peak of one step"] == "not measured"
