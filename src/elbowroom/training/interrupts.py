"""Ctrl-C between steps: the handler only sets a flag, and the loop ends at the next step boundary."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any


class Interrupts:
    """``with Interrupts(say) as interrupts: ... if interrupts.requested: break``.

    The first Ctrl-C sets ``requested`` and calls ``say`` with one line of text; a second one raises
    KeyboardInterrupt at once. Outside the main thread, where Python allows no handlers, Ctrl-C is left as
    it is.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self.requested = False
        self._say = say
        self._former: Any = None

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            self._former = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._former is not None:
            signal.signal(signal.SIGINT, self._former)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        self._say("stopping after this step (Ctrl-C again: at once)")
