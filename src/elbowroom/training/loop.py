"""The training loop: one page, in the order in which things happen."""

from __future__ import annotations

import time
from typing import Any

from elbowroom.reporting.progress import RunProgress
from elbowroom.training.config import TrainConfig
from elbowroom.training.cost import cost_of_a_step
from elbowroom.training.interrupts import Interrupts
from elbowroom.training.records import RunDirectory
from elbowroom.training.run import Run, evaluate, learning_rate, planned_numbers, sample_text, set_up, training_step
from elbowroom.training.telemetry import Telemetry, warnings_said_by


def train(config: TrainConfig) -> dict[str, Any]:
    """Trains as told; returns the run's summary, which is also in its ``summary.json``.

    Raises UsageError for what cannot be done as asked, InfeasibleBudgetError in the second step if no plan keeps to
    the budget, ElbowroomError when the loss is no longer a number. Ctrl-C ends the run after the step at hand; the
    summary then says ``interrupted``.
    """
    start_s = time.perf_counter()

    # 1. Everything that can be wrong with what was asked is found here, before anything is written.
    run = set_up(config)

    with (
        RunDirectory(config) as records,
        RunProgress(config.run.max_steps) as progress,
        Interrupts(progress.say) as interrupts,
        warnings_said_by(progress.say),
    ):
        telemetry = Telemetry(run, records, progress)

        # 2. Where do we start?
        telemetry.evaluated(0, evaluate(run))

        # 3. Train, looking up from time to time.
        done = 0
        while done < config.run.max_steps and not interrupts.requested:
            rate = learning_rate(done, config)
            loss, gradient_norm = training_step(run, run.model, run.data.batch(done), rate)
            done += 1
            telemetry.step_done(done, loss, gradient_norm, rate)
            if config.run.eval_every and done % config.run.eval_every == 0 and done < config.run.max_steps:
                telemetry.evaluated(done, evaluate(run))

        # 4. Where did we get to? (Whoever pressed Ctrl-C waits for no measurement.)
        if done:
            telemetry.evaluated(done, evaluate(run))
        finished = done == config.run.max_steps and not interrupts.requested
        if finished:
            progress.say("measuring one step with and without checkpointing")
        planning = planned_numbers(run)  # before the measurement, whose steps are no part of the training
        cost = cost_of_a_step(run) if finished else None
        sample = sample_text(run) if finished else None

        summary = _summary(run, telemetry, done) | {
            "run_dir": str(records.path),
            "interrupted": interrupts.requested,
            "plan": planning,
            "step_cost": cost,
            "sample": sample,
            "duration_s": time.perf_counter() - start_s,
        }
        records.summarise(summary)
    return summary


def _summary(run: Run, telemetry: Telemetry, done: int) -> dict[str, Any]:
    return {
        "model": run.config.model.preset,
        "n_parameters": sum(parameter.numel() for parameter in run.model.parameters()),
        "activation_checkpointing": run.config.memory.mode,
        "keep": run.config.memory.policy,
        "budget": run.config.memory.budget,
        "max_steps": run.config.run.max_steps,
        "steps": done,
        "tokens_seen": done * run.data.tokens_per_batch,
        "training_loss_end": telemetry.training_loss,
        "validation_loss_start": telemetry.first_validation_loss,
        "validation_loss_end": telemetry.validation_loss,
    }
