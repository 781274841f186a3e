"""Batches of any sizes on any rank, and one process that trains on all of them together."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from tests.helpers.models import data, network, parameters_of, plain_sgd

__all__ = ["Pair", "Stream", "as_one", "batches_of", "loader_of", "train_as_one"]

Pair = tuple[Tensor, Tensor]
Sizes = Sequence[Sequence[int]]


class _Listed(Dataset[Pair]):
    def __init__(self, batches: Sequence[Pair]) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: int) -> Pair:
        return self._batches[index]


class Stream(IterableDataset[Pair]):
    """Batches without a length."""

    def __init__(self, batches: Sequence[Pair]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Pair]:
        return iter(self._batches)


def batches_of(sizes: Sequence[int], rank: int, dtype: torch.dtype = torch.float64) -> list[Pair]:
    """This rank's batches: inputs (size, 8) and targets (size, 3), of rows that no other rank has."""
    inputs, targets = (tensor[400 * rank : 400 * (rank + 1)] for tensor in data(1600, dtype))
    ends = torch.tensor([0, *sizes]).cumsum(0).tolist()
    return [(inputs[a:b], targets[a:b]) for a, b in itertools.pairwise(ends)]


def loader_of(sizes: Sequence[int], rank: int, *, stream: bool = False, dtype: torch.dtype = torch.float64) -> Loader:
    """A dataloader of :func:`batches_of`, with or without a length."""
    batches = batches_of(sizes, rank, dtype)
    return DataLoader(Stream(batches) if stream else _Listed(batches), batch_size=None)


Loader = DataLoader[Pair]


def as_one(batches: Iterable[Pair]) -> Pair:
    """The rows of several batches as one."""
    inputs, targets = zip(*batches, strict=True)
    return torch.cat(inputs), torch.cat(targets)


def train_as_one(
    sizes: Sizes,
    window: int = 1,
    *,
    epochs: int = 1,
    fits: int = 1,
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = plain_sgd,
    mean_of_means: bool = False,
    clip: float = 0.0,
) -> dict[str, Tensor]:
    """The oracle: one process that sees what all ranks see, in double precision.

    Args:
        sizes: of the batches, by rank. A rank with fewer has no part in the last ones.
        window: batches of each rank per step.
        epochs: how often.
        fits: how often, with an optimizer of its own each.
        optimizer: makes the optimizer.
        mean_of_means: each rank's batch counts alike, as opposed to each sample; for a window of 1.
        clip: the largest norm of gradients, if any.

    Returns:
        The parameters, named as in a ``Regression``.
    """
    net = network(dtype=torch.float64)
    ranks = [batches_of(mine, rank) for rank, mine in enumerate(sizes)]
    steps = max(len(mine) for mine in ranks)
    for epoch in range(epochs * fits):
        if epoch % epochs == 0:
            stepper = optimizer(net.parameters())
        for first in range(0, steps, window):
            present = [batch for mine in ranks for batch in mine[first : first + window]]
            stepper.zero_grad()
            if mean_of_means:
                loss = torch.stack([F.mse_loss(net(inputs), targets) for inputs, targets in present]).mean()
            else:
                inputs, targets = as_one(present)
                loss = F.mse_loss(net(inputs), targets)
            torch.autograd.backward(loss)
            if clip:
                nn.utils.clip_grad_norm_(net.parameters(), clip)
            stepper.step()
    return parameters_of(net, prefix="net.")
