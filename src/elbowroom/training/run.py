"""What a training run is made of, and the few things done with it: step, evaluate, write."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from elbowroom.core.checkpoint import wrap
from elbowroom.errors import UsageError
from elbowroom.fitting.fit import fit
from elbowroom.fitting.regions import find_regions
from elbowroom.fitting.report import report
from elbowroom.models.gpt import GPT, PRESETS
from elbowroom.training.config import TrainConfig, checked_run
from elbowroom.training.data import Batch, TokenData, open_tokens, text_of, user_cache_dir


@dataclass(frozen=True)
class Run:
    """``plain`` is the same model without checkpointing: other modules around the very same parameters."""

    config: TrainConfig
    device: torch.device
    model: GPT
    plain: GPT
    optimizer: torch.optim.Optimizer
    data: TokenData


def set_up(config: TrainConfig) -> Run:
    """Builds model, optimizer and data, seeded. Raises UsageError for what cannot be done as asked."""
    checked_run(config)
    device = usable_device(config.run.device)
    preset = PRESETS[config.model.preset]
    model_config = replace(
        preset,
        sequence_length=config.model.sequence_length or preset.sequence_length,
        dropout=preset.dropout if config.model.dropout is None else config.model.dropout,
        positions=config.model.positions or preset.positions,
    )
    tokens, name = open_tokens(
        config.data.path,
        vocabulary=model_config.vocabulary,
        cache_dirs=(user_cache_dir(), config.run.out_dir),
    )
    data = TokenData(
        tokens,
        seed=config.run.seed,
        sequence_length=model_config.sequence_length,
        batch_size=config.data.micro_batch_size,
        name=name,
    )
    torch.manual_seed(config.run.seed)
    model = GPT(model_config).to(device)
    plain = _sharing_copy(model)
    if config.memory.mode == "planned":
        fit(model, budget=config.memory.budget)
    elif config.memory.mode == "full":
        for region in find_regions(model).values():
            wrap(region, keep=config.memory.policy)
    return Run(config, device, model, plain, _adamw(model, config), data)


def training_step(run: Run, model: GPT, batch: Batch, rate: float) -> tuple[Tensor, Tensor]:
    """One optimizer step with ``model``: the loss (nats) and the gradient norm before clipping, both on
    the device.

    Gradients are None before and after, so that they weigh nothing between steps.
    """
    tokens, targets = (part.to(run.device, non_blocking=True) for part in batch)
    for group in run.optimizer.param_groups:
        group["lr"] = rate
    with _autocast(run):
        loss: Tensor = model(tokens, targets)[1]  # the logits by no name: they go before backward begins
    loss.backward()
    gradient_norm = nn.utils.clip_grad_norm_(model.parameters(), run.config.optimizer.gradient_clip)
    run.optimizer.step()
    run.optimizer.zero_grad()
    return loss.detach(), gradient_norm


def learning_rate(step: int, config: TrainConfig) -> float:
    """Linear from zero during warm-up, then half a cosine down to a tenth. ``step`` counts from 0."""
    highest, n_warmup = config.optimizer.learning_rate, config.optimizer.warmup_steps
    if step < n_warmup:
        return highest * (step + 1) / n_warmup
    way = (step - n_warmup) / max(1, config.run.max_steps - n_warmup)
    return highest * (0.1 + 0.9 * (1 + math.cos(math.pi * way)) / 2)


@torch.no_grad()
def evaluate(run: Run) -> float:
    """Mean loss, nats per token, over the same validation batches every time. Changes nothing of the
    training."""
    losses = []
    with _eval_mode(run.model), _autocast(run):
        for tokens, targets in run.data.validation_batches(run.config.run.eval_batches):
            losses.append(run.model(tokens.to(run.device), targets.to(run.device))[1] * targets.numel())
    return torch.stack(losses).sum().item() / run.data.n_validation_targets(run.config.run.eval_batches)


def sample_text(run: Run) -> str | None:
    """What the model writes from the start of a validation sequence on; None if its tokens are not bytes."""
    if not run.config.run.sample_tokens:
        return None
    prompt = next(run.data.validation_batches(1))[0][:1, :32]  # (1, T)
    generator = torch.Generator(run.device).manual_seed(run.config.run.seed)
    with _autocast(run):
        written = run.model.generate(
            prompt.to(run.device), run.config.run.sample_tokens, temperature=0.8, generator=generator
        )
    return text_of(written[0].tolist())


def planned_numbers(run: Run) -> dict[str, Any] | None:
    """What the plan in force promises and what was measured of it, bytes of whole steps; None without a plan."""
    if run.config.memory.mode != "planned":
        return None
    found = report(run.model)
    if found.plan is None:
        return None
    promised = found.plan.predicted
    return {
        "budget_bytes": found.budget_bytes,
        "resting_bytes": found.plan.resting_bytes,
        "peak_bytes": promised.peak_bytes,
        "measured_peak_bytes": found.measured_peak_bytes,
        "plain_peak_bytes": promised.plain_peak_bytes,
        "step_s": promised.step_s,
        "plain_step_s": promised.plain_step_s,
        "extra_time_pct": 100 * (promised.step_s / promised.plain_step_s - 1),
        "gap": promised.gap,
        "where": promised.where,
        "resident_bytes": found.resident_bytes,
    }


def usable_device(name: str) -> torch.device:
    """The device of that name. Raises UsageError if there is none here."""
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(f"--device {name}: cannot be used here: {reason}") from error
    return device


def _sharing_copy(model: GPT) -> GPT:
    """The same modules around the same parameters and buffers: costs no memory, learns what the model
    learns."""
    shared: dict[int, object] = {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())}
    return copy.deepcopy(model, shared)


def _adamw(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """AdamW that decays matrices only: a decayed norm or bias is pulled from where it belongs, not
    regularised."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": config.optimizer.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.optimizer.learning_rate, betas=(0.9, 0.95))


def _autocast(run: Run) -> torch.autocast:
    return torch.autocast(run.device.type, torch.bfloat16, enabled=run.config.run.precision == "bf16")


@contextmanager
def _eval_mode(model: nn.Module) -> Iterator[None]:
    """Eval mode, and afterwards each module's own training flag again."""
    was_training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in was_training:
            module.training = True
