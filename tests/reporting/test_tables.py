"""Tables: every number they are given is on them."""

from __future__ import annotations

import io
import re
from typing import Any

from rich.console import Console, RenderableType

from elbowroom.reporting.tables import check_table, plan_table, train_table

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


PLANNED = SUMMARY | {
    "budget": "60MiB",
    "plan": {
        "budget_bytes": 60 << 20,
        "resting_bytes": 20 << 20,
        "peak_bytes": 58 << 20,
        "measured_peak_bytes": 57 << 20,
        "plain_peak_bytes": 120 << 20,
        "extra_time_pct": 23.45,
    },
}


def test_a_run_under_a_budget_has_predicted_beside_measured() -> None:
    found = rows(train_table(PLANNED))
    assert {name: text for name, text in found.items() if " step" in name or "extra" in name} == {
        "budget of one step": "60.0 MiB",
        "there before a step begins": "20.0 MiB",
        "peak of one step without a plan, predicted": "120.0 MiB",
        "peak of one step, predicted": "58.0 MiB (48%)",
        "peak of one step, measured": "57.0 MiB (48%)",
        "extra time, predicted": "+23.4 %",
        "extra time, measured": "+25.0 %",
        "time of one step, without a plan and with": "200.0 ms, 250.0 ms",
    }


def test_an_interrupted_run_under_a_budget_says_what_was_not_measured() -> None:
    unmeasured = PLANNED | {"step_cost": None, "plan": PLANNED["plan"] | {"measured_peak_bytes": None}}
    found = rows(train_table(unmeasured))
    assert found["peak of one step, measured"] == "not yet"
    assert "extra time, measured" not in found
    found = rows(train_table(unmeasured | {"plan": None}))
    assert (found["budget"], found["plan"]) == ("60MiB", "none: plans begin with the second step")


def point(name: str, mib: int, step_s: float, budget_mib: int | None = None) -> dict[str, Any]:
    numbers = {"peak_bytes": mib << 20, "step_s": step_s, "kept_bytes": mib << 19, "replayed": 1234, "n_plain": 3}
    return {"name": name, "budget_bytes": None if budget_mib is None else budget_mib << 20} | numbers


TRADE_OFF: dict[str, Any] = {
    "title": "models.py:f[bold], cpu, fp32",
    "front": {
        "plain_peak_bytes": 400 << 20,
        "plain_step_s": 2.0,
        "resting_bytes": 30 << 20,
        "n_calls": 12,
        "least_bytes": 100 << 20,
        "least_where": "backward of blocks.3",
        "plans": [point("plan", 98, 2.6, 100), point("plan", 250, 2.2, 250), point("plan", 400, 2.0, 400)],
        "baselines": [point("keep all", 400, 2.0), point("replay all", 104, 2.8)],
        "rivals": [point("plan", 400, 2.0, 400), point("plan", 104, 2.52, 104)],
    },
    "chosen": point("plan", 180, 2.25, 190),
    "gap": 0.004,
    "where": "head and loss",
    "plan_file": "plan.json",
    "picture": "plan.png",
    "timeline": None,
}


def test_the_trade_off_has_every_plan_and_rule_of_thumb_and_marks_the_chosen() -> None:
    text = printed_at_80(plan_table(TRADE_OFF))
    rows = [re.split(r"  +", line.strip()) for line in text.splitlines() if "1,234" in line]
    assert rows == [
        ["100.0 MiB", "98.0 MiB", "24%", "1.300", "49.0 MiB", "1,234"],
        ["→", "190.0 MiB", "180.0 MiB", "45%", "1.125", "90.0 MiB", "1,234"],
        ["250.0 MiB", "250.0 MiB", "62%", "1.100", "125.0 MiB", "1,234"],
        ["400.0 MiB", "400.0 MiB 100%", "1.000", "200.0 MiB", "1,234"],
        ["replay all", "104.0 MiB", "26%", "1.400", "1,234", "1.260", "10.0%"],
        ["keep all", "400.0 MiB 100%", "1.000", "1,234", "1.000", "0.0%"],
    ]
    for words in (
        "models.py:f[bold], cpu, fp32",
        "without help: 400.0 MiB, of which 30.0 MiB are there before the step begins",
        "the least: 100.0 MiB, backward of blocks.3",
        "peak of the plan (→): head and loss",
        "at most 0.4% faster",
        "written: plan.json, plan.png",
    ):
        assert words in text


def test_a_budget_that_is_a_point_of_the_curve_is_one_row() -> None:
    text = printed_at_80(plan_table(TRADE_OFF | {"chosen": point("plan", 250, 2.2, 250)}))
    assert len(re.findall("250.0 MiB +250.0 MiB", text)) == 1


def test_of_many_plans_a_dozen_is_shown_with_first_and_last() -> None:
    plans = [point("plan", mib, 2.0, mib) for mib in range(100, 123)]
    text = printed_at_80(plan_table(TRADE_OFF | {"front": TRADE_OFF["front"] | {"plans": plans}}))
    assert re.findall(r"^ +(1\d\d)\.0 MiB", text, re.MULTILINE) == [str(mib) for mib in range(100, 123, 2)]


def test_the_trade_off_of_a_big_model_fits_a_terminal() -> None:
    big = point("keep every 3rd", 123_456, 2.0) | {"replayed": 123_456}
    front = TRADE_OFF["front"] | {"baselines": [big], "rivals": [big], "plain_peak_bytes": 130_000 << 20}
    plan = point("plan", 123_456, 2.0, 123_456) | {"replayed": 123_456}
    text = printed_at_80(plan_table(TRADE_OFF | {"front": front | {"plans": [plan]}, "chosen": plan}))
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80


def printed_at_80(table: RenderableType) -> str:
    console = Console(file=io.StringIO(), width=80)
    console.print(table)
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


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
