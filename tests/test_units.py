"""Numbers for people, at their edges."""

from __future__ import annotations

import pytest

from elbowroom.errors import UsageError
from elbowroom.units import format_bytes, format_seconds, parse_bytes


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (1024**2 - 1, "1.0 MiB"),
        (-3 * 1024**2, "-3.0 MiB"),
        (20 * 1024**3, "20.0 GiB"),
        (5000 * 1024**4, "5000.0 TiB"),
    ],
)
def test_bytes(n_bytes: int, text: str) -> None:
    assert format_bytes(n_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (2.5e-6, "2.5 µs"),
        (0.00099999, "1.0 ms"),
        (0.00123, "1.2 ms"),
        (0.99999, "1.0 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min 0 s"),
        (75.2, "1 min 15 s"),
        (3599.7, "1 h 0 min"),
        (7500, "2 h 5 min"),
    ],
)
def test_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("amount", "n_bytes"),
    [
        ("20GiB", 20 * 1024**3),
        ("6 GB", 6 * 10**9),
        ("800MiB", 800 * 1024**2),
        (" 1.5gib ", 3 * 1024**3 // 2),
        ("0.3 KiB", 307),  # 307.2
        ("2TB", 2 * 10**12),
        ("1kb", 1000),
        ("17", 17),
        ("17 B", 17),
        (10**12, 10**12),
        (0, 0),
        # Beyond what a float holds.
        ("9007199254740993", 9007199254740993),
        ("8589934592.000000001 MiB", 8589934592 * 1024**2),
    ],
)
def test_bytes_parsed(amount: str | int, n_bytes: int) -> None:
    assert parse_bytes(amount) == n_bytes


@pytest.mark.parametrize(
    "amount",
    ["", "GiB", "-1GiB", "1,5GiB", "20G", "20 GiBs", "nan", "inf", "1e9", "85%", "٣GiB", -1, True, 1.5, None],
)
def test_no_number_of_bytes(amount: object) -> None:
    with pytest.raises(UsageError, match="is no number of bytes: write a whole number, or a number with a unit"):
        parse_bytes(amount)  # type: ignore[arg-type]
