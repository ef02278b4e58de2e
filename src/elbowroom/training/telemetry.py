"""The numbers of a run while it runs: into ``metrics.jsonl`` and onto the screen."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from elbowroom.errors import ElbowroomError
from elbowroom.fitting.fit import plan as plan_in_force
from elbowroom.fitting.memory import resident_bytes
from elbowroom.planning.plan import Plan
from elbowroom.reporting.progress import RunProgress
from elbowroom.training.records import RunDirectory
from elbowroom.training.run import Run
from elbowroom.units import format_bytes


class Telemetry:
    """Hears of every step and every evaluation. Reads the loss (a wait for the device) only when it logs
    it."""

    training_loss: float | None = None
    first_validation_loss: float | None = None
    validation_loss: float | None = None

    def __init__(self, run: Run, records: RunDirectory, progress: RunProgress) -> None:
        self._run = run
        self._records = records
        self._progress = progress
        self._plan: Plan | None = None
        self._logged_step = 0
        # Seconds spent on steps since the last logged one, and up to when they are counted.
        self._trained_s = 0.0
        self._mark_s = time.perf_counter()

    def step_done(self, done: int, loss: torch.Tensor, gradient_norm: torch.Tensor, rate: float) -> None:
        """``done`` steps are done, the last of them with this loss (nats), gradient norm and learning
        rate."""
        settings = self._run.config.run
        now_s = time.perf_counter()
        self._trained_s += now_s - self._mark_s
        self._mark_s = now_s
        self._progress.step_done(done)
        self._look_at_plan(done)
        if done % settings.log_every and done != settings.max_steps:
            return
        self.training_loss = _finite("training loss", loss.item(), done)
        n_tokens = (done - self._logged_step) * self._run.data.tokens_per_batch
        tokens_per_s = n_tokens / self._trained_s
        memory_bytes = _memory_in_use_bytes(self._run.device)
        self._records.log(
            done,
            {
                "train/loss": self.training_loss,
                "train/grad_norm": gradient_norm.item(),
                "train/learning_rate": rate,
                "train/tokens_seen": done * self._run.data.tokens_per_batch,
                "throughput/tokens_per_sec": tokens_per_s,
            },
        )
        self._progress.show(done, loss=self.training_loss, tokens_per_s=tokens_per_s, memory_bytes=memory_bytes)
        self._logged_step, self._trained_s = done, 0.0

    def evaluated(self, done: int, loss: float) -> None:
        """After ``done`` steps the validation loss is ``loss`` nats. Its time does not count as training."""
        self.validation_loss = _finite("validation loss", loss, done)
        if self.first_validation_loss is None:
            self.first_validation_loss = loss
        self._records.log(done, {"eval/loss": loss})
        self._progress.say(f"validation loss {loss:.3f} nats after {done} steps")
        self._mark_s = time.perf_counter()

    def _look_at_plan(self, done: int) -> None:
        """Says what a step takes without help and what was planned, once; and each plan that takes its place."""
        plan = plan_in_force(self._run.model) if self._run.config.memory.mode == "planned" else None
        if plan is None or plan is self._plan:
            return
        if self._plan is None:
            need, budget = format_bytes(plan.predicted.plain_peak_bytes), format_bytes(plan.budget_bytes)
            self._progress.say(f"without help one step would take {need}; the plan for {budget}:")
        else:
            self._progress.say(f"a new plan, in force since step {done}:")
        self._progress.say(str(plan))
        self._records.keep_plan(plan)
        self._plan = plan


@contextmanager
def warnings_said_by(say: Callable[[str], None]) -> Iterator[None]:
    """A warning that comes inside is one line of text among the others, without file and line of code."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: say(f"warning: {message}")
        yield


def _finite(what: str, loss: float, done: int) -> float:
    if not math.isfinite(loss):
        raise ElbowroomError(
            f"the {what} is {loss} after {done} steps: the weights cannot be trained further; "
            f"lower --learning-rate or --gradient-clip, or raise --warmup-steps"
        )
    return loss


def _memory_in_use_bytes(device: torch.device) -> int:
    """The process's resident set on CPU, allocated bytes on an accelerator."""
    if device.type == "cpu":
        return resident_bytes()
    return int(torch.get_device_module(device).memory_allocated(device))
