"""Bytes and seconds for people. Strings are parsed once, at the edge; inside, bytes are integers."""

from __future__ import annotations

_STEPS = ("B", "KiB", "MiB", "GiB", "TiB")


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
