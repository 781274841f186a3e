"""Sizes in bytes, as people write them."""

from __future__ import annotations

import re

__all__ = ["format_size", "parse_size", "parse_sizes"]

_UNITS = {
    "": 1, "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9,
    "kib": 2**10, "mib": 2**20, "gib": 2**30,
}  # fmt: skip
_PATTERN = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)", re.ASCII | re.IGNORECASE)


def parse_size(text: str) -> int:
    """Read one size.

    Args:
        text: such as ``"64KiB"``, ``"25MiB"``, ``"1GiB"``, ``"1.5MB"`` or ``"4096"`` (bytes).

    Returns:
        The size in bytes.

    Raises:
        ValueError: the text is no size, or not a positive whole number of bytes.
    """
    match = _PATTERN.fullmatch(text.strip())
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise ValueError(f"{text!r} is not a size; write it as 64KiB, 25MiB, 1GiB, 10MB or a number of bytes")
    size = float(match[1]) * unit
    if size < 1 or not size.is_integer():
        raise ValueError(f"{text!r} is not a positive whole number of bytes")
    return int(size)


def parse_sizes(text: str) -> tuple[int, ...]:
    """Read a comma-separated list of sizes, see :func:`parse_size`."""
    return tuple(parse_size(part) for part in text.split(","))


def format_size(size: int) -> str:
    """Write a size so that :func:`parse_size` reads the same number back.

    Args:
        size: in bytes.

    Returns:
        The size in the largest binary unit that divides it, e.g. ``"25MiB"``; plain bytes otherwise.
    """
    for unit in ("GiB", "MiB", "KiB"):
        if size % _UNITS[unit.lower()] == 0:
            return f"{size // _UNITS[unit.lower()]}{unit}"
    return str(size)
