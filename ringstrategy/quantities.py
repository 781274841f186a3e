"""Times, bytes and counts, as people read them."""

from __future__ import annotations

__all__ = ["format_bytes", "format_count", "format_time"]


def format_time(seconds: float) -> str:
    """Write a time with three significant digits: ``"38.2 µs"``, ``"1.07 ms"``, ``"2.00 s"``."""
    for factor, unit in ((1e6, "µs"), (1e3, "ms")):
        if seconds * factor < 999.5:
            return f"{_three_digits(seconds * factor)} {unit}"
    return f"{seconds:.2f} s"


def format_bytes(count: float) -> str:
    """Write a number of bytes with three significant digits in binary units: ``"512 B"``, ``"1.50 KiB"``."""
    return f"{count:.0f} B" if count < 999.5 else _scaled(count, 1024, ("KiB", "MiB", "GiB", "TiB"))


def format_count(count: float) -> str:
    """Write a number with three significant digits: ``"650"``, ``"25.6 K"``, ``"11.7 M"``."""
    return f"{count:.0f}" if count < 999.5 else _scaled(count, 1000, ("K", "M", "G", "T"))


def _scaled(value: float, step: int, units: tuple[str, ...]) -> str:
    for unit in units:
        value /= step
        if value < 999.5 or unit == units[-1]:
            break
    return f"{_three_digits(value)} {unit}"


def _three_digits(value: float) -> str:
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f}"
