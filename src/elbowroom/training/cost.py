"""What checkpointing saved and cost, measured on a run's own model and data without disturbing the run."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from elbowroom.fitting.measure import StepCost, measure_steps
from elbowroom.models.gpt import GPT
from elbowroom.training.run import Run, training_step


def cost_of_a_step(run: Run, *, n_rounds: int = 5) -> dict[str, Any]:
    """What one whole training step (forward, backward, optimizer) takes, with checkpointing and without.

    Both on the same batch, ``n_rounds`` timed steps of each, interleaved. Returns ``plain`` and, if the run
    checkpoints (by hand or by a plan), ``checkpointed``: each ``peak_bytes`` (above the start of the step),
    ``step_s`` (median) and ``rounds_s``; then also ``extra_time_pct``. Weights, optimizer state and random streams
    are as before afterwards.
    """
    batch = run.data.batch(0)
    rate = run.config.optimizer.learning_rate / 10

    def step_of(model: GPT) -> Callable[[], None]:
        def step() -> None:
            torch.manual_seed(run.config.run.seed)
            training_step(run, model, batch, rate)

        return step

    contenders = {"plain": step_of(run.plain)}
    if run.config.memory.mode != "none":
        contenders["checkpointed"] = step_of(run.model)
    with _undone(run):
        costs = measure_steps(contenders, run.device, n_rounds=n_rounds)
    return cost_dict(costs)


def cost_dict(costs: Mapping[str, StepCost]) -> dict[str, Any]:
    """Measured costs of ``plain`` and perhaps ``checkpointed`` as plain data, with their ratio in time."""
    result: dict[str, Any] = {name: asdict(cost) | {"rounds_s": list(cost.rounds_s)} for name, cost in costs.items()}
    if "checkpointed" in costs:
        result["extra_time_pct"] = 100 * (costs["checkpointed"].step_s / costs["plain"].step_s - 1)
    return result


class _Copied:
    """A tensor's content in NumPy's memory: a budget counts the process's tensors, and this is none of the step's."""

    def __init__(self, tensor: Tensor) -> None:
        self._content = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().copy()
        self._dtype, self._shape = tensor.dtype, tensor.shape

    def tensor(self) -> Tensor:
        return torch.from_numpy(self._content).view(self._dtype).view(self._shape)


@contextmanager
def _undone(run: Run) -> Iterator[None]:
    """Whatever is trained inside is taken back: parameters, optimizer state, random streams."""
    parameters = list(run.model.parameters())
    values = [_Copied(parameter) for parameter in parameters]
    optimizer_state = tree_map_only(Tensor, _Copied, run.optimizer.state_dict())
    python_state = random.getstate()
    devices = [] if run.device.type == "cpu" else [run.device]
    with torch.random.fork_rng(devices, device_type=run.device.type if devices else "cuda"):
        try:
            yield
        finally:
            with torch.no_grad():
                for parameter, value in zip(parameters, values, strict=True):
                    parameter.copy_(value.tensor())
            run.optimizer.load_state_dict(tree_map_only(_Copied, _Copied.tensor, optimizer_state))
            random.setstate(python_state)
