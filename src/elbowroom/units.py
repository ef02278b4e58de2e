"""Bytes and seconds for people. Strings are parsed once, at the edge; inside, bytes are integers."""

from __future__ import annotations

import re
from fractions import Fraction

from elbowroom.errors import UsageError

_STEPS = ("B", "KiB", "MiB", "GiB", "TiB")
_AMOUNT = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)", re.IGNORECASE | re.ASCII)
# Units in lower case: binary ones by 1024, decimal ones by 1000 (as the standards and the shops have it).
_UNITS = {"": 1, "b": 1}
_UNITS |= {f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", start=1)}
_UNITS |= {f"{letter}b": 1000**power for power, letter in enumerate("kmgt", start=1)}


def parse_bytes(amount: str | int) -> int:
    """``'1.5 GiB'`` to ``1610612736``, ``'6GB'`` to ``6000000000`` (decimal), ``'4096'`` or ``4096`` to ``4096``.

    Upper and lower case are the same; parts of a byte are dropped. Raises UsageError for anything else.
    """
    if isinstance(amount, int) and not isinstance(amount, bool) and amount >= 0:
        return amount
    if isinstance(amount, str):
        found = _AMOUNT.fullmatch(amount.strip())
        if found and found[2].lower() in _UNITS:
            # Exact: a float would lose bytes of large numbers.
            return int(Fraction(found[1]) * _UNITS[found[2].lower()])
    raise UsageError(
        f"{amount!r} is no number of bytes: write a whole number, or a number with a unit: KiB, MiB, GiB, TiB "
        f"(by 1024), kB, MB, GB, TB (by 1000) or B, such as '800MiB' or '1.5 GiB'"
    )


def format_bytes(n_bytes: int) -> str:
    """``1536`` to ``'1.5 KiB'``; exact below one KiB. Negative numbers keep their sign."""
    size = float(abs(n_bytes))
    step = 0
    # Rounded before it is compared: one byte less than a MiB is 1.0 MiB, not 1024.0 KiB.
    while round(size, 1) >= 1024 and step < len(_STEPS) - 1:
        size /= 1024
        step += 1
    sign = "-" if n_bytes < 0 else ""
    return f"{sign}{size:.0f} B" if step == 0 else f"{sign}{size:.1f} {_STEPS[step]}"


def format_seconds(seconds: float) -> str:
    """``0.00123`` to ``'1.2 ms'``, ``75.2`` to ``'1 min 15 s'``, ``7500`` to ``'2 h 5 min'``."""
    if seconds == 0:
        return "0 s"
    if round(seconds * 1e6, 1) < 1000:
        return f"{seconds * 1e6:.1f} µs"
    if round(seconds * 1e3, 1) < 1000:
        return f"{seconds * 1e3:.1f} ms"
    if round(seconds, 1) < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"
