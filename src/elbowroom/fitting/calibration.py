"""What checkpointing itself takes on this machine: measured once in a process, in a few milliseconds."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from elbowroom.core.proof import fingerprint
from elbowroom.core.region import Family, Region
from elbowroom.planning.profile import EngineCosts

N_OPERATORS = 40
N_ROUNDS = 7


@dataclass(frozen=True)
class Calibration:
    """``costs`` of the engine, and ``plain_s``: what Python and autograd take for an operator without us."""

    costs: EngineCosts
    plain_s: float


@functools.cache
def calibrate() -> Calibration:
    """Times a chain of tiny operators plainly, recorded with everything kept, and recorded with nothing kept.

    Whatever the engine allocates once, it has allocated then, and no profile sees it.
    """
    fingerprint(torch.zeros(1 << 16))
    plain = _timed(lambda x: _chain(x))
    kept = _timed(_recorded(lambda _: True))
    replayed = _timed(_recorded(lambda _: False))
    with torch.no_grad():
        x = torch.ones(8)
        bare_s = min(_seconds(lambda: _chain(x)) for _ in range(N_ROUNDS)) / N_OPERATORS

    def each(seconds: float) -> float:
        return max(0.0, seconds) / N_OPERATORS

    costs = EngineCosts(
        record_s=each(kept[0] - plain[0]),
        replay_s=max(0.0, each(replayed[1] - kept[1]) - bare_s),
        slot_s=each(kept[1] - plain[1]),
    )
    return Calibration(costs, plain_s=max(0.0, plain[0] / N_OPERATORS - bare_s))


def _chain(x: Tensor) -> Tensor:
    for _ in range(N_OPERATORS):
        x = torch.tanh(x)
    return x


def _recorded(keep: Callable[[object], bool]) -> Callable[[Tensor], Tensor]:
    region = Region("calibration", Family(), keep, "never")
    return lambda x: region.run(_chain, (x,), {})


def _timed(fn: Callable[[Tensor], Tensor]) -> tuple[float, float]:
    """The shortest forward and the shortest backward of some rounds, seconds."""
    forwards, backwards = [], []
    for _ in range(N_ROUNDS):
        x = torch.ones(8, requires_grad=True)
        begin = time.perf_counter()
        out = fn(x)
        middle = time.perf_counter()
        # A scalar: with a gradient given, torch would first import half of its compiler.
        torch.autograd.backward(out.sum())
        backwards.append(time.perf_counter() - middle)
        forwards.append(middle - begin)
    return min(forwards), min(backwards)


def _seconds(fn: Callable[[], object]) -> float:
    begin = time.perf_counter()
    fn()
    return time.perf_counter() - begin
