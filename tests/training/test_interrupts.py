"""Ctrl-C: once sets a flag, twice stops, and Python's own handler is back afterwards."""

from __future__ import annotations

import signal
import threading

import pytest

from elbowroom.training.interrupts import Interrupts


def test_first_sets_a_flag_second_stops_and_the_handler_is_put_back() -> None:
    former, said = signal.getsignal(signal.SIGINT), []
    with Interrupts(said.append) as interrupts:
        assert not interrupts.requested
        signal.raise_signal(signal.SIGINT)
        assert interrupts.requested
        assert said == ["stopping after this step (Ctrl-C again: at once)"]
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is former


def test_outside_the_main_thread_nothing_is_touched() -> None:
    former, seen = signal.getsignal(signal.SIGINT), []

    def work() -> None:
        with Interrupts(print) as interrupts:
            seen.append(interrupts.requested)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [False]
    assert signal.getsignal(signal.SIGINT) is former
