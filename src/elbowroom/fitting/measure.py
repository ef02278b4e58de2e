"""What one step costs: its exact peak of memory and its time, for several contenders side by side."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median

import torch

from elbowroom.fitting.memory import Meter


@dataclass(frozen=True)
class StepCost:
    """One contender: peak above the bytes at the step's start, and the median of its timed steps."""

    peak_bytes: int
    step_s: float
    rounds_s: tuple[float, ...]


def measure_steps(
    steps: Mapping[str, Callable[[], object]],
    device: torch.device,
    *,
    n_warmups: int = 2,
    n_rounds: int = 5,
) -> dict[str, StepCost]:
    """Runs every contender's step ``n_warmups + 1 + n_rounds`` times; the one in the middle under the meter.

    Rounds are interleaved (A B A B ...), so that a machine that gets busy slows all contenders alike.
    """
    for _ in range(n_warmups):
        for step in steps.values():
            step()
    peaks = {name: _peak_bytes(step, device) for name, step in steps.items()}
    rounds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(n_rounds):
        for name, step in steps.items():
            rounds[name].append(_duration_s(step, device))
    return {name: StepCost(peaks[name], median(rounds[name]), tuple(rounds[name])) for name in steps}


def _peak_bytes(step: Callable[[], object], device: torch.device) -> int:
    with Meter(device) as meter:
        step()
    return meter.peak_bytes


def _duration_s(step: Callable[[], object], device: torch.device) -> float:
    _wait_for(device)
    start_s = time.perf_counter()
    step()
    _wait_for(device)
    return time.perf_counter() - start_s


def _wait_for(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)
