"""Numbers for people."""

from __future__ import annotations

import pytest

from ringstrategy.quantities import format_bytes, format_count, format_time


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0.00 µs"), (38.24e-6, "38.2 µs"), (9.996e-6, "10.0 µs"), (99.96e-6, "100 µs"), (999.6e-6, "1.00 ms"),
     (0.4425, "442 ms"), (2, "2.00 s"), (75.5, "75.50 s")],
)  # fmt: skip
def test_a_time_has_three_digits(seconds: float, text: str) -> None:
    assert format_time(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (512, "512 B"), (1000, "0.98 KiB"), (1536, "1.50 KiB"), (999.6 * 1024, "0.98 MiB"),
     (25 * 2**20, "25.0 MiB"), (3 * 2**30, "3.00 GiB"), (2**52, "4096 TiB")],
)  # fmt: skip
def test_bytes_are_counted_in_binary_units(count: float, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0"), (650, "650"), (999, "999"), (25_557, "25.6 K"), (11_689_512, "11.7 M"), (1e9, "1.00 G")],
)
def test_a_count_has_three_digits(count: float, text: str) -> None:
    assert format_count(count) == text
