"""The memory meter: how many bytes a piece of work takes at its highest, to the byte.

On accelerators the caching allocator counts (``torch.cuda.memory_stats`` and its kin). The CPU allocator
keeps no count, but reports every allocation and free to torch's profiler; the meter listens to those
events alone (no operators, shapes or stacks) and adds them up. Temporaries inside an operator and the work
of backward are seen.

What the CPU meter knows, precisely:

- It hears the calling thread and the autograd threads that work for it, not other threads of the program.
- The allocator does not report the free of a block that was allocated before the meter started. The meter
  therefore lists the tensors Python can reach at the start (and their gradients), and counts each one that
  dies. Blocks that only C++ holds at the start (a graph recorded before it) are not noticed when they go;
  torch then says "Memory block of unknown size" on stderr.
- Bytes are those asked of the allocator. What libraries such as oneDNN take for themselves shows in the
  resident set.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, NamedTuple, TextIO

import psutil
import torch
from torch._C._profiler import ProfilerConfig, ProfilerState, RecordScope, _ExperimentalConfig
from torch.profiler import ProfilerActivity

from elbowroom.errors import UsageError
from elbowroom.units import format_bytes

# ----------------------------------------------------------------------------------------------------
# Nouns
# ----------------------------------------------------------------------------------------------------


class Death(NamedTuple):
    """The end of a block from before the start, placed in the event stream by a marker block."""

    marker_address: int
    address: int


class Timeline(NamedTuple):
    """Bytes above the start: the highest, and those left at the end (negative if more was freed)."""

    peak_bytes: int
    end_bytes: int


# Private to torch, and typed by stubs that lag behind it: the one place where we depend on either.
_C: Any = torch._C
_UntypedStorage: Any = torch.UntypedStorage

# The marker's size is no power of two and no multiple of a dtype, so that a reader of events knows it at a
# glance; what identifies it is its address, in the order in which markers were made.
_MARKER_BYTES = 67


# ----------------------------------------------------------------------------------------------------
# Public verbs
# ----------------------------------------------------------------------------------------------------


class Meter:
    """Counts the bytes of what runs inside ``with Meter(device) as meter: ...``, exactly and repeatably.

    After the block:

    ``peak_bytes``            the highest number of bytes above those at its start
    ``end_bytes``             bytes at its end minus bytes at its start (negative if more was freed)
    ``start_bytes``           bytes allocated on the device at its start; None on CPU (nobody counts)
    ``start_reserved_bytes``  held by the caching allocator then, None on CPU; ``end_reserved_bytes`` likewise
    ``start_resident_bytes``  resident set of this process then; ``end_resident_bytes`` likewise

    Garbage cycles are collected before the start, so that older garbage does not end inside. On an
    accelerator the allocator's peak counter is reset (it can only be asked that way); meters may nest
    there. On CPU a thread has one profiler, so that a meter raises UsageError inside another meter or a
    running ``torch.profiler``.
    """

    peak_bytes: int
    end_bytes: int
    start_bytes: int | None = None
    start_reserved_bytes: int | None = None
    end_reserved_bytes: int | None = None
    start_resident_bytes: int
    end_resident_bytes: int

    def __init__(self, device: torch.device | str | None = None) -> None:
        self.device = torch.device(device if device is not None else "cpu")
        self._counter: _CpuCounter | _AcceleratorCounter
        if self.device.type == "cpu":
            self._counter = _CpuCounter()
        else:
            self._counter = _AcceleratorCounter(self.device)

    def __enter__(self) -> Meter:
        gc.collect()
        self.start_resident_bytes = resident_bytes()
        self._counter.start()
        self.start_bytes = self._counter.allocated_bytes()
        self.start_reserved_bytes = self._counter.reserved_bytes()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.peak_bytes, self.end_bytes = self._counter.stop()
        self.end_reserved_bytes = self._counter.reserved_bytes()
        self.end_resident_bytes = resident_bytes()


class memory_report:  # noqa: N801 - a verb that is also a context manager, as torch.no_grad is
    """Prints what memory is in use on ``device`` now; around a block also afterwards, and the peak between.

    Accelerators: allocated and reserved bytes. CPU: the resident set of the process, for its allocator
    cannot be asked which bytes are alive; what was allocated between start and end comes from the meter.
    ``file``: where to print (default: stdout). ``.meter`` holds the numbers after the block.
    """

    def __init__(self, device: torch.device | str | None = None, *, file: TextIO | None = None) -> None:
        self.meter = Meter(device)
        self._file = file
        self._say("now")

    def __enter__(self) -> memory_report:
        self.meter.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.meter.__exit__(kind, error, trace)
        self._say("after")
        peak, left = format_bytes(self.meter.peak_bytes), format_bytes(self.meter.end_bytes)
        self._print(f"between: peak +{peak}, left {left}")

    def _say(self, when: str) -> None:
        counter = self.meter._counter
        allocated, reserved = counter.allocated_bytes(), counter.reserved_bytes()
        if allocated is None or reserved is None:
            text = f"resident set {format_bytes(resident_bytes())}"
        else:
            text = f"allocated {format_bytes(allocated)}, reserved {format_bytes(reserved)}"
        self._print(f"{when}: {text}")

    def _print(self, text: str) -> None:
        print(f"memory on {self.meter.device}, {text}", file=self._file or sys.stdout)


def resident_bytes() -> int:
    """The resident set of this process now, bytes."""
    return int(psutil.Process().memory_info().rss)


def walk_events(events: Iterable[tuple[int, int]], before: dict[int, int], deaths: Sequence[Death]) -> Timeline:
    """Adds up allocator events in order of time.

    ``events``: (address, bytes), bytes negative for a free.
    ``before``: address to bytes of the blocks alive at the start.
    ``deaths``: those of them that died, each at the place in ``events`` where its marker block appears.
    """
    alive: dict[int, int] = {}
    unfreed_before = dict(before)
    marked = iter(deaths)
    death = next(marked, None)
    current = peak = 0
    for address, size in events:
        if size < 0:
            # The reporter's own size is stale where the block was made out of its hearing: ours decides.
            known = alive if address in alive else unfreed_before
            current -= known.pop(address, 0)
        elif death is not None and (address, size) == (death.marker_address, _MARKER_BYTES):
            current -= unfreed_before.pop(death.address, 0)
            death = next(marked, None)
            alive[address] = 0
        else:
            alive[address] = size
            current += size
            peak = max(peak, current)
    return Timeline(peak, current)


# ----------------------------------------------------------------------------------------------------
# Machinery
# ----------------------------------------------------------------------------------------------------


class _CpuCounter:
    """Listens to the CPU allocator of this thread through a profiler session of its own."""

    def start(self) -> None:
        if _C._autograd._profiler_enabled():
            raise UsageError(
                "Meter('cpu') listens to the allocator through torch's profiler, and a profiler (or another "
                "Meter) is already running on this thread: end that one first, or measure one after the other"
            )
        self._thread = threading.get_ident()
        self._deaths: list[Death] = []
        self._unplaced_bytes = 0
        self._before, self._watch = self._watch_tensors()
        # Of the operators only user-made scopes are listened to: few, so nearly all events are of memory.
        config = ProfilerConfig(
            ProfilerState.KINETO, False, True, False, False, False, _ExperimentalConfig(), "elbowroom-meter"
        )
        activities = {ProfilerActivity.CPU}
        with _QuietKineto():
            _C._autograd._prepare_profiler(config, activities)
            _C._autograd._enable_profiler(config, activities, {RecordScope.USER_SCOPE})

    def stop(self) -> Timeline:
        result = _C._autograd._disable_profiler()
        self._watch.clear()
        timeline = walk_events(_memory_events(result), self._before, self._deaths)
        return timeline._replace(end_bytes=timeline.end_bytes - self._unplaced_bytes)

    def allocated_bytes(self) -> int | None:
        return None

    def reserved_bytes(self) -> int | None:
        return None

    def _watch_tensors(self) -> tuple[dict[int, int], list[weakref.ref[Any]]]:
        """Every CPU block that a Python tensor reaches now: its address and bytes, and a reference that
        tells its end."""
        before: dict[int, int] = {}
        watch: list[weakref.ref[Any]] = []
        with torch._C.DisableTorchFunctionSubclass():
            for tensor in _reachable_tensors():
                storage = _cpu_storage(tensor)
                if storage is None or storage.data_ptr() in before:
                    continue
                before[storage.data_ptr()] = storage.nbytes()
                watch.append(weakref.ref(storage, self._on_end(storage.data_ptr(), storage.nbytes())))
        return before, watch

    def _on_end(self, address: int, n_bytes: int) -> Callable[[object], None]:
        def place(_: object) -> None:
            if threading.get_ident() != self._thread:
                self._unplaced_bytes += n_bytes
                return
            # A raw storage, not a tensor: no dispatcher, so that nobody's mode or recorder sees an
            # operator here.
            marker = _UntypedStorage(_MARKER_BYTES, device="cpu")
            self._deaths.append(Death(marker.data_ptr(), address))

        return place


class _AcceleratorCounter:
    """Reads the caching allocator's statistics of one device."""

    # Open meters per device: a reset of the peak by an inner one must not lose the outer one's.
    _open: list[_AcceleratorCounter] = []

    def __init__(self, device: torch.device) -> None:
        module = torch.get_device_module(device)
        if not hasattr(module, "reset_peak_memory_stats"):
            raise UsageError(
                f"cannot measure memory on {device}: torch.{device.type} has no peak statistics; "
                f"use a CUDA or XPU device, or cpu"
            )
        self._device, self._module = device, module

    def start(self) -> None:
        for counter in self._open:
            counter._note_peak()
        self._start_bytes = self._highest_bytes = int(self._module.memory_allocated(self._device))
        self._module.reset_peak_memory_stats(self._device)
        self._open.append(self)

    def stop(self) -> Timeline:
        self._note_peak()
        self._open.remove(self)
        end_bytes = int(self._module.memory_allocated(self._device)) - self._start_bytes
        return Timeline(self._highest_bytes - self._start_bytes, end_bytes)

    def allocated_bytes(self) -> int | None:
        return int(self._module.memory_allocated(self._device))

    def reserved_bytes(self) -> int | None:
        return int(self._module.memory_reserved(self._device))

    def _note_peak(self) -> None:
        self._highest_bytes = max(self._highest_bytes, int(self._module.max_memory_allocated(self._device)))


