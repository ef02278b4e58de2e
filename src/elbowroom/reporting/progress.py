"""The progress of a run: a live bar on a terminal, plain lines elsewhere. Always on stderr."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from elbowroom.units import format_bytes, format_seconds


class RunProgress:
    """Shows step, loss, tokens per second, memory and remaining time of a run of ``n_steps`` steps."""

    def __init__(self, n_steps: int, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._n_steps = n_steps
        self._start_s = time.monotonic()
        self._bar = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[facts]}"),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("training", total=n_steps, facts="")

    def __enter__(self) -> RunProgress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def step_done(self, step: int) -> None:
        """``step`` optimizer steps are done."""
        self._bar.update(self._task, completed=step)

    def show(self, step: int, *, loss: float, tokens_per_s: float, memory_bytes: int) -> None:
        """The latest numbers; without a terminal, as a line of text."""
        facts = f"loss {loss:.3f}  {tokens_per_s:,.0f} tokens/s  {format_bytes(memory_bytes)}"
        self._bar.update(self._task, completed=step, facts=facts)
        if not self._console.is_terminal:
            eta_s = (time.monotonic() - self._start_s) / max(step, 1) * (self._n_steps - step)
            self.say(f"step {step}/{self._n_steps}  {facts}  ETA {format_seconds(eta_s)}")

    def say(self, text: str) -> None:
        """One line of text, above the bar."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)
