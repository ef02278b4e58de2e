"""Progress: a live bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import io

from rich.console import Console

from elbowroom.reporting.progress import RunProgress


def test_without_a_terminal_it_is_plain_lines() -> None:
    console = Console(file=io.StringIO(), width=40)
    with RunProgress(20, console) as progress:
        progress.step_done(5)
        progress.show(10, loss=2.3456, tokens_per_s=12345.6, memory_bytes=3 << 20)
        progress.say("validation loss [red]2.0[/red] " + "x" * 50)
    first, second = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert first.startswith("step 10/20  loss 2.346  12,346 tokens/s  3.0 MiB  ETA ")
    assert second == "validation loss [red]2.0[/red] " + "x" * 50


def test_on_a_terminal_it_is_a_bar_that_goes_away() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    with RunProgress(20, console) as progress:
        progress.show(10, loss=2.3456, tokens_per_s=12345.6, memory_bytes=3 << 20)
        progress.step_done(11)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "loss 2.346  12,346 tokens/s  3.0 MiB" in text
    assert "11/20" in text
    assert "step 10/20" not in text


def test_progress_goes_to_stderr_unless_told_otherwise() -> None:
    assert RunProgress(1)._console.stderr
