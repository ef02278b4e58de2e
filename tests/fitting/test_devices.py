"""Budgets in the words of the user, and what a device has."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elbowroom.errors import UsageError
from elbowroom.fitting import devices
from elbowroom.fitting.devices import available_bytes, memory_bytes, parse_budget

GIB = 1024**3


@pytest.fixture
def computer(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A CPU of 16 GiB, 10 of them free, 2 ours; no control group."""
    facts = SimpleNamespace(total=16 * GIB, available=10 * GIB, rss=2 * GIB)
    process = SimpleNamespace(memory_info=lambda: facts)
    monkeypatch.setattr(devices, "psutil", SimpleNamespace(virtual_memory=lambda: facts, Process=lambda: process))
    monkeypatch.setattr(devices, "_cgroup_limit_bytes", lambda membership, mount: None)
    return facts


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """80 GiB, of which others hold 10 and we reserved 20."""
    module = SimpleNamespace(
        mem_get_info=lambda device: (50 * GIB, 80 * GIB),
        memory_reserved=lambda device: 20 * GIB,
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    return module


@pytest.mark.parametrize(
    ("budget", "n_bytes"),
    [
        (6 * GIB, 6 * GIB),
        ("20 MiB", 20 * 1024**2),
        ("1234567", 1234567),
        ("6GB", 6 * 10**9),
        ("50%", 8 * GIB),
        ("100 %", 16 * GIB),
        (" 33.3% ", 5720896438),  # 5720896438.27
        ("16GiB", 16 * GIB),
        ("max", 10 * GIB),  # 10 free and 2 ours, less an eighth of 16
        ("MAX", 10 * GIB),
    ],
)
def test_budgets_in_all_words(computer: SimpleNamespace, budget: int | str, n_bytes: int) -> None:
    assert parse_budget(budget, "cpu") == n_bytes


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        ("120%", r"'120%': a share of a device is above 0% and at most 100% \(cpu has 16\.0 GiB\)"),
        ("0%", "above 0% and at most 100%"),
        ("-5%", "above 0% and at most 100%"),
        (0, "budget 0 is less than one byte: a training step needs more than nothing"),
        ("0.4 B", "less than one byte"),
        ("0.000000001%", "less than one byte"),
        (-1, "budget: -1 is no number of bytes: write .* or a share of the device such as '85%', or 'max'"),
        ("nan", "'nan' is no number of bytes"),
        ("nan%", "'nan%' is no number of bytes"),
        (float("nan"), "nan is no number of bytes"),
        (0.85, "0.85 is no number of bytes"),
        (None, "None is no number of bytes"),
    ],
)
def test_nonsense_is_named(computer: SimpleNamespace, budget: int | str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_budget(budget, "cpu")


@given(st.fractions(min_value=1, max_value=100).map(lambda share: f"{float(share):.4f}"))
def test_a_share_is_never_more_than_asked(share: str) -> None:
    n_bytes, total_bytes = parse_budget(f"{share}%", "cpu"), memory_bytes("cpu")
    assert 0 <= float(share) / 100 * total_bytes - n_bytes < 1.001


def test_max_without_room_says_who_is_to_blame(computer: SimpleNamespace) -> None:
    computer.available, computer.rss = GIB, GIB
    with pytest.raises(UsageError, match=r"this process can get 2\.0 GiB, and the margin alone is 2\.0 GiB"):
        parse_budget("max", "cpu")


def test_this_computer() -> None:
    total_bytes = memory_bytes("cpu")
    assert GIB // 2 < available_bytes("cpu") <= total_bytes
    assert parse_budget("max", "cpu") < total_bytes


def test_a_container_has_less_than_the_machine(computer: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_cgroup_limit_bytes", lambda membership, mount: 4 * GIB)
    assert (memory_bytes("cpu"), available_bytes("cpu")) == (4 * GIB, 4 * GIB)
    assert parse_budget("max", "cpu") == 3.5 * GIB
    monkeypatch.setattr(devices, "_cgroup_limit_bytes", lambda membership, mount: 64 * GIB)
    assert memory_bytes("cpu") == 16 * GIB


@pytest.mark.parametrize(
    ("lines", "files", "limit_bytes"),
    [
        ("0::/a/b\n", {"a/b/memory.max": "5000\n", "a/memory.max": "4000\n", "memory.max": "max"}, 4000),
        ("0::/a\n", {"a/memory.max": "max"}, None),
        ("0::/host/path\n", {"memory.max": "3000"}, 3000),  # inside a container
        ("0::/../..\n", {"memory.max": "2500"}, 2500),
        ("0::/a\n", {"unified/a/memory.max": "2000"}, 2000),
        ("5:cpu,memory:/a\n0::/\n", {"memory/a/memory.limit_in_bytes": "1000"}, 1000),
        ("5:memory:/a\n", {"memory/a/memory.limit_in_bytes": "9223372036854771712"}, None),
        ("3:cpuset:/a\n", {"a/memory.max": "5", "memory/a/memory.limit_in_bytes": "5"}, None),
        (None, {}, None),
    ],
)
def test_limits_of_control_groups(
    tmp_path: Path, lines: str | None, files: dict[str, str], limit_bytes: int | None
) -> None:
    membership, mount = tmp_path / "cgroup", tmp_path / "fs"
    if lines is not None:
        membership.write_text(lines)
    for name, text in files.items():
        (mount / name).parent.mkdir(parents=True, exist_ok=True)
        (mount / name).write_text(text)
    assert devices._cgroup_limit_bytes(membership, mount) == limit_bytes


def test_an_accelerator_has_what_others_leave(accelerator: SimpleNamespace) -> None:
    assert (memory_bytes("cuda:0"), available_bytes("cuda:0")) == (80 * GIB, 70 * GIB)
    assert parse_budget("max", "cuda:0") == 65 * GIB
    assert parse_budget("25%", "cuda:0") == 20 * GIB
    accelerator.get_per_process_memory_fraction = lambda device: 0.5
    assert available_bytes("cuda:0") == 40 * GIB


def test_a_device_that_cannot_tell_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace())
    for name in ("mps", "meta"):
        with pytest.raises(UsageError, match=f"how much memory {name} has, and torch cannot tell for {name}"):
            parse_budget("1GiB", name)


def test_more_than_the_device_has_is_a_promise_that_is_easily_kept(computer: SimpleNamespace) -> None:
    assert parse_budget("17GiB", "cpu") == 17 * 2**30
