"""A dataloader that ends on all ranks at once.

Before a batch is handed out, every rank knows which ranks have one. The question travels while the batch before is
trained:

    rank 0   has #2?, ask for #3 ─▶ train #2 ─▶ has #3?, ask for #4 ─▶ train #3 ─▶ ...
    rank 1   has #2?, ask for #3 ─▶ train #2 ─▶ has #3? no ...
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

from ringstrategy.side_channel import SideChannel
from ringstrategy.uneven.lengths import Uneven, UnevenData, more_text

__all__ = ["EvenLoader", "Rounds", "even_loader"]

_END = object()


class EvenLoader:
    """Stands in for a rank's dataloader; whatever else is asked of it is asked of the loader itself.

    Args:
        loader: any iterable of batches.
        rounds: goes through it in step with the other ranks.
        batches: the length on all ranks; None if there is none.
    """

    rounds: Rounds

    def __init__(self, loader: Iterable[Any], rounds: Rounds, batches: int | None) -> None:
        vars(self).update(__wrapped__=loader, rounds=rounds, _batches=batches)

    def __iter__(self) -> Iterator[Any]:
        return self.rounds.through(self.__wrapped__)

    def __len__(self) -> int:
        if self.rounds.alone:
            return len(self.__wrapped__)
        if self._batches is None:
            raise TypeError("the ranks do not all know how many batches they have")
        return int(self._batches)

    def __getattr__(self, name: str) -> Any:
        if name == "__wrapped__":
            raise AttributeError(name)  # of a copy that is not complete yet
        return getattr(self.__wrapped__, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__wrapped__, name, value)


class _Resumable(EvenLoader):
    """One that a checkpoint can continue from."""

    def state_dict(self) -> Any:
        """The state of the loader after the batches that were handed out."""
        ahead = self.rounds.state_before_lookahead
        return self.__wrapped__.state_dict() if ahead is None else ahead

    def load_state_dict(self, state: Any) -> None:
        """Continue from a state, at the next iteration."""
        self.__wrapped__.load_state_dict(state)


def even_loader(loader: Iterable[Any], rounds: Rounds, batches: int | None) -> EvenLoader:
    """See :class:`EvenLoader`; with ``state_dict`` and ``load_state_dict`` where the loader has them."""
    resumable = all(hasattr(loader, name) for name in ("state_dict", "load_state_dict"))
    return (_Resumable if resumable else EvenLoader)(loader, rounds, batches)


class Rounds:
    """Goes through a rank's batches in step with the other ranks.

    Args:
        uneven: what happens when some ranks have no batch any more. ``"error"``: all raise. ``"stop"``: all stop.
            ``"join"``: those go through their last batch again until all are done, and know that it does not count.
        channel: to the other ranks.
        rank: this one.
        stages: ranks per pipeline, which train on the batch of the first of them.
        where: the place in the training, for errors.

    Attributes:
        present: which pipelines have data, for every batch that was handed out and is not trained yet; in a join only.
        state_before_lookahead: of a loader that can be resumed, where it was before it was asked for the next batch.
    """

    def __init__(self, uneven: Uneven, channel: SideChannel, rank: int, stages: int, where: Callable[[], str]) -> None:
        self.present: deque[list[bool]] = deque()
        self.state_before_lookahead: Any = None
        self._uneven = uneven
        self._channel = channel
        self._rank = rank
        self._stages = stages
        self._where = where
        self._last: Any = _END  # batch of this rank, for when there are no more

    @property
    def alone(self) -> bool:
        """Whether the ranks do not train together any more, and everyone goes through the batches alone."""
        return self._channel.closed

    def through(self, loader: Iterable[Any]) -> Iterator[Any]:
        """The batches of one epoch. All ranks ask for equally many."""
        if self.alone:
            return iter(loader)
        self.present.clear()
        return self._checked(loader) if self._uneven == "error" else self._together(loader)

    def _checked(self, loader: Iterable[Any]) -> Iterator[Any]:
        """The batches as they come. Whether all ranks had one is looked at with the next: it has not been used yet."""
        before: Callable[[], list[int]] | None = None
        for number, batch in enumerate(chain(loader, [_END])):
            everyone = self._ask(batch)
            if before is not None:
                self._compare(before(), number - 1)
            if batch is _END:
                self._compare(everyone(), number)
                return
            before = everyone
            yield batch

    def _ask(self, batch: Any) -> Callable[[], list[int]]:
        return self._channel.gather(batch is not _END, "the question who has another training batch")

    def _compare(self, has: Sequence[int], number: int) -> None:
        if len(set(has)) > 1:
            raise UnevenData(more_text(has, number, self._where()))

    def _together(self, loader: Iterable[Any]) -> Iterator[Any]:
        batches = iter(loader)
        batch = next(batches, _END)
        has = self._ask(batch)
        while True:
            following = _END
            if batch is not _END:
                if hasattr(loader, "state_dict"):
                    self.state_before_lookahead = loader.state_dict()
                following = next(batches, _END)
            following_has = self._ask(following)
            now = has()
            if self._uneven == "stop":
                if not all(now):
                    return
            else:
                present = [bool(yes) for yes in now[:: self._stages]]
                if not any(present):
                    return
                if batch is None:
                    raise UnevenData(f"Rank {self._rank} has None for a batch, which uneven='join' cannot count.")
                if following is _END:
                    batch = self._again(batch, loader)
                self.present.append(present)
            yield batch
            batch, has = following, following_has

    def _again(self, batch: Any, loader: Iterable[Any]) -> Any:
        """The last batch, or one like it; a copy, for a step may change what it is given."""
        if batch is not _END:
            self._last = _copy(batch)
            return batch
        if self._last is _END:  # a run that was resumed when this rank had no more data
            self._last = _first_of(loader)
        if self._last is _END:
            raise UnevenData(
                f"Rank {self._rank} has no training batch at all, and uneven='join' needs one to go through while the "
                "others train. Give it one, or choose uneven='stop'."
            )
        return _copy(self._last)


def _first_of(loader: Any) -> Any:
    state = loader.state_dict() if hasattr(loader, "state_dict") else None
    batch = next(iter(loader), _END)
    if state is not None:
        loader.load_state_dict(state)
    return batch


def _copy(batch: Any) -> Any:
    try:
        return copy.deepcopy(batch)
    except Exception:  # whatever a batch may hold that cannot be copied: most steps leave their batch alone
        return batch
