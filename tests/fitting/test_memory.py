"""The meter: exact to the byte, whatever allocates, and silent about what it leaves behind."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from elbowroom.errors import UsageError
from elbowroom.fitting import memory
from elbowroom.fitting.memory import Death, Meter, memory_report, walk_events

MIB = 1 << 20


def block_of(n_bytes: int) -> torch.Tensor:
    return torch.empty(n_bytes, dtype=torch.uint8)


def test_peak_is_the_highest_moment_not_the_sum() -> None:
    with Meter() as meter:
        first = block_of(4 * MIB)
        del first
        second = block_of(MIB)
    assert (meter.peak_bytes, meter.end_bytes) == (4 * MIB, MIB)
    del second


def test_blocks_from_before_count_when_they_end() -> None:
    old, older = block_of(3 * MIB), block_of(2 * MIB)
    view = older[10:]
    with Meter() as meter:
        del old
        new = block_of(MIB)
        del older  # its view holds the block
    assert (meter.peak_bytes, meter.end_bytes) == (0, -2 * MIB)
    with Meter() as meter:
        del view, new
    assert (meter.peak_bytes, meter.end_bytes) == (0, -3 * MIB)


def test_memory_of_others_is_not_counted() -> None:
    borrowed = torch.from_numpy(np.zeros(MIB, dtype=np.uint8))
    with Meter() as meter:
        del borrowed
    assert (meter.peak_bytes, meter.end_bytes) == (0, 0)


def test_temporaries_inside_an_operator_are_seen() -> None:
    x = torch.randn(256 * 1024)  # 1 MiB
    with Meter() as meter:
        result = torch.kthvalue(x, 5)
    # It works on a copy of the values and on their int64 indices, which nobody is given; one float and one
    # index stay.
    assert (meter.peak_bytes, meter.end_bytes) == (3 * MIB + 12, 12)
    del result


def test_backward_is_seen() -> None:
    w = torch.ones(256, 256, requires_grad=True)
    with Meter() as meter:
        (w * w).sum().backward()
    # w * w and its sum; then the gradient: two products added into the one that stays.
    assert meter.end_bytes == 256 * 1024
    assert meter.peak_bytes == 2 * 256 * 1024 + 4 + 4


def test_backward_in_another_autograd_thread_is_seen() -> None:
    """Re-entrant backward beyond 60 levels moves to a thread of autograd's pool."""
    threads = set()

    class Big(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            threads.add(threading.get_ident())
            block_of(5 * MIB)
            return gradient

    class Reenter(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, depth: int) -> torch.Tensor:
            ctx.depth = depth
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
            with torch.enable_grad():
                leaf = torch.ones(1, requires_grad=True)
                inner = Reenter.apply(leaf, ctx.depth - 1) if ctx.depth else Big.apply(leaf)
                inner.backward()
            return gradient, None

    x = torch.ones(1, requires_grad=True)
    with Meter() as meter:
        Reenter.apply(x, 70).backward()
    assert 5 * MIB <= meter.peak_bytes < 6 * MIB
    assert threads != {threading.get_ident()}


def training_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(32, 64)).square().mean().backward()
    optimizer.step()


def test_a_training_step_is_the_same_integer_every_time() -> None:
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
    optimizer = torch.optim.AdamW(model.parameters())
    peaks = []
    for _ in range(4):
        with Meter() as meter:
            training_step(model, optimizer)
        peaks.append((meter.peak_bytes, meter.end_bytes))
    n_parameter_bytes = sum(4 * parameter.numel() for parameter in model.parameters())
    # First: gradients, two moments and a step counter of each parameter stay; later nothing does.
    assert peaks[0][1] == 3 * n_parameter_bytes + 4 * len(list(model.parameters()))
    assert peaks[1:] == [peaks[1]] * 3
    assert peaks[1][1] == 0


def test_measuring_changes_no_random_stream_and_no_result() -> None:
    def run() -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(0)
        x = torch.randn(64, 64, requires_grad=True)
        torch.dropout(x @ x, 0.5, True).sum().backward()
        assert x.grad is not None
        return x.grad, torch.get_rng_state()

    plain = run()
    with Meter():
        measured = run()
    assert all(torch.equal(a, b) for a, b in zip(plain, measured, strict=True))


def test_an_error_inside_passes_through_and_ends_the_session() -> None:
    meter = Meter()

    def fail() -> None:
        with meter:
            block_of(MIB)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert meter.peak_bytes == MIB
    with Meter() as meter:  # the profiler is free again
        pass
    assert (meter.peak_bytes, meter.end_bytes) == (0, 0)


def test_a_meter_in_a_meter_says_what_to_do() -> None:
    with Meter() as outer, pytest.raises(UsageError, match="already running on this thread: end that one"):
        Meter().__enter__()
    assert outer.end_bytes == 0


def test_resident_set_stands_beside() -> None:
    with Meter() as meter:
        held = torch.ones(64 * MIB, dtype=torch.uint8)
    assert meter.end_resident_bytes - meter.start_resident_bytes > 48 * MIB
    assert (meter.start_bytes, meter.start_reserved_bytes, meter.end_reserved_bytes) == (None, None, None)
    del held