class _QuietKineto:
    """Keeps kineto from writing two lines to stderr at every session: it reads this variable once, at its
    first.

    A level that the user has set stays as it is; the environment is as before afterwards.
    """

    def __enter__(self) -> None:
        self._set_here = "KINETO_LOG_LEVEL" not in os.environ
        if self._set_here:
            os.environ["KINETO_LOG_LEVEL"] = "99"

    def __exit__(self, *_: object) -> None:
        if self._set_here:
            del os.environ["KINETO_LOG_LEVEL"]


def _memory_events(result: Any) -> list[tuple[int, int]]:
    """The CPU allocator's events of a profiler result: (address, bytes), in order of time."""
    stack = list(reversed(result.experimental_event_tree()))
    events: list[tuple[int, int, int]] = []
    while stack:
        event = stack.pop()
        stack.extend(reversed(event.children))
        if event.tag.name == "Allocation" and event.typed[1].device.type == "cpu":
            fields = event.typed[1]
            events.append((event.start_time_ns, fields.ptr, fields.alloc_size))
    # Stable: events of one thread keep their order even where two share a nanosecond.
    events.sort(key=lambda event: event[0])
    return [(address, size) for _, address, size in events]


def _reachable_tensors() -> Iterator[torch.Tensor]:
    for thing in gc.get_objects():
        # type() and not isinstance(): lazy proxies answer __class__ by importing things.
        if issubclass(type(thing), torch.Tensor):
            yield thing
            if thing.is_leaf and thing.grad is not None:
                yield thing.grad


def _cpu_storage(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """The tensor's storage if the CPU allocator made it. Asks no lazy clone, which would make it real."""
    try:
        if tensor.device.type != "cpu" or _C._is_cow_tensor(tensor):
            return None
        storage = tensor.untyped_storage()
        # What cannot be resized is not the allocator's: memory of NumPy, of a mapped file.
        return storage if storage.resizable() and storage.nbytes() and storage.data_ptr() else None
    except Exception:  # wrapper subclasses, fake, sparse: no storage, and each says so with its own error
        return None
