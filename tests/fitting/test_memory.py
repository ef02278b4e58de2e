"""The meter: exact to the byte, whatever allocates, and silent about what it leaves behind."""

from __future__ import annotations

import gc
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
from torch.profiler import ProfilerActivity

from elbowroom.errors import UsageError
from elbowroom.fitting.memory import Marker, Meter, Segment, memory_report, resting_bytes, walk_events

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
    assert not Meter.busy()
    with Meter() as outer:
        assert Meter.busy("cpu")
        with pytest.raises(UsageError, match="already running in this process: end that one"):
            Meter().start()
        with pytest.raises(UsageError, match="already running: stop"):
            outer.start()
    assert (outer.end_bytes, Meter.busy()) == (0, False)


def test_a_meter_in_a_profiler_refuses_and_spoils_nothing() -> None:
    with torch.profiler.profile(activities=[ProfilerActivity.CPU]) as profile:
        assert Meter.busy()
        with pytest.raises(UsageError, match="a profiler"):
            Meter().start()
        torch.ones(3)
    assert len(profile.events()) > 0
    assert not Meter.busy()


def test_a_profiler_that_warms_up_is_seen_although_no_flag_tells() -> None:
    steps = torch.profiler.schedule(wait=1, warmup=1, active=1, repeat=1)
    found = []
    with torch.profiler.profile(activities=[ProfilerActivity.CPU], schedule=steps) as profile:
        for _ in range(4):
            found.append(Meter.busy())
            profile.step()
    assert found == [False, True, True, False]


def run_apart(program: str, *, torch_may_complain: bool = False) -> list[str]:
    """The lines that a program prints in a process of its own, where torch may crash without harm to others."""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    complains = "not found" in result.stderr and not torch_may_complain
    assert (result.returncode, complains) == (0, False), result.stderr
    return result.stdout.splitlines()


def test_a_profiler_started_meanwhile_gets_its_data_and_the_meter_says_it_lost() -> None:
    # Two sessions in two threads: torch loses a callback of its own, and says so.
    lines = run_apart(
        """
import threading, torch
from torch.profiler import ProfilerActivity, profile
from elbowroom.errors import UsageError
from elbowroom.fitting.memory import Meter
for how in ("inside", "across the end", "in another thread"):
    meter, profiler = Meter(), profile(activities=[ProfilerActivity.CPU])
    meter.start()
    def run():
        profiler.start(); torch.ones(3)
        if how != "across the end": profiler.stop()
    if how == "in another thread":
        thread = threading.Thread(target=run); thread.start(); thread.join()
    else:
        run()
    meter.mark()
    try: meter.stop()
    except UsageError as error: print(str(error)[:72])
    meter.stop()
    if how == "across the end": profiler.stop()
    print(len(profiler.events()), hasattr(meter, "peak_bytes"), meter.running)
""",
        torch_may_complain=True,
    )
    assert lines == ["the Meter lost its count: a torch.profiler was started while it ran, or ", "3 False False"] * 3


def test_a_session_that_nobody_ends_is_ended_with_its_thread_and_with_the_process() -> None:
    """torch itself crashes at the exit of a process whose profiler session is still on."""
    lines = run_apart("""
import threading, torch
from elbowroom.errors import UsageError
from elbowroom.fitting.memory import Meter
first, second = Meter(), Meter()
def elsewhere(function):
    thread = threading.Thread(target=function); thread.start(); thread.join()
def stop():
    try: second.stop()
    except UsageError as error: print("stop() came from another thread" in str(error))
elsewhere(first.start)
print(Meter.busy())
second.start()
elsewhere(stop)
model = torch.nn.Linear(3, 3)
model.cycle = [model, second]
torch.kept = model  # goes late, when torch is half gone
print(Meter.busy())
""")
    assert lines == ["False", "True", "True"]


