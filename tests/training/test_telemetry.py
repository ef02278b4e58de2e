"""What is logged, when, and what counts as training time."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable

import pytest
import torch
from rich.console import Console

from elbowroom.errors import ElbowroomError
from elbowroom.reporting.progress import RunProgress
from elbowroom.training import telemetry as module
from elbowroom.training.config import TrainConfig
from elbowroom.training.records import RunDirectory
from elbowroom.training.run import set_up
from elbowroom.training.telemetry import Telemetry


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def perf_counter(self) -> float:
        return self.now_s


class Loss:
    """A loss that tells when it is read: reading one waits for the device."""

    n_reads = 0

    def item(self) -> float:
        self.n_reads += 1
        return 2.0


def test_steps_are_logged_at_their_pace_and_evaluation_is_not_training(
    configured: Callable[..., TrainConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    run = set_up(configured(log_every=2, max_steps=5))
    loss, norm = Loss(), torch.tensor(1.5)
    with RunDirectory(run.config) as records, RunProgress(5, Console(file=io.StringIO())) as progress:
        telemetry = Telemetry(run, records, progress)
        clock.now_s += 50
        telemetry.evaluated(0, 5.5)
        for done in range(1, 6):
            clock.now_s += 2
            telemetry.step_done(done, loss, norm, 0.1)  # type: ignore[arg-type]
            if done == 3:
                clock.now_s += 30
                telemetry.evaluated(3, 4.5)
        lines = [json.loads(line) for line in (records.path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 2, 3, 4, 5]
    # 64 tokens a step, 2 s a step, whatever the evaluation at step 3 took.
    speeds = [line["throughput/tokens_per_sec"] for line in lines if "train/loss" in line]
    assert speeds == [32.0, 32.0, 32.0]
    assert loss.n_reads == 3
    assert lines[1] == {
        "step": 2,
        "train/loss": 2.0,
        "train/grad_norm": 1.5,
        "train/learning_rate": 0.1,
        "train/tokens_seen": 128,
        "throughput/tokens_per_sec": 32.0,
    }
    assert (telemetry.first_validation_loss, telemetry.validation_loss, telemetry.training_loss) == (
        5.5,
        4.5,
        2.0,
    )


def test_a_validation_loss_that_is_no_number_stops(configured: Callable[..., TrainConfig]) -> None:
    run = set_up(configured())
    with RunDirectory(run.config) as records, RunProgress(5, Console(file=io.StringIO())) as progress:
        with pytest.raises(ElbowroomError, match=r"^the validation loss is inf after 7 steps: "):
            Telemetry(run, records, progress).evaluated(7, math.inf)
        assert (records.path / "metrics.jsonl").read_text() == ""
