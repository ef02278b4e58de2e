"""What checkpointing itself takes on this machine: measured once in a process, in a few milliseconds."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from elbowroom.core.proof import fingerprint
from elbowroom.core.region import Family, Region
from elbowroom.planning.profile import EngineCosts

N_LAYERS = 10
N_OPERATORS = 4 * N_LAYERS  # of the layers below, as the recorder counts them: views are none
N_SLOTS = 8 * N_LAYERS
N_ROUNDS = 7

#: Written between two rounds: in a real step, caches are full of activations when Python's turn comes.
CACHE_BYTES = 1 << 24


@dataclass(frozen=True)
class Calibration:
    """``costs`` of the engine, and ``plain_s``: what Python and autograd take for an operator without us."""

    costs: EngineCosts
    plain_s: float


@functools.cache
def calibrate() -> Calibration:
    """Times tiny layers plainly, recorded with everything kept, and recorded with nothing kept.

    Whatever the engine allocates once, it has allocated then, and no profile sees it.
    """
    fingerprint(torch.zeros(1 << 16))
    with torch.enable_grad(), torch.autocast("cpu", enabled=False):
        layers = _Layers()
        plain = _timed(layers)
        kept = _timed(_recorded(layers, lambda _: True))
        replayed = _timed(_recorded(layers, lambda _: False))
        with torch.no_grad():
            x = torch.ones(2, 8)
            bare_s = min(_seconds(lambda: layers(x)) for _ in range(N_ROUNDS)) / N_OPERATORS

    def each(seconds: float, number: int) -> float:
        return max(0.0, seconds) / number

    costs = EngineCosts(
        record_s=each(kept[0] - plain[0], N_OPERATORS),
        replay_s=max(0.0, each(replayed[1] - kept[1], N_OPERATORS) - bare_s),
        slot_s=each(kept[1] - plain[1], N_SLOTS),
    )
    return Calibration(costs, plain_s=max(0.0, plain[0] / N_OPERATORS - bare_s))


class _Layers:
    """What blocks are made of, so small that Python is all the cost: (2, 8) to (2, 8)."""

    def __init__(self) -> None:
        self.weight = torch.eye(8).requires_grad_()
        self.bias = torch.zeros(8, requires_grad=True)

    def __call__(self, x: Tensor) -> Tensor:
        for _ in range(N_LAYERS):
            y = F.layer_norm(x, (8,), self.bias, self.bias)
            y = F.gelu(F.linear(y.view(2, 2, 4).view(2, 8), self.weight, self.bias))
            x = x + y
        return x


def _recorded(fn: Callable[[Tensor], Tensor], keep: Callable[[object], bool]) -> Callable[[Tensor], Tensor]:
    region = Region("calibration", Family(), keep, "never")
    return lambda x: region.run(fn, (x,), {})


def _timed(fn: Callable[[Tensor], Tensor]) -> tuple[float, float]:
    """The shortest forward and the shortest backward, seconds: what takes longer waited for somebody."""
    forwards, backwards = [], []
    # NumPy works in this thread alone; torch would wake others, and wait for them.
    spoiler = np.zeros(CACHE_BYTES // 8)
    for _ in range(N_ROUNDS):
        x = torch.ones(2, 8, requires_grad=True)
        spoiler += 1
        begin = time.perf_counter()
        out = fn(x)
        middle = time.perf_counter()
        # A scalar: with a gradient given, torch would first import half of its compiler.
        torch.autograd.backward(out.sum(), inputs=[x])
        backwards.append(time.perf_counter() - middle)
        forwards.append(middle - begin)
    return min(forwards), min(backwards)


def _seconds(fn: Callable[[], object]) -> float:
    begin = time.perf_counter()
    fn()
    return time.perf_counter() - begin
