"""What each batch counts for in the mean of gradients.

The mean over ranks is the mean over samples only if all batches are equally large. Else each loss is weighted: on a
rank with n samples, of N ranks with n̄ samples on average,

    loss · n/n̄  ──▶ backward ──▶ mean over ranks        1/N Σ n/n̄ ∇loss  =  Σ n ∇loss / Σ n

n̄ is asked for when the step begins, and is known when its forward is done; nothing else changes, so buckets leave as
early as ever, loss scales fit, and where all batches are equal every factor is exactly 1.

While gradients accumulate, the sizes of the batches to come are not known. Until they are, the losses of this rank
are weighted by the first of them, n₁, and put right before the last backward, d being what the losses have been
divided by:

    batch 1    loss/d · 1           ─┐
    batch 2    loss/d · n₂/n₁       ─┴▶ .grad · n₁d/n̄  ─┐
    batch 3    loss/d · n₃d/n̄       ────────────────────┴▶ mean over ranks        n̄: samples of a rank in all batches
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.data import extract_batch_size
from torch import Tensor, nn

from ringstrategy.gradients.reducer import GradientReducer

__all__ = ["Average", "LossWeights", "Window", "check_average", "count_samples", "weighted"]

Average: TypeAlias = Literal["ranks", "samples"] | Callable[[Any], float]
AddUp: TypeAlias = Callable[[float, str], Callable[[], float]]

_WHAT = "the number of samples of all ranks"


def check_average(average: object) -> None:
    """Raise unless ``average`` is one.

    Raises:
        ValueError: it is neither a known name nor callable.
    """
    if average not in ("ranks", "samples") and not callable(average):
        raise ValueError(
            f"average={average!r} is unknown; choose 'ranks', 'samples' or a function that weighs a batch, e.g. by how "
            "many of its labels are not ignored."
        )


@dataclass
class Window:
    """The batches of this rank since its gradients were averaged last.

    Attributes:
        first: weight of the first that has one; the unit for the others until the window closes.
        total: all weights together.
        batches: their number.
    """

    first: float = 0.0
    total: float = 0.0
    batches: int = 0

    def add(self, weight: float) -> float:
        """Take in a batch.

        Returns:
            The factor for its loss.
        """
        self.first = self.first or weight
        self.total += weight
        self.batches += 1
        return weight / self.first if weight else 0.0

    def factors(self, weight: float, mean: float, divisor: float) -> tuple[float, float]:
        """How to close the window with one more batch.

        Args:
            weight: of that batch.
            mean: weight of a rank in the whole window, this batch included; the mean over ranks.
            divisor: what every loss has been divided by.

        Returns:
            The factors for the gradients so far, and for the loss of that batch. Both are 0 where nothing has a weight.
        """
        if not mean:
            return 0.0, 0.0
        return self.first * divisor / mean, weight * divisor / mean


class LossWeights:
    """Weighs losses so that the mean over ranks is the mean that was asked for.

    Args:
        average: ``"samples"``, or what weighs a batch.
        add_up: starts to add a weight up over the ranks, given what it is, and returns what waits for the sum; None if
            no other rank has samples of its own.
        ranks: how many weights that sum has.
        reducer: averages the gradients; None if nobody does.
        module: its parameters are those that train.
    """

    def __init__(
        self, average: Average, add_up: AddUp | None, ranks: int, reducer: GradientReducer | None, module: nn.Module
    ) -> None:
        self._weigh = average if callable(average) else count_samples
        self._add_up = add_up
        self._ranks = ranks
        self._reducer = reducer
        self._module = module
        self._window = Window()
        self._weight = 0.0
        self._sum: Callable[[], float] | None = None  # under way

    def begin(self, batch: Any, *, counts: bool, first: bool, last: bool) -> None:
        """A training step begins.

        Args:
            batch: as the step gets it.
            counts: whether it has a weight at all.
            first: nothing has been accumulated for the next step of the optimizer.
            last: gradients will be averaged in the coming backward; False if nobody knows.

        Raises:
            ValueError: the batch has no weight that makes sense.
        """
        self._weight = self._weight_of(batch) if counts else 0.0
        if first:
            self._window = Window()
        if last:
            self._start()

    def factor(self, *, last: bool, divisor: int | None) -> float:
        """What the loss of the batch is multiplied by, before its backward.

        Args:
            last: the gradients are averaged in this backward.
            divisor: what the losses of the window are divided by; None if they are simply added up.

        Returns:
            0 if the batch has no weight.
        """
        if not last:
            return self._window.add(self._weight)
        if self._sum is None:
            self._start()
        assert self._sum is not None
        mean = self._sum() / self._ranks
        so_far, factor = self._window.factors(self._weight, mean, divisor or self._window.batches + 1)
        if self._window.batches and so_far != 1.0:
            self._scale_accumulated(so_far)
        self._window, self._sum = Window(), None
        return factor

    def _start(self) -> None:
        total = self._window.total + self._weight
        self._sum = (lambda: total) if self._add_up is None else self._add_up(total, _WHAT)

    def _weight_of(self, batch: Any) -> float:
        weight = float(self._weigh(batch))
        if not math.isfinite(weight) or weight < 0:
            raise ValueError(f"average weighs a batch by {weight}; the weight must be finite and not negative.")
        return weight

    def _scale_accumulated(self, factor: float) -> None:
        if self._reducer is not None:
            self._reducer.scale_accumulated(factor)
        else:
            with torch.no_grad():
                for parameter in self._module.parameters():
                    if parameter.grad is not None:
                        parameter.grad.mul_(factor)


def weighted(loss: Tensor, factor: float) -> Tensor:
    """A loss times a factor. With 0 nothing of it is left, even if it is not a number, but one can go backward."""
    if factor == 1.0:
        return loss
    return loss * factor if factor else torch.where(torch.zeros_like(loss, dtype=torch.bool), loss, 0.0)


def count_samples(batch: Any) -> int:
    """Rows of the first tensor of a batch, as Lightning counts them for ``self.log``.

    Raises:
        ValueError: there is no tensor.
    """
    try:
        return extract_batch_size(batch)
    except (MisconfigurationException, RecursionError) as error:
        raise ValueError(
            f"average='samples' finds no tensor in a batch of type {type(batch).__name__} whose rows could be counted. "
            "Give a function of a batch instead: average=lambda batch: ..."
        ) from error
