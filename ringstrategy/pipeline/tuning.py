"""How many micro-batches are fastest: tried on a real batch, before any weight moves."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from lightning.fabric.utilities import rank_zero_info
from torch import Tensor

__all__ = ["candidates", "fastest"]

# More micro-batches fill the pipeline better, but each costs the same start-up; past these it never paid.
_COUNTS = (1, 2, 4, 8, 16, 32)
_TRIALS = 2  # the first of which warms up


def candidates(rows: int | None, least: int = 1) -> tuple[int, ...]:
    """Numbers of micro-batches worth a trial, for a batch of ``rows`` of which each micro-batch has ``least``."""
    return tuple(count for count in _COUNTS if count <= max(1, (rows or 1) // least))


def fastest(
    counts: Sequence[int], trial: Callable[[int], None], slowest: Callable[[Tensor], Tensor] = lambda times: times
) -> int:
    """Try all counts and choose. Collective: all stages try the same ones in the same order.

    Args:
        counts: numbers of micro-batches.
        trial: runs forwards and backwards with so many of them, and leaves nothing behind.
        slowest: the largest of each element over all ranks, so that all choose alike.

    Returns:
        The count whose slowest rank took least; of equal ones the smallest.
    """
    seconds = []
    for count in counts:
        runs = []
        for _ in range(_TRIALS):
            begun = time.perf_counter()
            trial(count)
            runs.append(time.perf_counter() - begun)
        seconds.append(runs[-1])
    times = slowest(torch.tensor(seconds, dtype=torch.float64))
    chosen = counts[int(times.argmin())]
    tried = ", ".join(f"{count}: {1e3 * taken:.1f} ms" for count, taken in zip(counts, times.tolist(), strict=True))
    rank_zero_info(f"ringstrategy: chunks='auto' chose {chosen} micro-batches ({tried}).")
    return chosen
