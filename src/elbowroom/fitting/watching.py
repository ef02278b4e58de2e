"""Looks on while one training step runs, and writes down what happened when: the raw material of a profile.

A *log* has an entry for everything of note: a region's forward begins and ends, an operator runs, backward asks for a
slot and lets go of it. Each entry carries a mark in the meter's stream of allocator events and two times, so that what
looking on itself takes is in no interval.
"""

from __future__ import annotations

import gc
import sys
import time
import weakref
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from elbowroom.core.program import MADE, SOURCE, Program
from elbowroom.core.replayer import Tape
from elbowroom.errors import UsageError
from elbowroom.fitting.memory import Meter, Segment

START = "start"
BEGIN = "begin"  # of a region's forward
RETURNED = "returned"  # the region's forward is over
OPERATOR = "operator"  # is about to run
OPERATOR_END = "operator end"
ASK = "ask"
GOT = "got"  # the value asked for is there
RELEASED = "released"
BACKWARD_END = "backward end"

_C: Any = torch._C
_Storage: Any = torch.UntypedStorage


class Entry(NamedTuple):
    """``item``: the operator's or the slot's index. ``mark``: segment of the meter that begins here."""

    kind: str
    call: int
    item: int
    mark: int
    arrived_s: float
    left_s: float


@dataclass
class Call:
    """One region call of the step. ``storages``: the storage under each value, by address (0: none)."""

    region: str
    program: Program | None = None
    storages: list[int] = field(default_factory=list)
    free: frozenset[int] = frozenset()  # sources that others hold anyway
    alive: frozenset[int] = frozenset()  # made values that outlived the region's forward
    tape: weakref.ref[Tape] | None = None


class StepWatch:
    """The log of one step on one device, from before its forward to the end of its backward."""

    def __init__(self, device: torch.device) -> None:
        self.meter = Meter(device, collect_garbage=False)
        self.log: list[Entry] = []
        self.calls: list[Call] = []
        self.segments: tuple[Segment, ...] = ()
        self._clock = _HostClock() if device.type == "cpu" else _DeviceClock(device)
        self._pins: list[int] = []
        self._looked = False
        self._started = False
        self._is_open = False
        self._borrowed = False  # the meter is somebody else's, and ours are marks in it
        self._borrowed_rest_bytes = 0

    @staticmethod
    def started(device: torch.device) -> StepWatch | None:
        """A watch that has begun; None where the device's memory cannot be metered now."""
        watch = StepWatch(device)
        if Meter.busy(device):
            outer = Meter.current()
            if outer is None:
                return None
            watch.meter, watch._borrowed = outer, True
        else:
            gc.collect(1)  # what died lately; a whole collection takes longer than many a step
            watch.meter.start()
        watch._started = watch._is_open = True
        watch.note(START)
        return watch

    @property
    def resting_bytes(self) -> int | None:
        """Bytes alive when the step began; None where the meter is somebody else's and still runs."""
        if not self._borrowed:
            return self.meter.start_bytes
        return self._borrowed_rest_bytes if self.segments else None

    @property
    def is_resolved(self) -> bool:
        """Whether the step was watched to the end of its backward."""
        return bool(self.segments) and self.log[-1].kind == BACKWARD_END

    @property
    def peak_bytes(self) -> int:
        """The highest bytes above those at the beginning, to the end of backward."""
        return max(segment.peak_bytes for segment in self.segments[: self.log[-1].mark])

    @property
    def end_bytes(self) -> int:
        """Bytes at the end of backward above those at the beginning."""
        return self.segments[self.log[-1].mark].level_bytes

    def backward_ended(self) -> None:
        """The first backward of the step is over, and with it the log. (The meter stops later: see ``stop``.)"""
        self.note(BACKWARD_END)
        self._is_open = False

    def stop(self) -> None:
        """Stops the meter; ``segments`` and the times in the log are valid from here on.

        Not to be called from autograd's callbacks: they run in a copy of the thread's state, in which torch's profiler
        would be off while it stays on outside.
        """
        self._is_open = False
        if not self._started:
            return
        self._started = False
        if self._borrowed:
            if self.meter.running:  # its numbers come when its owner stops it
                self.meter.when_stopped.append(self._resolve)
                return
        else:
            try:
                self.meter.stop()
            except UsageError:  # somebody's profiler took over: nothing is known of this step
                self._unpin()
                return
        self._resolve()

    def _resolve(self) -> None:
        """The meter has its numbers: take those from our first mark on, above the level there."""
        self._unpin()
        segments = self.meter.segments
        first = self.log[0].mark
        if first >= len(segments):
            return  # whose meter it is lost its count
        level_bytes = segments[first].level_bytes
        self._borrowed_rest_bytes = self.meter.start_bytes + level_bytes
        self.segments = tuple(
            Segment(s.level_bytes - level_bytes, s.peak_bytes - level_bytes) for s in segments[first:]
        )
        times = self._clock.resolved([t for entry in self.log for t in (entry.arrived_s, entry.left_s)])
        self.log = [
            e._replace(mark=e.mark - first, arrived_s=times[2 * i], left_s=times[2 * i + 1])
            for i, e in enumerate(self.log)
        ]

    def _unpin(self) -> None:
        for pin in self._pins:
            _Storage._free_weak_ref(pin)
        self._pins = []

    def note(self, kind: str, call: int = -1, item: int = -1) -> None:
        """Something of note happens now."""
        if self._is_open:
            arrived = self._clock.now()
            mark = self.meter.mark()
            self.log.append(Entry(kind, call, item, mark, arrived, self._clock.now()))

    def call(self, region: str) -> CallWatch:
        """The region is called: its forward begins."""
        self.calls.append(Call(region))
        self.note(BEGIN, len(self.calls) - 1)
        return CallWatch(self, len(self.calls) - 1)

    def pin(self, address: int) -> bool:
        """Whether the storage at ``address`` is alive; if so no other will have this address until the log is over."""
        storage = _Storage._new_with_weak_ptr(address)
        if storage is None:
            return False
        self._pins.append(storage._weak_ref())
        return True

    def look_for_other_holders(self) -> None:
        """At the beginning of backward: which sources does somebody hold besides the tapes?"""
        if self._looked or not self._is_open:
            return
        self._looked = True
        tapes = [(call, call.tape() if call.tape else None) for call in self.calls]
        ours: Counter[int] = Counter()  # by storage
        objects: Counter[int] = Counter()
        for _, tape in tapes:
            if tape is not None:
                ours.update(_storages_of(tape))
                objects.update(map(id, tape.held))
        for call, tape in tapes:
            if tape is not None and call.program is not None:
                call.free = frozenset(
                    v for v, info in enumerate(call.program.values)
                    if info.kind == SOURCE and tape.held[v] is not None
                    and (_held_elsewhere(call.storages[v], ours) or _is_known_elsewhere(tape, v, objects))
                )  # fmt: skip


