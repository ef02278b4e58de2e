"""Generators: remember where they stood before a seeded operator, and draw from there again (engine rule 5)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Generator, Tensor

from elbowroom.core.operators import Facts
from elbowroom.core.program import tensors_of

#: The generators an operator may draw from, with their states before it ran.
States = tuple[tuple[Generator, Tensor], ...]

# Default generators are process-wide: while one is set back, no other replay may draw from it.
_lock = threading.RLock()


def generators_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Generator]:
    """The generators a call draws from: the ones it was given, else the defaults of the devices it touches."""
    given = [a for a in (*args, *kwargs.values()) if isinstance(a, Generator)]
    if given:
        return given
    devices = {t.device for t in tensors_of((args, kwargs))}
    if isinstance(kwargs.get("device"), (torch.device, str)):
        devices.add(torch.device(kwargs["device"]))
    found = [torch.default_generator]
    for device in devices:
        if device.type == "cuda":
            index = device.index if device.index is not None else torch.cuda.current_device()
            found.append(torch.cuda.default_generators[index])
        elif device.type == "mps":
            found.append(torch.mps._get_default_mps_generator())
        elif device.type == "xpu":
            index = device.index if device.index is not None else torch.xpu.current_device()
            found.append(torch.xpu.default_generators[index])
    return found


def remember(args: tuple[Any, ...], kwargs: dict[str, Any]) -> States:
    return tuple((g, g.get_state()) for g in generators_of(args, kwargs))


@contextmanager
def standing_still(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
    """Leave the generators that a call may draw from as they were found."""
    found = remember(args, kwargs)
    try:
        yield
    finally:
        for generator, state in found:
            generator.set_state(state)


@contextmanager
def drawing_from(states: States, facts: Facts, kwargs: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Run an operator with its generators where they stood; yields the keyword arguments to call it with.

    A private generator where the schema takes one, so that other threads never see a default generator move; elsewhere
    the generators are set and put back under a lock.
    """
    if not states:
        yield kwargs
        return
    if facts.private_generator and len(states) == 1:
        generator, state = states[0]
        private = Generator(generator.device)
        private.set_state(state)
        yield {**kwargs, "generator": private}
        return
    with _lock:
        found = [(g, g.get_state()) for g, _ in states]
        try:
            for generator, state in states:
                generator.set_state(state)
            yield kwargs
        finally:
            for generator, state in found:
                generator.set_state(state)
