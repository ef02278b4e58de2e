"""Resident memory of this process as an exact figure, for tests that run in a process of their own."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from typing import Any

import torch

MIB = 2**20
VALUE_BYTES = 4 * MIB
VALUE = 2**20  # elements of one fp32 value of 4 MiB


def prepare(contender: Any) -> None:
    """Make glibc give freed blocks of 1 MiB and more back to the system, and get lazy imports over with."""
    ctypes.CDLL(None).mallopt(-3, 1 << 20)
    for numel in (3, 1 << 15):  # a proof looks at large values in another way than at small ones
        x = torch.ones(numel, requires_grad=True)
        for _ in range(2):
            contender.checkpoint(lambda t: t.sin().exp().tanh(), x).sum().backward()


def resident_bytes() -> int:
    """Resident bytes of this process (Linux)."""
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * 4096


def growth_bytes(work: Callable[[], Any]) -> tuple[int, Any]:
    """Resident bytes that ``work`` adds and its result holds on to; the result too, so that it stays alive."""
    gc.collect()
    before = resident_bytes()
    result = work()
    return resident_bytes() - before, result