def test_an_error_of_the_caller_is_not_hidden_by_a_lost_count(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = FakeAllocator()
    monkeypatch.setattr(torch, "get_device_module", lambda device: allocator)
    meter = Meter("cuda:0")
    counter = meter._counter
    stop = counter.stop
    monkeypatch.setattr(counter, "stop", lambda: stop() and None)
    with pytest.raises(ZeroDivisionError), meter:
        raise ZeroDivisionError
    with pytest.raises(UsageError, match="lost its count"), meter:
        pass


def test_start_and_stop_without_with() -> None:
    meter = Meter()
    meter.stop()  # not begun: nothing to do
    for n_bytes in (MIB, 2 * MIB):
        meter.start()
        assert meter.running
        block_of(n_bytes)
        meter.stop()
        meter.stop()
        assert (meter.peak_bytes, meter.running) == (n_bytes, False)


def test_a_forgotten_meter_ends_its_session() -> None:
    meter = Meter()
    meter.start()
    assert Meter.busy()
    del meter
    assert not Meter.busy()


def test_start_bytes_are_those_of_the_tensors_that_python_reaches() -> None:
    with Meter() as meter:
        pass
    resting = meter.start_bytes
    assert resting == resting_bytes("cpu")
    held = block_of(5 * MIB)
    views = [held[10:], held[:7]]
    parameter = nn.Parameter(torch.zeros(1024))
    parameter.square().sum().backward()  # a gradient, 4 KiB like the parameter; nobody asked for it yet
    product = parameter * 1
    product.retain_grad()
    product.sum().backward()
    borrowed = torch.from_numpy(np.zeros(MIB, dtype=np.uint8))
    with Meter() as meter:
        # The gradient of before and three more of 4 KiB; the product's own gradient was retained.
        new_bytes = meter.start_bytes - resting
    assert new_bytes == 5 * MIB + 4 * 4096
    del views, borrowed


def test_garbage_goes_before_the_start_or_is_left_to_the_caller() -> None:
    resting = resting_bytes()
    cycle: list[Any] = [block_of(MIB)]
    cycle.append(cycle)
    gc.disable()
    try:
        del cycle
        assert resting_bytes(collect_garbage=False) == resting + MIB
        with Meter(collect_garbage=False) as meter:
            gc.collect()
        assert (meter.start_bytes, meter.end_bytes) == (resting + MIB, -MIB)
        cycle = [block_of(MIB)]
        cycle.append(cycle)
        del cycle
        with Meter() as meter:  # by default garbage is none of its matter
            gc.collect()
        assert (meter.start_bytes, meter.end_bytes) == (resting, 0)
    finally:
        gc.enable()


def test_segments_from_mark_to_mark() -> None:
    old = block_of(8 * MIB)
    with Meter() as meter:
        block_of(9 * MIB)  # before the first mark: in no segment
        first = block_of(MIB)
        numbers = [meter.mark()]
        block_of(2 * MIB)
        numbers += [meter.mark(), meter.mark()]
        del old
        numbers += [meter.mark()]
        second = block_of(3 * MIB)
    assert numbers == [0, 1, 2, 3]
    assert meter.segments == (
        Segment(MIB, 3 * MIB),
        Segment(MIB, MIB),
        Segment(MIB, MIB),
        Segment(-7 * MIB, -4 * MIB),
    )
    assert (meter.peak_bytes, meter.end_bytes) == (9 * MIB, -4 * MIB)
    assert meter.mark() == -1  # over
    del first, second


def test_marks_in_backward_and_in_threads_that_are_not_heard() -> None:
    weight = torch.ones(MIB // 4, requires_grad=True)
    product = weight * 2
    product.register_hook(lambda _: meter.mark() and None)
    with Meter() as meter:
        meter.mark()
        thread = threading.Thread(target=meter.mark)
        thread.start()
        thread.join()
        kept = block_of(5 * MIB)
        product.sum().backward()
    # The one of the silent thread falls on that of backward: 5 MiB, the loss, and the gradients of it and of
    # the product (which is expanded: four bytes). From there on a full product, the weight's gradient.
    level = 5 * MIB + 4 + 4
    assert meter.segments[0].level_bytes == 0
    assert meter.segments[1] == Segment(level, level)
    assert meter.segments[2].level_bytes == level
    assert level + MIB <= meter.segments[2].peak_bytes < level + MIB + 64
    assert len(meter.segments) == 3
    del kept


def test_a_death_in_a_thread_that_is_not_heard_counts_at_the_end() -> None:
    blocks = [block_of(MIB)]
    with Meter() as meter:
        thread = threading.Thread(target=blocks.clear)
        thread.start()
        thread.join()
        new = block_of(4 * MIB)
    assert (meter.peak_bytes, meter.end_bytes) == (4 * MIB, 3 * MIB)
    del new


def test_resident_set_stands_beside() -> None:
    with Meter() as meter:
        held = torch.ones(64 * MIB, dtype=torch.uint8)
    assert meter.end_resident_bytes - meter.start_resident_bytes > 48 * MIB
    assert (meter.start_reserved_bytes, meter.end_reserved_bytes) == (None, None)
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
    ledger, events = dict(before), []
    markers: list[Marker] = []
    start = highest = sum(before.values())
    old = set(before)
    segments: list[list[int]] = []
    for number, (slot, size) in enumerate(moves):
        address = 1000 + slot
        if size % 7 == 0:  # marks share one address and size: told apart by their order
            events += [(5000, 4097), (5000, -4097)]
            markers.append(Marker(5000, 4097, mark=len(segments)))
            segments.append([sum(ledger.values()), sum(ledger.values())])
        if slot in ledger and slot in old:
            marker = 6000 + number
            events += [(marker, 4099), (marker, -4099)]
            markers.append(Marker(marker, 4099, died=address))
            old.discard(slot)
            del ledger[slot]
        elif slot in ledger:
            events.append((address, -ledger.pop(slot)))
        else:
            ledger[slot] = size
            events.append((address, size))
        highest = max(highest, sum(ledger.values()))
        for segment in segments[-1:]:
            segment[1] = max(segment[1], sum(ledger.values()))
    timeline = walk_events(events, {1000 + slot: size for slot, size in before.items()}, markers)
    assert (timeline.peak_bytes, timeline.end_bytes) == (highest - start, sum(ledger.values()) - start)
    assert timeline.segments == tuple((level - start, peak - start) for level, peak in segments)


def test_walk_trusts_its_own_sizes_over_stale_ones() -> None:
    # The reporter remembers 8 bytes for address 1 from an earlier session; the block there now has 100.
    assert walk_events([(1, -8), (2, 50)], {1: 100}, []) == (0, -50, ())
    # A free of a block nobody knew changes nothing.
    assert walk_events([(1, -8), (2, 50)], {}, []) == (50, 50, ())


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


def test_accelerator_marks_reset_and_lose_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = FakeAllocator()
    monkeypatch.setattr(torch, "get_device_module", lambda device: allocator)

    def bump(n_bytes: int) -> None:
        allocator.change(n_bytes)
        allocator.change(-n_bytes)

    with Meter("cuda:0") as outer:
        bump(900)
        assert outer.mark() == 0
        bump(300)
        allocator.change(10)
        with Meter("cuda:0") as inner:
            bump(500)
            assert inner.mark() == 0  # resets: the outer one must have seen the 500
            bump(20)
            assert outer.mark() == 1
            bump(40)
        bump(60)
    assert outer.segments == ((0, 510), (10, 70))
    assert inner.segments == ((0, 40),)
    assert (outer.peak_bytes, inner.peak_bytes) == (900, 500)
    assert resting_bytes("cuda:0") == 1010
    assert not Meter.busy("cuda:0")


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
