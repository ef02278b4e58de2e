"""The CPU allocator's events, heard through a session of torch's profiler.

A process has one profiler session. torch (2.13) crashes where two overlap in different threads, where a session
is ended from another thread, and at the exit of a process or thread that has not ended its own. The rules here:

1. A session refuses to start beside another one, be it on or warming up.
2. A profiler that starts during a session wins: the session is lost, and nothing is touched any more.
3. A session is ended by the thread that started it: when asked, when that thread ends, or when the process does.
"""

from __future__ import annotations

import atexit
import gc
import os
import threading
from typing import Any

import torch
from torch._C._profiler import ProfilerConfig, ProfilerState, RecordScope, _ExperimentalConfig
from torch.autograd import profiler as autograd_profiler
from torch.profiler import ProfilerAction, ProfilerActivity
from torch.profiler.profiler import PROFILER_STEP_NAME

from elbowroom.errors import UsageError

# Private to torch, and typed by stubs that lag behind it: used here only.
_C: Any = torch._C
_profiler: Any = autograd_profiler


class AllocatorEvents:
    """A running session: from its making to ``end()`` it hears what the CPU allocator does for this thread.

    Raises UsageError where :func:`profiler_is_busy`.
    """

    _starting = threading.Lock()

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._sign = _SessionRuns()
        self._open = False
        # Of the operators only user-made scopes are listened to: few, so nearly all events are of memory.
        config = ProfilerConfig(
            ProfilerState.KINETO, False, True, False, False, False, _ExperimentalConfig(), "elbowroom-meter"
        )
        activities = {ProfilerActivity.CPU}
        with self._starting, _QuietKineto():
            if profiler_is_busy():
                raise UsageError(
                    "Meter('cpu') listens to the allocator through torch's profiler, and a profiler (or another "
                    "Meter) is already running in this process: end that one first, or measure one after the other"
                )
            _C._autograd._prepare_profiler(config, activities)
            _C._autograd._enable_profiler(config, activities, {RecordScope.USER_SCOPE})
            _profiler._is_profiler_enabled = self._sign
        self._open = True
        _of_this_thread.last_word = _LastWord(self)

    def end(self) -> list[tuple[int, int]] | None:
        """The events, (address, bytes) in order of time, bytes negative for a free; None if the session is lost
        or belongs to another thread (it then runs on until that thread ends it)."""
        if not self._open or threading.get_ident() != self._thread:
            return None
        self._open = False
        _of_this_thread.last_word = None
        if _profiler._is_profiler_enabled is not self._sign:
            return None
        _profiler._is_profiler_enabled = False
        if not _C._autograd._profiler_enabled():
            return None
        return _events_of(_C._autograd._disable_profiler())


def profiler_is_busy() -> bool:
    """Whether a profiler session of this process is on or warming up: ours or another's."""
    if _C._autograd._profiler_enabled() or _profiler._is_profiler_enabled is not False:
        return True
    # A scheduled torch.profiler in its warm-up shows in no flag, and our session would end it. Only where one
    # was started and not left (its step counter stands) all objects are searched.
    if PROFILER_STEP_NAME not in _profiler.KinetoStepTracker._step_dict:
        return False
    scheduled = (thing for thing in gc.get_objects() if type(thing) is torch.profiler.profile)
    return any(one.current_action is ProfilerAction.WARMUP for one in scheduled)


class _SessionRuns(int):
    """Stands in torch's process-wide flag "a profiler is enabled" (as false as before) while a session runs:
    whoever starts a profiler meanwhile overwrites it, and so the session knows that it is lost."""


class _LastWord:
    """Held by the thread alone, so that its end ends the session, whoever else still holds that."""

    def __init__(self, session: AllocatorEvents) -> None:
        self.session = session

    def __del__(self) -> None:
        self.session.end()


_of_this_thread = threading.local()


@atexit.register
def _end_at_exit() -> None:
    # The main thread drops what it holds only after torch is gone.
    last_word = getattr(_of_this_thread, "last_word", None)
    if last_word is not None:
        last_word.session.end()


def _events_of(result: Any) -> list[tuple[int, int]]:
    stack = list(reversed(result.experimental_event_tree()))
    events: list[tuple[int, int, int]] = []
    while stack:
        event = stack.pop()
        stack.extend(reversed(event.children))
        if event.tag.name == "Allocation":
            fields = event.typed[1]
            if fields.device.type == "cpu":
                events.append((event.start_time_ns, fields.ptr, fields.alloc_size))
    # Stable: events of one thread keep their order even where two share a nanosecond.
    events.sort(key=lambda event: event[0])
    return [(address, size) for _, address, size in events]


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