class CallWatch:
    """One region call, as ``core.region.Watch`` is told of it."""

    def __init__(self, step: StepWatch, index: int) -> None:
        self._step = step
        self._index = index
        self._returned = False

    def operator_begins(self) -> None:
        self._step.note(OPERATOR, self._index)

    def operator_ended(self, k: int) -> None:
        self._step.note(OPERATOR_END, self._index, k)

    def forward_ended(self, program: Program, tape: Tape, storages: list[int]) -> None:
        call = self._step.calls[self._index]
        call.program, call.storages, call.tape = program, list(storages), weakref.ref(tape)
        call.alive = frozenset(
            v for v, info in enumerate(program.values)
            if info.kind in (MADE, SOURCE) and storages[v] and self._step.pin(storages[v])
        )  # fmt: skip

    def returned(self) -> None:
        self._returned = True
        self._step.note(RETURNED, self._index)

    def asks(self, slot: int) -> None:
        self._step.look_for_other_holders()
        self._step.note(ASK, self._index, slot)

    def got(self, slot: int) -> None:
        self._step.note(GOT, self._index, slot)

    def released(self, slot: int) -> None:
        if self._returned:  # before, autograd dropped what it had just saved: the program's slot is nobody's
            self._step.look_for_other_holders()
        self._step.note(RELEASED, self._index, slot)


def _storages_of(tape: Tape) -> list[int]:
    held = [t for t in tape.held if isinstance(t, Tensor) and t.layout is torch.strided]
    return [t.untyped_storage()._cdata for t in held]


def _held_elsewhere(address: int, ours: Counter[int]) -> bool:
    if not address:
        return True  # no strided storage: nothing of ours to count
    storage = _Storage._new_with_weak_ptr(address)
    if storage is None:
        return False
    return int(_C._storage_Use_Count(address)) - 1 > ours[address]  # our look at it is one of them


def _is_known_elsewhere(tape: Tape, v: int, objects: Counter[int]) -> bool:
    """Whether what is held is somebody's own tensor object, and no alias of ours. (The tapes' lists know it, too.)"""
    held: Any = tape.held
    known = objects[id(held[v])]
    return sys.getrefcount(held[v]) - 1 > known or (isinstance(held[v], Tensor) and held[v]._use_count() > 1)


class _HostClock:
    """The CPU works while Python waits: its time is the host's."""

    def now(self) -> float:
        return time.perf_counter()

    def resolved(self, times: list[Any]) -> list[float]:
        return times


class _DeviceClock:
    """An accelerator works on its own: events in its stream, and one synchronisation at the end of the step."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module = torch.get_device_module(device)

    def now(self) -> Any:
        event = self._module.Event(enable_timing=True)
        event.record(self._module.current_stream(self._device))
        return event

    def resolved(self, times: list[Any]) -> list[float]:
        self._module.synchronize(self._device)
        return [times[0].elapsed_time(t) / 1e3 for t in times]
