"""Numbers for people, at their edges."""

from __future__ import annotations

import pytest

from elbowroom.units import format_bytes, format_seconds


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
