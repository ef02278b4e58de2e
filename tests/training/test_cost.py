"""Measuring a run's step leaves the run as it was."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from elbowroom.training.config import TrainConfig
from elbowroom.training.cost import cost_of_a_step
from elbowroom.training.run import Run, set_up, training_step


def everything(run: Run) -> list[Any]:
    state = {"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict()}
    return copy.deepcopy([*tree_leaves(state), torch.get_rng_state(), *tree_leaves(random.getstate())])


def test_measuring_disturbs_neither_state_nor_streams(configured: Callable[..., TrainConfig]) -> None:
    run = set_up(configured(activation_checkpointing="full"))
    for step in range(3):
        training_step(run, run.model, run.data.batch(step), 1e-3)
    before = everything(run)
    cost = cost_of_a_step(run)
    after = everything(run)
    assert len(before) == len(after) > 100
    assert all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(before, after, strict=True))
    assert all(parameter.grad is None for parameter in run.model.parameters())
    assert set(cost) == {"plain", "checkpointed", "extra_time_pct"}


def test_peaks_repeat_to_the_byte_and_fall_with_what_is_kept(configured: Callable[..., TrainConfig]) -> None:
    peaks: dict[str, set[tuple[int, int]]] = {}
    for keep in ("nothing", "nothing", "matmuls", "everything"):
        run = set_up(configured(keep=keep, micro_batch_size=4, sequence_length=64))
        training_step(run, run.model, run.data.batch(0), 1e-3)
        cost = cost_of_a_step(run, n_rounds=1)
        peaks.setdefault(keep, set()).add((cost["plain"]["peak_bytes"], cost["checkpointed"]["peak_bytes"]))
        expected = 100 * (cost["checkpointed"]["step_s"] / cost["plain"]["step_s"] - 1)
        assert cost["extra_time_pct"] == expected
    assert [len(found) for found in peaks.values()] == [1, 1, 1]
    (nothing,), (matmuls,), (everything,) = peaks.values()
    assert nothing[0] == matmuls[0] == everything[0]
    assert nothing[1] < matmuls[1] < everything[1] == everything[0]
