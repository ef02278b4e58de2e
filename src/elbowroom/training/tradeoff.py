"""What a budget buys: one training step of a model is measured, plans are made for budgets of every size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from elbowroom.errors import ElbowroomError, UsageError
from elbowroom.fitting.devices import parse_budget
from elbowroom.fitting.fit import fit, profile, unfit
from elbowroom.models.gpt import GPT
from elbowroom.planning.allocate import allocate
from elbowroom.planning.baselines import baselines
from elbowroom.planning.front import front, point
from elbowroom.planning.options import menus_of
from elbowroom.planning.plan import Plan
from elbowroom.planning.profile import StepProfile
from elbowroom.planning.simulate import simulate
from elbowroom.reporting.pareto import draw_pareto
from elbowroom.reporting.timeline import draw_timeline
from elbowroom.training.candidates import Candidate, built, candidate_builder, in_one_line
from elbowroom.training.config import PlanConfig, checked_planning
from elbowroom.training.run import usable_device


def trade_off(config: PlanConfig, say: Callable[[str], None]) -> dict[str, Any]:
    """Measures one step, plans for ``config.points`` budgets and for the one asked for, writes plan and pictures.

    ``say`` hears what is under way. Returns ``front`` (see ``planning.front.Front``), ``chosen`` (the point of the plan
    that was written) and where it was written. Raises UsageError for what cannot be done as asked, and
    InfeasibleBudgetError for a budget that no plan keeps to.
    """
    checked_planning(config)
    _check_writable("--plan-file", config.plan_file)
    _check_writable("--picture", config.picture)
    _check_writable("--timeline", config.timeline)
    device = usable_device(config.device)
    budget_bytes = None if config.budget is None else parse_budget(config.budget, device)
    build = candidate_builder(config.model, batch_size=config.micro_batch_size, sequence_length=config.sequence_length)
    candidate = built(build, config.seed, device)
    _check_trainable(candidate, config.model)

    say("running one step, recorded and measured")
    step = profiled_step(candidate, config, device)
    say(f"planning for {config.points} budgets")
    menus = menus_of(step)
    curve = front(step, config.points, menus=menus)
    if budget_bytes is None:
        budget_bytes = (curve.least_bytes + max(curve.least_bytes, curve.plain_peak_bytes)) // 2
    plan = allocate(step, menus, budget_bytes)
    chosen = point(step, plan.decisions, budget_bytes=budget_bytes)

    title = _title(config, candidate)
    _written("--plan-file", config.plan_file, lambda path: path.write_text(plan.to_json() + "\n"))
    _written("--picture", config.picture, lambda path: draw_pareto(curve, path, title=title, chosen=chosen))
    _written("--timeline", config.timeline, lambda path: _draw_course(step, plan, path, title))
    return {
        "model": config.model,
        "title": title,
        "device": str(device),
        "precision": config.precision,
        "optimizer": config.optimizer,
        "front": curve.to_dict(),
        "chosen": asdict(chosen),
        "gap": plan.predicted.gap,
        "where": plan.predicted.where,
        "plan_file": str(config.plan_file),
        "picture": str(config.picture),
        "timeline": None if config.timeline is None else str(config.timeline),
    }


def profiled_step(candidate: Candidate, config: PlanConfig, device: torch.device) -> StepProfile:
    """The profile of one training step of ``candidate``: forward, loss, backward, update."""
    optimizer = _optimizer(candidate, config)
    fit(candidate.model, budget="max")  # the first step keeps as little as possible, whatever the budget
    try:
        torch.autograd.backward(candidate.loss(device, config.precision))
        if optimizer is not None:
            optimizer.step()
        candidate.model.zero_grad()
        step = profile(candidate.model)
    except ElbowroomError:
        raise
    except Exception as error:
        raise UsageError(f"--model {config.model}: its step fails: {in_one_line(error)}") from error
    finally:
        unfit(candidate.model)
    if step is None:
        raise UsageError(
            f"--model {config.model}: there is nothing to plan: in its step no region saved a tensor for backward"
        )
    return step


def _optimizer(candidate: Candidate, config: PlanConfig) -> torch.optim.Optimizer | None:
    """AdamW with its state already there, as from the second step of a training on: it is part of what rests."""
    if config.optimizer == "none":
        return None
    parameters = [parameter for parameter in candidate.model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=0.0)
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # moves nothing: the learning rate is 0
    optimizer.zero_grad()
    return optimizer


def _check_trainable(candidate: Candidate, asked: str) -> None:
    if not any(parameter.requires_grad for parameter in candidate.model.parameters()):
        raise UsageError(f"--model {asked}: no parameter of the model takes gradients: there is no step to plan")


def _title(config: PlanConfig, candidate: Candidate) -> str:
    where = f"{config.device}, {config.precision}"
    if isinstance(candidate.model, GPT):
        tokens: Tensor = candidate.inputs[0]
        return f"{config.model}: {tokens.shape[0]} sequences of {tokens.shape[1]} tokens, {where}"
    path, _, function = config.model.rpartition(":")
    return f"{Path(path).name}:{function}, {where}"


def _draw_course(step: StepProfile, plan: Plan, path: Path, title: str) -> None:
    planned, plain = simulate(step, plan.decisions), simulate(step, baselines(step)["keep all"])
    draw_timeline(
        planned.timeline, plain.timeline, path, title=title, budget_bytes=plan.budget_bytes, where=planned.where
    )


def _check_writable(flag: str, path: Path | None) -> None:
    """Before minutes are spent on what then cannot be written."""
    if path is None:
        return
    if path.is_dir():
        raise UsageError(f"{flag} {path}: is a folder; give the name of a file")
    if not path.parent.is_dir():
        raise UsageError(f"{flag} {path}: there is no folder {path.parent}; make it first")


def _written(flag: str, path: Path | None, write: Callable[[Path], object]) -> None:
    if path is None:
        return
    try:
        write(path)
    except OSError as error:
        raise UsageError(f"{flag} {path}: cannot be written: {error.strerror}") from error
