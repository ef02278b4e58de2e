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
- A process has one profiler session: torch crashes where two overlap, in whatever threads. The meter refuses
  to be the second. Should a profiler start while a meter runs, the profiler's user gets his data, and the
  meter's numbers are lost (it says so).
- Bytes are those asked of the allocator. What libraries such as oneDNN take for themselves shows in the
  resident set.
"""

from __future__ import annotations

import gc
import itertools
import sys
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, NamedTuple, TextIO

import psutil
import torch

from elbowroom.errors import UsageError
from elbowroom.fitting.allocator_events import AllocatorEvents, profiler_is_busy
from elbowroom.units import format_bytes

# ----------------------------------------------------------------------------------------------------
# Nouns
# ----------------------------------------------------------------------------------------------------


class Segment(NamedTuple):
    """From one mark to the next (the last one: to the end). Bytes above the start, negative if below it."""

    level_bytes: int  # at the mark
    peak_bytes: int  # the highest until the next mark; never below the level


class Marker(NamedTuple):
    """A block made and dropped at once, so that a moment has its place in the stream of allocator events."""

    address: int
    n_bytes: int
    died: int | None = None  # address of a block from before the start that ends here
    mark: int | None = None  # or the number of the caller's mark


class Timeline(NamedTuple):
    """Bytes above the start: the highest, and those left at the end (negative if more was freed)."""

    peak_bytes: int
    end_bytes: int
    segments: tuple[Segment, ...] = ()


# Private to torch, and typed by stubs that lag behind it.
_C: Any = torch._C
_UntypedStorage: Any = torch.UntypedStorage


# ----------------------------------------------------------------------------------------------------
# Public verbs
# ----------------------------------------------------------------------------------------------------


class Meter:
    """Counts the bytes of what runs inside ``with Meter(device) as meter: ...``, exactly and repeatably.

    Also without ``with``: ``meter.start()`` ... ``meter.stop()``. Afterwards:

    ``peak_bytes``            the highest number of bytes above those at its start
    ``end_bytes``             bytes at its end minus bytes at its start (negative if more was freed)
    ``segments``              a :class:`Segment` for each mark that was placed with ``mark()``
    ``start_bytes``           bytes at its start: allocated on the accelerator; on CPU those of the tensors that
                              Python reaches, see :func:`resting_bytes` (known from the start on)
    ``start_reserved_bytes``  held by the caching allocator then, None on CPU; ``end_reserved_bytes`` likewise
    ``start_resident_bytes``  resident set of this process then; ``end_resident_bytes`` likewise

    ``collect_garbage``: collect cycles before the start, so that older garbage does not end inside (about half
    of what starting costs). Without it, ``start_bytes`` includes such garbage, and its end counts.

    On an accelerator the allocator's peak counter is reset (it can only be asked that way); meters may nest
    there. On CPU a process has one profiler: starting inside another meter or a ``torch.profiler`` raises
    UsageError; ask ``Meter.busy(device)`` beforehand.
    """

    peak_bytes: int
    end_bytes: int
    segments: tuple[Segment, ...] = ()
    start_bytes: int
    start_reserved_bytes: int | None = None
    end_reserved_bytes: int | None = None
    start_resident_bytes: int
    end_resident_bytes: int
    running = False
    _on_cpu: weakref.ref[Meter] | None = None  # the one that runs; a forgotten one must be able to end

    def __init__(self, device: torch.device | str | None = None, *, collect_garbage: bool = True) -> None:
        self.device = torch.device(device if device is not None else "cpu")
        self.when_stopped: list[Callable[[], None]] = []  # called once, when the numbers are there
        self._collect_garbage = collect_garbage
        self._counter: _CpuCounter | _AcceleratorCounter
        if self.device.type == "cpu":
            self._counter = _CpuCounter()
        else:
            self._counter = _AcceleratorCounter(self.device)

    @staticmethod
    def busy(device: torch.device | str | None = None) -> bool:
        """Whether ``start()`` would raise now: on CPU another meter or a profiler is on (or warming up)."""
        return torch.device(device if device is not None else "cpu").type == "cpu" and profiler_is_busy()

    @staticmethod
    def current() -> Meter | None:
        """The CPU meter that runs now, if any: others may place marks in it."""
        return None if Meter._on_cpu is None else Meter._on_cpu()

    def start(self) -> None:
        """Begins to count. Raises UsageError where :meth:`busy`, or where this meter runs already."""
        if self.running:
            raise UsageError("this Meter is already running: stop() it first, or use a second Meter")
        if self._collect_garbage:
            gc.collect()
        self.segments = ()
        self.start_resident_bytes = resident_bytes()
        self.start_bytes = self._counter.start()
        self.start_reserved_bytes = self._counter.reserved_bytes()
        self.running = True
        if self.device.type == "cpu":
            Meter._on_cpu = weakref.ref(self)

    def mark(self) -> int:
        """Begins a new segment here; returns its number (0, 1, 2, ...), or -1 where the meter does not run.

        From any thread. A mark in a thread that the CPU meter does not hear falls on the next mark that it
        hears (or on the end), and its segment is empty.
        """
        return self._counter.mark() if self.running else -1

    def stop(self) -> None:
        """Ends the counting and sets the numbers; does nothing on a meter that does not run.

        Raises UsageError in one case: the CPU session was lost, because a profiler was started meanwhile or
        because another thread calls. There are no numbers then; the meter has ended all the same.
        """
        if not self.running:
            return
        self.running = False
        if Meter.current() is self:
            Meter._on_cpu = None
        timeline = self._counter.stop()
        self.end_reserved_bytes = self._counter.reserved_bytes()
        self.end_resident_bytes = resident_bytes()
        if timeline is None:
            raise UsageError(
                "the Meter lost its count: a torch.profiler was started while it ran, or stop() came from "
                "another thread than start(); measure again without"
            )
        self.peak_bytes, self.end_bytes, self.segments = timeline
        waiting, self.when_stopped = self.when_stopped, []
        for call in waiting:
            call()

    def __enter__(self) -> Meter:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.stop()
        except UsageError:
            if error is None:  # else the caller's own error is the one to see
                raise

    def __del__(self) -> None:
        # A forgotten meter would leave the process's only profiler session running.
        if self.running and not sys.is_finalizing():
            self._counter.stop()


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


def resting_bytes(device: torch.device | str | None = None, *, collect_garbage: bool = True) -> int:
    """Bytes in use on ``device`` now, as the meter counts them: its ``start_bytes``, without starting it.

    Accelerators: what the caching allocator has given out. CPU: the storages of all tensors that Python reaches
    (and of their gradients), each once, if the CPU allocator made them: not memory of NumPy or of a mapped file.
    """
    place = torch.device(device if device is not None else "cpu")
    if collect_garbage:
        gc.collect()
    if place.type == "cpu":
        return sum(storage.nbytes() for storage in _cpu_storages())
    return int(torch.get_device_module(place).memory_allocated(place))


def resident_bytes() -> int:
    """The resident set of this process now, bytes."""
    return int(psutil.Process().memory_info().rss)


def walk_events(events: Iterable[tuple[int, int]], before: dict[int, int], markers: Sequence[Marker]) -> Timeline:
    """Adds up allocator events in order of time.

    ``events``: (address, bytes), bytes negative for a free.
    ``before``: address to bytes of the blocks alive at the start.
    ``markers``: their places in ``events`` are where blocks of their address and bytes appear, in this order.
    """
    alive: dict[int, int] = {}
    unfreed_before = dict(before)
    course = _Course()
    waiting: defaultdict[tuple[int, int], deque[Marker]] = defaultdict(deque)
    for marker in markers:
        waiting[marker.address, marker.n_bytes].append(marker)
    for address, size in events:
        if size < 0:
            # The reporter's own size is stale where the block was made out of its hearing: ours decides.
            known = alive if address in alive else unfreed_before
            course.change(-known.pop(address, 0))
        elif queue := waiting.get((address, size)):
            marker = queue.popleft()
            alive[address] = 0
            if marker.mark is not None:
                course.mark(marker.mark)
            elif marker.died is not None:
                course.change(-unfreed_before.pop(marker.died, 0))
        else:
            alive[address] = size
            course.change(size)
    for marker in itertools.chain.from_iterable(waiting.values()):  # unheard: placed at the end
        if marker.died is not None:
            course.change(-unfreed_before.pop(marker.died, 0))
    n_marks = sum(marker.mark is not None for marker in markers)
    return Timeline(course.peak_bytes, course.bytes, course.segments(n_marks))


# ----------------------------------------------------------------------------------------------------
# Machinery
# ----------------------------------------------------------------------------------------------------


class _Course:
    """Bytes above the start as they go up and down: the highest, and the highest since each mark."""

    def __init__(self) -> None:
        self.bytes = self.peak_bytes = 0
        self._marked: dict[int, Segment] = {}
        self._open, self._level_bytes, self._segment_peak_bytes = -1, 0, 0

    def change(self, n_bytes: int) -> None:
        self.bytes += n_bytes
        self.reach(self.bytes)

    def reach(self, n_bytes: int) -> None:
        """Notes bytes that were in use at some moment since the last mark."""
        if n_bytes > self._segment_peak_bytes:
            self._segment_peak_bytes = n_bytes
            self.peak_bytes = max(self.peak_bytes, n_bytes)

    def mark(self, number: int) -> None:
        self._close()
        self._open, self._level_bytes, self._segment_peak_bytes = number, self.bytes, self.bytes

    def segments(self, n_marks: int) -> tuple[Segment, ...]:
        """Those of marks 0 to ``n_marks - 1``; a mark that was not heard takes the place of the next one heard."""
        self._close()
        found: list[Segment] = []
        following = self.bytes
        for number in reversed(range(n_marks)):
            segment = self._marked.get(number, Segment(following, following))
            following = segment.level_bytes
            found.append(segment)
        return tuple(reversed(found))

    def _close(self) -> None:
        self._marked[self._open] = Segment(self._level_bytes, self._segment_peak_bytes)


class _CpuCounter:
    """Listens to the CPU allocator of this thread through a profiler session of its own."""

    def start(self) -> int:
        self._markers: list[Marker] = []
        self._numbers = itertools.count()
        self._before, self._watch = self._watch_storages()
        try:
            self._session = AllocatorEvents()
        except UsageError:
            self._watch.clear()
            raise
        return sum(self._before.values())

    def mark(self) -> int:
        number = next(self._numbers)
        self._place_marker(mark=number)
        return number

    def stop(self) -> Timeline | None:
        events = self._session.end()
        self._watch.clear()
        return None if events is None else walk_events(events, self._before, self._markers)

    def allocated_bytes(self) -> int | None:
        return None

    def reserved_bytes(self) -> int | None:
        return None

    def _watch_storages(self) -> tuple[dict[int, int], list[weakref.ref[Any]]]:
        """Every CPU block that a Python tensor reaches now: its address and bytes, and a reference that
        tells its end."""
        before: dict[int, int] = {}
        watch: list[weakref.ref[Any]] = []
        for storage in _cpu_storages():
            address = storage.data_ptr()
            before[address] = storage.nbytes()
            watch.append(weakref.ref(storage, self._on_end(address)))
        return before, watch

    def _on_end(self, address: int) -> Callable[[object], None]:
        return lambda _: self._place_marker(died=address)

    def _place_marker(self, *, died: int | None = None, mark: int | None = None) -> None:
        # Odd sizes in turn: a block of the program at the same address is not mistaken for the marker.
        n_bytes = 4097 + 2 * (len(self._markers) % 256)
        # A raw storage, not a tensor: no dispatcher, so that nobody's mode or recorder sees an operator here.
        block = _UntypedStorage(n_bytes, device="cpu")
        self._markers.append(Marker(block.data_ptr(), n_bytes, died, mark))


class _AcceleratorCounter:
    """Reads the caching allocator's statistics of one device."""

    # Open meters: a reset of the peak by one of them must not lose another's. The lock: autograd's threads
    # may place marks.
    _open: list[_AcceleratorCounter] = []
    _lock = threading.RLock()

    def __init__(self, device: torch.device) -> None:
        module = torch.get_device_module(device)
        if not hasattr(module, "reset_peak_memory_stats"):
            raise UsageError(
                f"cannot measure memory on {device}: torch.{device.type} has no peak statistics; "
                f"use a CUDA or XPU device, or cpu"
            )
        self._device, self._module = device, module

    def start(self) -> int:
        with self._lock:
            self._reset_peak()
            self._start_bytes = int(self._module.memory_allocated(self._device))
            self._course, self._n_marks = _Course(), 0
            self._open.append(self)
        return self._start_bytes

    def mark(self) -> int:
        with self._lock:
            self._reset_peak()
            self._course.mark(self._n_marks)
            self._n_marks += 1
            return self._n_marks - 1

    def stop(self) -> Timeline:
        with self._lock:
            self._note()
            self._open.remove(self)
            return Timeline(self._course.peak_bytes, self._course.bytes, self._course.segments(self._n_marks))

    def allocated_bytes(self) -> int | None:
        return int(self._module.memory_allocated(self._device))

    def reserved_bytes(self) -> int | None:
        return int(self._module.memory_reserved(self._device))

    def _reset_peak(self) -> None:
        for counter in self._open:
            counter._note()
        self._module.reset_peak_memory_stats(self._device)

    def _note(self) -> None:
        """Takes over the peak since the last reset, and the bytes now."""
        self._course.reach(int(self._module.max_memory_allocated(self._device)) - self._start_bytes)
        self._course.bytes = int(self._module.memory_allocated(self._device)) - self._start_bytes


def _cpu_storages() -> Iterator[torch.UntypedStorage]:
    """The storages of all reachable CPU tensors, each once."""
    seen: set[int] = set()
    with torch._C.DisableTorchFunctionSubclass():
        for tensor in _reachable_tensors():
            storage = _cpu_storage(tensor)
            if storage is not None and storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                yield storage


def _reachable_tensors() -> Iterator[torch.Tensor]:
    for tensor in _tensors_among(gc.get_objects()):
        yield tensor
        if (tensor.is_leaf or tensor.retains_grad) and tensor.grad is not None:
            yield tensor.grad


def _tensors_among(things: list[Any]) -> list[torch.Tensor]:
    # type() and not isinstance(): lazy proxies answer __class__ by importing things. A set of classes and C
    # loops only: a process has some 400,000 objects.
    classes, stack = {torch.Tensor}, [torch.Tensor]
    while stack:
        new = set(type.__subclasses__(stack.pop())) - classes
        classes |= new
        stack += new
    return list(itertools.compress(things, map(classes.__contains__, map(type, things))))


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
