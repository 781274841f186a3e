"""Who evaluates which batches, so that no sample is repeated."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Sized
from typing import TypeVar

import torch
from torch.utils.data import Sampler

__all__ = ["DealtSampler", "Shuffled", "interleave"]

T = TypeVar("T")


class DealtSampler(Sampler[int]):
    """Deals the batches of one process to the ranks in turn.

    Nine samples in batches of two, and three ranks:

    .. code-block:: text

        one process   0 1 | 2 3 | 4 5 | 6 7 | 8
        rank 0        0 1             | 6 7
        rank 1              2 3             | 8
        rank 2                    4 5

    A rank gets at most one batch more than another, and none where there are fewer batches than ranks.

    Args:
        order: the samples in the order of one process, the same on all ranks.
        batch_size: samples per batch.
        rank: this rank.
        ranks: how many there are.

    Raises:
        TypeError: ``order`` has no length.
    """

    def __init__(self, order: Iterable[int], batch_size: int, rank: int, ranks: int) -> None:
        if not isinstance(order, Sized):
            raise TypeError(
                f"{type(order).__name__} has no length, so that its samples cannot be dealt to the ranks. Give it a "
                "__len__, or set Trainer(use_distributed_sampler=False) and divide the samples yourself."
            )
        self._order = order
        self._count = order.__len__
        self._batch_size = batch_size
        self._rank = rank
        self._ranks = ranks

    def __iter__(self) -> Iterator[int]:
        samples = list(self._order)
        for start, stop in self._mine(len(samples)):
            yield from samples[start:stop]

    def __len__(self) -> int:
        return sum(stop - start for start, stop in self._mine(self._count()))

    def set_epoch(self, epoch: int) -> None:
        """Hand the epoch on to the order, if it depends on it."""
        if callable(set_epoch := getattr(self._order, "set_epoch", None)):
            set_epoch(epoch)

    def _mine(self, samples: int) -> Iterator[tuple[int, int]]:
        """Where this rank's batches begin and end, of so many samples."""
        size = self._batch_size
        for start in range(self._rank * size, samples, self._ranks * size):
            yield start, min(start + size, samples)


class Shuffled:
    """``count`` samples in another order every epoch, the same on all ranks.

    Args:
        count: number of samples.
        seed: the same on all ranks.
    """

    def __init__(self, count: int, seed: int) -> None:
        self._count = count
        self._seed = seed
        self._epoch = 0

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self._seed + self._epoch)
        yield from torch.randperm(self._count, generator=generator).tolist()

    def __len__(self) -> int:
        return self._count

    def set_epoch(self, epoch: int) -> None:
        """Change the order."""
        self._epoch = epoch


def interleave(by_rank: Sequence[Sequence[T]]) -> list[T]:
    """Put what was dealt to the ranks in turn back in one order.

    >>> interleave([["a", "d"], ["b", "e"], ["c"]])
    ['a', 'b', 'c', 'd', 'e']
    """
    turns = max(map(len, by_rank), default=0)
    return [hand[turn] for turn in range(turns) for hand in by_rank if turn < len(hand)]