def test_nothing_is_left_behind_and_stderr_stays_clean() -> None:
    program = (
        "import os, torch\n"
        "from elbowroom.fitting.memory import Meter\n"
        "for _ in range(2):\n"
        "    with Meter() as meter: x = torch.ones(1024)\n"
        "print(meter.peak_bytes, 'KINETO_LOG_LEVEL' in os.environ, torch.autograd._profiler_enabled())\n"
    )
    environment = {key: value for key, value in os.environ.items() if key != "KINETO_LOG_LEVEL"}
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert result.stdout.split() == ["4096", "False", "False"]
    assert result.stderr == ""


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 1000)), max_size=60),
    st.dictionaries(st.integers(0, 5), st.integers(1, 1000)),
)
def test_walk_adds_up_as_a_ledger_does(moves: list[tuple[int, int]], before: dict[int, int]) -> None:
    """Toggle slots: allocate where empty, free where full; frees of blocks from before come as markers."""
    ledger, events, deaths = dict(before), [], []
    start = highest = sum(before.values())
    old = set(before)
    for number, (slot, size) in enumerate(moves):
        address = 1000 + slot
        if slot in ledger and slot in old:
            marker = 5000 + number
            events += [(marker, memory._MARKER_BYTES), (marker, -memory._MARKER_BYTES)]
            deaths.append(Death(marker, address))
            old.discard(slot)
            del ledger[slot]
        elif slot in ledger:
            events.append((address, -ledger.pop(slot)))
        else:
            ledger[slot] = size
            events.append((address, size))
        highest = max(highest, sum(ledger.values()))
    timeline = walk_events(events, {1000 + slot: size for slot, size in before.items()}, deaths)
    assert timeline == (highest - start, sum(ledger.values()) - start)


def test_walk_trusts_its_own_sizes_over_stale_ones() -> None:
    # The reporter remembers 8 bytes for address 1 from an earlier session; the block there now has 100.
    assert walk_events([(1, -8), (2, 50)], {1: 100}, []) == (0, -50)
    # A free of a block nobody knew changes nothing.
    assert walk_events([(1, -8), (2, 50)], {}, []) == (50, 50)


class FakeAllocator:
    """What torch.cuda offers, on numbers of our own."""

    def __init__(self) -> None:
        self.allocated = self.peak = 1000

    def change(self, n_bytes: int) -> None:
        self.allocated += n_bytes
        self.peak = max(self.peak, self.allocated)

    def memory_allocated(self, device: torch.device) -> int:
        return self.allocated

    def memory_reserved(self, device: torch.device) -> int:
        return 4096

    def max_memory_allocated(self, device: torch.device) -> int:
        return self.peak

    def reset_peak_memory_stats(self, device: torch.device) -> None:
        self.peak = self.allocated


def test_accelerator_counts_from_its_start_and_nests(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = FakeAllocator()
    monkeypatch.setattr(torch, "get_device_module", lambda device: allocator)
    with Meter("cuda:0") as outer:
        allocator.change(700)
        allocator.change(-600)
        with Meter("cuda:0") as inner:
            allocator.change(50)
        allocator.change(-250)
    assert (inner.peak_bytes, inner.end_bytes, inner.start_bytes) == (50, 50, 1100)
    assert (outer.peak_bytes, outer.end_bytes, outer.start_bytes) == (700, -100, 1000)
    assert (outer.start_reserved_bytes, outer.end_reserved_bytes) == (4096, 4096)


def test_accelerator_report_is_text(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = FakeAllocator()
    monkeypatch.setattr(torch, "get_device_module", lambda device: allocator)
    out = io.StringIO()
    with memory_report("cuda:0", file=out):
        allocator.change(2048)
        allocator.change(-1024)
    assert out.getvalue() == (
        "memory on cuda:0, now: allocated 1000 B, reserved 4.0 KiB\n"
        "memory on cuda:0, after: allocated 2.0 KiB, reserved 4.0 KiB\n"
        "memory on cuda:0, between: peak +2.0 KiB, left 1.0 KiB\n"
    )


def test_cpu_report_gives_resident_set_and_what_the_meter_saw(capsys: pytest.CaptureFixture[str]) -> None:
    memory_report()
    assert capsys.readouterr().out.startswith("memory on cpu, now: resident set ")
    with memory_report() as report:
        kept = block_of(MIB)
        block_of(2 * MIB)
    now, after, between = capsys.readouterr().out.splitlines()
    assert now.startswith("memory on cpu, now: resident set ")
    assert after.startswith("memory on cpu, after: resident set ")
    assert between == "memory on cpu, between: peak +3.0 MiB, left 1.0 MiB"
    assert report.meter.peak_bytes == 3 * MIB
    del kept


def test_a_device_without_statistics_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace())
    with pytest.raises(UsageError, match=r"cannot measure memory on mps: torch\.mps has no peak statistics"):
        Meter("mps")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_is_exact() -> None:
    with Meter("cuda") as meter:
        first = torch.empty(4 * MIB, dtype=torch.uint8, device="cuda")
        del first
        second = torch.empty(MIB, dtype=torch.uint8, device="cuda")
    assert (meter.peak_bytes, meter.end_bytes) == (4 * MIB, MIB)
    del second
