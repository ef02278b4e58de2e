"""What a device has: its memory, how much of it this process can get, its name; and budgets said in these terms."""

from __future__ import annotations

import re
from fractions import Fraction
from pathlib import Path

import psutil
import torch

from elbowroom.errors import UsageError
from elbowroom.units import format_bytes, parse_bytes

# What budget="max" leaves free, as a share of the device's memory. A budget is of bytes asked for; these lie
# between them and the edge:
# - accelerators: rounding and fragmentation of the caching allocator, which holds more than it gave out, and
#   the workspaces of libraries (cuBLAS, cuDNN, NCCL) that come with the first steps;
ACCELERATOR_MARGIN = Fraction(1, 16)
# - CPU: the interpreter and its libraries (most of a GiB with torch and transformers), holes in the heap of
#   malloc, and the page cache from which the data is read.
CPU_MARGIN = Fraction(1, 8)

# The kernel writes "no limit" of cgroup v1 as the largest multiple of the page size below 2**63.
_UNLIMITED_BYTES = 1 << 60


def parse_budget(budget: int | str, device: torch.device | str) -> int:
    """A budget as the user says it, in bytes on ``device``, rounded down.

    Bytes (``6442450944``), a number with a unit (``"20GiB"``), a share of the device's memory (``"85%"``), or
    ``"max"``: what this process can get (see :func:`available_bytes`) less ``ACCELERATOR_MARGIN`` or
    ``CPU_MARGIN`` of the device's memory. Raises UsageError for anything else and for nothing. More bytes than
    the device has are no error: a budget is a promise not to take more, whatever the device.
    """
    place = torch.device(device)
    total_bytes = memory_bytes(place)
    if isinstance(budget, str) and budget.strip().lower() == "max":
        return _most_bytes(place, total_bytes)
    if isinstance(budget, str) and (share := re.fullmatch(r"(-?[0-9]+(?:\.[0-9]+)?)\s*%", budget.strip(), re.ASCII)):
        percent = Fraction(share[1])
        if not 0 < percent <= 100:
            raise UsageError(
                f"budget {budget!r}: a share of a device is above 0% and at most 100% ({place} has "
                f"{format_bytes(total_bytes)})"
            )
        n_bytes = int(total_bytes * percent / 100)
    else:
        n_bytes = _asked_bytes(budget)
    if n_bytes == 0:
        raise UsageError(f"budget {budget!r} is less than one byte: a training step needs more than nothing")
    return n_bytes


def memory_bytes(device: torch.device | str) -> int:
    """The memory of a device, bytes: of an accelerator its own, of the CPU the physical memory or, where lower,
    the limit of this process's control group (a container's). Raises UsageError where it cannot be asked."""
    place = torch.device(device)
    if place.type == "cpu":
        limit_bytes = _cgroup_limit_bytes(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))
        physical_bytes = int(psutil.virtual_memory().total)
        return physical_bytes if limit_bytes is None else min(physical_bytes, limit_bytes)
    return _free_and_total(place)[1]


def available_bytes(device: torch.device | str) -> int:
    """What this process can have of a device's memory now, bytes: what is free and what it already holds.

    Never above :func:`memory_bytes`. On an accelerator "what it holds" is what the caching allocator reserved;
    the driver's own share (a CUDA context has some hundred MiB) belongs to others.
    """
    place = torch.device(device)
    if place.type == "cpu":
        free_bytes = int(psutil.virtual_memory().available) + int(psutil.Process().memory_info().rss)
        return min(memory_bytes(place), free_bytes)
    module = torch.get_device_module(place)
    free_bytes, total_bytes = _free_and_total(place)
    if hasattr(module, "get_per_process_memory_fraction"):  # what set_per_process_memory_fraction allows
        total_bytes = int(total_bytes * module.get_per_process_memory_fraction(place))
    return min(total_bytes, free_bytes + int(module.memory_reserved(place)))


def _most_bytes(device: torch.device, total_bytes: int) -> int:
    margin_bytes = int(total_bytes * (CPU_MARGIN if device.type == "cpu" else ACCELERATOR_MARGIN))
    free_bytes = available_bytes(device)
    if free_bytes <= margin_bytes:
        raise UsageError(
            f"budget 'max': of the {format_bytes(total_bytes)} of {device} this process can get "
            f"{format_bytes(free_bytes)}, and the margin alone is {format_bytes(margin_bytes)}: end what else uses "
            f"the device, or give the budget in bytes"
        )
    return free_bytes - margin_bytes


def _asked_bytes(budget: int | str) -> int:
    try:
        return parse_bytes(budget)
    except UsageError as error:
        raise UsageError(f"budget: {error}; or a share of the device such as '85%', or 'max'") from None


def _free_and_total(device: torch.device) -> tuple[int, int]:
    if device.type == "meta" or not hasattr(torch.get_device_module(device), "mem_get_info"):
        raise UsageError(
            f"a budget needs to know how much memory {device} has, and torch cannot tell for {device.type}: use a "
            f"CUDA or XPU device, or cpu"
        )
    free_bytes, total_bytes = torch.get_device_module(device).mem_get_info(device)
    return int(free_bytes), int(total_bytes)


def _cgroup_limit_bytes(membership: Path, mount: Path) -> int | None:
    """The lowest memory limit of this process's control group and those above it; None without a limit.

    ``membership`` has a line ``id:controllers:path`` for each hierarchy (man 7 cgroups): of version 2 without
    controllers and mounted at ``mount`` (or ``mount/unified``), of version 1 mounted at ``mount/memory``.
    Inside a container the path may be the host's and not visible: then the mount's own limit counts.
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return None
    limits: list[int] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            roots, name = [mount, mount / "unified"], "memory.max"
        elif "memory" in controllers.split(","):
            roots, name = [mount / "memory"], "memory.limit_in_bytes"
        else:
            continue
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for root in roots:
            groups = [root.joinpath(*parts[:depth]) for depth in range(len(parts) + 1)]
            limits += [limit for group in groups if (limit := _limit_in(group / name)) is not None]
    return min(limits, default=None)


def _limit_in(file: Path) -> int | None:
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() and 0 < int(text) < _UNLIMITED_BYTES else None
