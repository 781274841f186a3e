"""Which layers make up which stage: a pure function of what they cost."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["check_balance", "partition"]

# Costs that differ by less are equal: sums of the same numbers in another order.
_TOLERANCE = 1e-12


def partition(costs: Sequence[float], stages: int, send: Sequence[float] | None = None) -> tuple[int, ...]:
    """Divide a chain of layers into stages so that the slowest stage is as fast as can be.

    With costs 4, 1, 2, 2, 3 and two stages, the cheapest cut is the one after the second layer or the third::

        | 4  1  2 | 2  3 |   7, 5
        | 4  1 | 2  2  3 |   5, 7

    Of several that are equally good, the one whose stages are most alike (the smallest sum of squares), and of those
    the one that cuts latest, so that layers without cost stay with the one before them. Dynamic programming over
    stages and layers, in O(stages x layers^2).

    Args:
        costs: what each layer costs, in any unit.
        stages: how many stages, each of at least one layer.
        send: what a cut after each layer costs the stages on both sides of it, in the same unit; the last layer's entry
            means nothing and may be absent.

    Returns:
        Number of layers by stage.

    Raises:
        ValueError: fewer layers than stages, no stage, or costs that are negative or not finite.
    """
    layers = len(costs)
    if not 1 <= stages <= layers:
        raise ValueError(f"{layers} layers cannot be divided into {stages} stages of at least one layer each")
    if send is not None and len(send) not in (layers - 1, layers):
        raise ValueError(f"there are {layers} layers, but {len(send)} costs of sending")
    borders = np.zeros(layers + 1)
    borders[1:-1] = list(send or [0.0] * layers)[: layers - 1]
    if not (np.isfinite(costs).all() and np.isfinite(borders).all() and min(*costs, *borders) >= 0):
        raise ValueError("costs must be finite and at least 0")
    sums = np.concatenate([[0.0], np.cumsum(costs)])
    # work[i, j]: a stage of the layers i, ..., j - 1, with what it receives and sends.
    work = sums[None, :] - sums[:, None] + borders[:, None] + borders[None, :]
    work[np.tril_indices(layers + 1)] = np.inf
    slowest = _chain(work, stages, np.maximum)[0]
    allowed = np.where(work <= slowest * (1 + _TOLERANCE), work**2, np.inf)
    cuts = _chain(allowed, stages, np.add)[1]
    return tuple(int(right - left) for left, right in itertools.pairwise(cuts))


def check_balance(balance: Sequence[Any], layers: int, stages: int) -> tuple[int, ...]:
    """Check a number of layers per stage that a user has chosen.

    Args:
        balance: number of layers by stage.
        layers: how many layers there are.
        stages: how many stages there are.

    Returns:
        The balance.

    Raises:
        ValueError: it has another number of stages or layers, or a stage without layers, or holds no integers.
    """
    what = f"balance={list(balance)}"
    if any(type(count) is not int or count < 1 for count in balance):
        raise ValueError(f"{what}: every stage needs a whole number of layers, at least 1")
    if len(balance) != stages:
        raise ValueError(f"{what} is for {len(balance)} stages, but there are {stages}")
    if sum(balance) != layers:
        raise ValueError(
            f"{what} adds up to {sum(balance)} layers, but the module has {layers}; balance=None chooses by itself"
        )
    return tuple(balance)


def _chain(work: npt.NDArray[np.float64], stages: int, add: np.ufunc) -> tuple[float, list[int]]:
    """The cheapest way to get from layer 0 to the last in ``stages`` steps, and the layers at which steps begin."""
    best = np.full(len(work), np.inf)
    best[0] = 0.0
    origins = []
    for _ in range(stages):
        ways = add(best[:, None], work)
        origins.append(len(work) - 1 - ways[::-1].argmin(axis=0))  # the last of equals
        best = ways.min(axis=0)
    cuts = [len(work) - 1]
    for origin in reversed(origins):
        cuts.append(int(origin[cuts[-1]]))
    return float(best[-1]), cuts[::-1]
