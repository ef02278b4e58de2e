"""A whole small run: it learns, leaves its records, repeats itself exactly and stops when told."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from elbowroom.errors import ElbowroomError, InfeasibleBudgetError, UsageError
from elbowroom.planning.plan import Plan
from elbowroom.training import loop
from elbowroom.training.config import TrainConfig
from elbowroom.training.loop import train

Configured = Callable[..., TrainConfig]


def metrics(summary: dict[str, Any], tag: str) -> list[tuple[int, float]]:
    lines = [json.loads(line) for line in (Path(summary["run_dir"]) / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line[tag]) for line in lines if tag in line]


def test_it_learns_and_leaves_its_records(configured: Configured, tmp_path: Path) -> None:
    summary = train(configured(max_steps=40, eval_every=20, log_every=10, dropout=0.0))
    assert summary["validation_loss_start"] == pytest.approx(5.5, abs=0.3)
    assert summary["validation_loss_end"] < 3.2
    assert (summary["steps"], summary["interrupted"], summary["tokens_seen"]) == (40, False, 40 * 2 * 32)
    folder = tmp_path / "runs" / "run"
    assert summary["run_dir"] == str(folder)
    assert json.loads((folder / "summary.json").read_text()) == summary
    config = json.loads((folder / "config.json").read_text())
    assert config["config"]["run"]["max_steps"] == 40
    assert config["versions"]["torch"] == torch.__version__
    assert [step for step, _ in metrics(summary, "eval/loss")] == [0, 20, 40]
    assert [step for step, _ in metrics(summary, "train/loss")] == [10, 20, 30, 40]
    assert metrics(summary, "train/loss")[-1][1] == summary["training_loss_end"]
    assert metrics(summary, "eval/loss")[-1][1] == summary["validation_loss_end"]
    assert all(speed > 0 for _, speed in metrics(summary, "throughput/tokens_per_sec"))
    assert len(summary["sample"]) >= 8


@pytest.mark.usefixtures("unmeasured")
def test_the_same_seed_gives_the_same_losses_exactly(configured: Configured) -> None:
    runs = [train(configured(run_name=name, seed=seed)) for name, seed in (("a", 5), ("b", 5), ("c", 6))]
    losses = [metrics(run, "train/loss") + metrics(run, "eval/loss") for run in runs]
    assert losses[0] == losses[1]
    assert losses[0] != losses[2]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_checkpointing_changes_no_loss_and_lowers_the_peak(configured: Configured, precision: str) -> None:
    changes = {"precision": precision, "micro_batch_size": 4, "sequence_length": 64}
    full = train(configured(run_name="full", activation_checkpointing="full", **changes))
    plain = train(configured(run_name="none", activation_checkpointing="none", **changes))
    assert metrics(full, "train/loss") == metrics(plain, "train/loss")
    assert metrics(full, "train/grad_norm") == metrics(plain, "train/grad_norm")
    assert full["validation_loss_end"] == plain["validation_loss_end"]
    cost = full["step_cost"]
    assert cost["checkpointed"]["peak_bytes"] < 0.7 * cost["plain"]["peak_bytes"]
    assert plain["step_cost"]["plain"]["peak_bytes"] == cost["plain"]["peak_bytes"]
    assert "checkpointed" not in plain["step_cost"]


def test_a_budget_is_kept_to_and_changes_no_loss(configured: Configured, capsys: pytest.CaptureFixture[str]) -> None:
    changes = {"micro_batch_size": 4, "sequence_length": 64, "max_steps": 8}
    free = train(configured(run_name="max", budget="max", **changes))
    need_bytes = free["plan"]["plain_peak_bytes"]
    assert free["plan"]["peak_bytes"] == need_bytes
    resting_bytes = free["plan"]["resting_bytes"]
    budget_bytes = resting_bytes + (need_bytes - resting_bytes) * 6 // 10
    capsys.readouterr()

    run = train(configured(run_name="planned", budget=str(budget_bytes), **changes))
    plain = train(configured(run_name="none", activation_checkpointing="none", **changes))
    assert metrics(run, "train/loss") == metrics(plain, "train/loss") == metrics(free, "train/loss")
    assert metrics(run, "train/grad_norm") == metrics(plain, "train/grad_norm")
    assert (run["activation_checkpointing"], run["keep"], run["budget"]) == ("planned", None, str(budget_bytes))
    numbers = run["plan"]
    assert numbers["budget_bytes"] == budget_bytes
    assert numbers["peak_bytes"] <= budget_bytes
    assert numbers["measured_peak_bytes"] <= budget_bytes
    assert numbers["measured_peak_bytes"] == pytest.approx(numbers["peak_bytes"], rel=0.03)
    assert run["step_cost"]["checkpointed"]["peak_bytes"] < run["step_cost"]["plain"]["peak_bytes"]
    kept = Plan.from_json((Path(run["run_dir"]) / "plan.json").read_text())
    assert (kept.budget_bytes, kept.predicted.peak_bytes) == (budget_bytes, numbers["peak_bytes"])
    said = capsys.readouterr().err
    assert said.count("without help one step would take ") == 1
    assert said.index("step 1/8") < said.index("without help") < said.index(str(kept)) < said.index("step 3/8")
    assert "warning" not in said
    assert "a new plan" not in said


@pytest.mark.usefixtures("unmeasured")
def test_a_budget_too_small_ends_the_run_in_the_second_step(configured: Configured) -> None:
    with pytest.raises(InfeasibleBudgetError) as caught:
        train(configured(budget="1MiB"))
    assert caught.value.budget_bytes == 2**20 < caught.value.least_bytes


@pytest.mark.usefixtures("unmeasured")
def test_one_step_alone_makes_no_plan(configured: Configured) -> None:
    run = train(configured(budget="max", max_steps=1))
    assert (run["plan"], run["budget"]) == (None, "max")
    assert not (Path(run["run_dir"]) / "plan.json").exists()


@pytest.mark.usefixtures("unmeasured")
def test_how_often_one_evaluates_changes_nothing(configured: Configured) -> None:
    losses = []
    for number, changes in enumerate([{"eval_every": 1}, {"eval_every": 0}, {"eval_every": 2, "eval_batches": 5}]):
        losses.append(metrics(train(configured(run_name=str(number), **changes)), "train/loss"))
    assert losses[0] == losses[1] == losses[2]


@pytest.mark.usefixtures("unmeasured")
def test_ctrl_c_ends_after_the_step_at_hand(configured: Configured, monkeypatch: pytest.MonkeyPatch) -> None:
    real_step, former = loop.training_step, signal.getsignal(signal.SIGINT)
    n_steps = 0

    def step_then_interrupt(*arguments: Any) -> Any:
        nonlocal n_steps
        n_steps += 1
        result = real_step(*arguments)
        if n_steps == 3:
            signal.raise_signal(signal.SIGINT)
        return result

    monkeypatch.setattr(loop, "training_step", step_then_interrupt)
    summary = train(configured(max_steps=50))
    assert (summary["steps"], summary["interrupted"], summary["max_steps"]) == (3, True, 50)
    assert (summary["step_cost"], summary["sample"]) == (None, None)
    assert metrics(summary, "eval/loss")[-1] == (3, summary["validation_loss_end"])
    assert (Path(summary["run_dir"]) / "summary.json").exists()
    assert signal.getsignal(signal.SIGINT) is former


def test_a_loss_that_is_no_number_stops_the_run(configured: Configured) -> None:
    with pytest.raises(ElbowroomError, match=r"^the training loss is nan after \d+ steps: .*lower --learning-rate"):
        train(configured(learning_rate=1e30, gradient_clip=1e30, max_steps=30))


@pytest.mark.usefixtures("unmeasured")
def test_a_folder_that_holds_a_run_is_left_alone(configured: Configured, tmp_path: Path) -> None:
    train(configured(max_steps=1))
    before = (tmp_path / "runs" / "run" / "metrics.jsonl").read_bytes()
    with pytest.raises(UsageError, match=r"runs/run holds a run already; choose another --run-name or --out-dir$"):
        train(configured(max_steps=1))
    assert (tmp_path / "runs" / "run" / "metrics.jsonl").read_bytes() == before


def test_nothing_is_written_for_what_cannot_be_done(configured: Configured, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--sequence-length 30000 needs at least 60002 tokens"):
        train(configured(sequence_length=30000))
    assert not (tmp_path / "runs").exists()
