"""What a training step takes, from the time of its all-reduces and of everything else."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["StepModel", "bucketed", "read_step"]

# The backward of a network takes about twice as long as its forward; nothing can be sent before.
_BACKWARD = 2 / 3


@dataclass(frozen=True)
class StepModel:
    """A training step, all-reduces apart.

    Attributes:
        compute_s: time of a step in which nothing is sent.
        hidden: share of the all-reduces' time that ran beside backward, where it was measured; at most 1.
        model: the name of what was trained.
        ranks: how many ranks computed beside each other.
        cores: of their host; 0 if it is not known.
    """

    compute_s: float
    hidden: float
    model: str
    ranks: int
    cores: int = 0

    def computing(self, here: int) -> float:
        """The time of a step in which nothing is sent, with so many ranks of one thread on a host."""
        if not self.cores:
            return self.compute_s
        return self.compute_s * max(1.0, here / self.cores) / max(1.0, self.ranks / self.cores)

    def seconds(self, here: int, all_reduce_s: float) -> float:
        """The time of a step whose all-reduces take ``all_reduce_s``; they cannot hide longer than backward takes."""
        compute_s = self.computing(here)
        return compute_s + max(all_reduce_s * (1 - self.hidden), all_reduce_s - _BACKWARD * compute_s)

    def efficiency(self, here: int, all_reduce_s: float) -> float:
        """Samples per second and rank, relative to what was measured without sending."""
        return self.compute_s / self.seconds(here, all_reduce_s)


def read_step(document: Any) -> StepModel:
    """Take a step out of what ``ringstrategy bench train-step --json`` wrote.

    What is computed is the row of ``none``; without it, the row of ``ring_ddp`` less what it waited.

    Raises:
        ValueError: neither is in it.
    """
    rows = document.get("rows") if isinstance(document, Mapping) else None
    by_strategy: dict[str, Mapping[str, Any]] = {}
    for row in rows if isinstance(rows, list) else []:
        if isinstance(row, Mapping) and isinstance(row.get("median_s"), (int, float)):
            by_strategy.setdefault(str(row.get("strategy", "")).partition("+")[0], row)
    ours, alone = by_strategy.get("ring_ddp"), by_strategy.get("none")
    hidden = 0.0
    exposed_s = None
    if ours is not None and ours.get("all_reduce_s") and ours.get("exposed_s") is not None:
        exposed_s = float(ours["exposed_s"])
        hidden = min(1.0, max(0.0, 1 - exposed_s / float(ours["all_reduce_s"])))
    row = alone or (ours if exposed_s is not None else None)
    if row is None:
        raise ValueError("no rows 'none' or 'ring_ddp' of `ringstrategy bench train-step --json FILE` are in it")
    compute_s = float(row["median_s"]) - (0.0 if row is alone else exposed_s or 0.0)
    environment = document.get("environment")
    cores = environment.get("cores") if isinstance(environment, Mapping) else None
    return StepModel(
        compute_s,
        hidden,
        str(row.get("model", "")),
        int(row.get("ranks", 1)),
        cores if isinstance(cores, int) and cores > 0 else 0,
    )


def bucketed(seconds: Callable[[float], float], nbytes: float, cap: float) -> float:
    """The time of all-reduces of gradients that travel in buckets.

    Args:
        seconds: of one all-reduce, by its size.
        nbytes: of all gradients.
        cap: most bytes of a bucket.
    """
    buckets = max(1, math.ceil(nbytes / cap))
    return buckets * seconds(nbytes / buckets)
