"""What all ranks do with a dataloader, given how long each rank's is. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

__all__ = ["Agreement", "Length", "Uneven", "UnevenData", "agree_on", "check_uneven", "more_text"]

Uneven: TypeAlias = Literal["error", "stop", "join"]


class UnevenData(RuntimeError):
    """One rank has training batches where another has none."""


def check_uneven(uneven: object) -> None:
    """Raise unless ``uneven`` is a known way.

    Raises:
        ValueError: it is not.
    """
    if uneven not in get_args(Uneven):
        raise ValueError(f"uneven={uneven!r} is unknown; choose one of {', '.join(map(repr, get_args(Uneven)))}.")


@dataclass(frozen=True)
class Length:
    """How long a rank's dataloader is.

    Attributes:
        batches: number of batches, None if it is not known.
        certain: the dataset has indices, so that the number holds.
    """

    batches: int | None
    certain: bool


@dataclass(frozen=True)
class Agreement:
    """How a dataloader is iterated.

    Attributes:
        watched: ranks tell each other before every batch whether they have one.
        batches: its length on every rank; None if it has none.
    """

    watched: bool
    batches: int | None = None


def agree_on(lengths: Sequence[Length], uneven: Uneven, limit: float | int) -> Agreement:
    """Decide alike on all ranks.

    Args:
        lengths: of all ranks' dataloaders, by rank.
        uneven: what is to happen where they differ.
        limit: ``limit_train_batches`` of the Trainer: that many batches, or a fraction of them.

    Raises:
        UnevenData: they are known to differ, which ``uneven="error"`` does not allow.
    """
    known = [length.batches for length in lengths if length.batches is not None]
    if len(known) < len(lengths):
        return Agreement(watched=True)
    trained = {_limited(batches, limit) for batches in known}
    if len(trained) == 1 and all(length.certain for length in lengths):
        return Agreement(watched=False)
    if uneven == "error" and len(trained) > 1:
        raise UnevenData(
            f"The train dataloader has {_by_rank(known)} batches. A rank without a batch would keep the others waiting "
            f"for its gradients. Give every rank equally many, or choose what is to happen: {_CHOICES}."
        )
    return Agreement(watched=True, batches=max(known) if uneven == "join" else min(known))


def more_text(has: Sequence[int], number: int, where: str) -> str:
    """The error where some ranks have a batch and others have none.

    Args:
        has: by rank, whether it has a batch.
        number: of the batch, from 0.
        where: in the training.
    """
    without, more = ([rank for rank, yes in enumerate(has) if bool(yes) is wanted] for wanted in (False, True))
    return (
        f"{_ranks(without)} ran out of training batches after {number} of them{f' ({where})' if where else ''}, while "
        f"{_ranks(more)} had more. Give every rank equally many, or choose what is to happen: {_CHOICES}."
    )


_CHOICES = (
    "uneven='stop' ends the epoch with the shortest, uneven='join' goes on to the end of the longest with the ranks "
    "that still have data"
)


def _limited(batches: int, limit: float | int) -> int:
    return min(batches, limit) if isinstance(limit, int) else int(batches * limit)


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _by_rank(known: Sequence[int]) -> str:
    """Like ``8 (rank 1), 16 (ranks 0, 2)``."""
    ranks: dict[int, list[int]] = {}
    for rank, batches in enumerate(known):
        ranks.setdefault(batches, []).append(rank)
    return ", ".join(f"{batches} ({_ranks(ranks[batches])})" for batches in sorted(ranks))
