"""What a strategy tells whoever watches it: all-reduces, waits for gradients, micro-batches.

Times are seconds of ``time.perf_counter``.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from ringstrategy.gradients.live import LiveBucket
from ringstrategy.pipeline.schedules import Action

__all__ = ["AllReduce", "Arrival", "BucketContents", "Finish", "MicroBatch", "Recorded", "Recorder"]


class Arrival(NamedTuple):
    """When this rank knew that the part of another was in place; it asks for them one after the other.

    Attributes:
        rank: the other one.
        time: when.
    """

    rank: int
    time: float


class AllReduce(NamedTuple):
    """One all-reduce.

    Attributes:
        nbytes: of the buffer.
        begun: when this rank took it up.
        arrivals: of the other ranks' parts, in the order in which it asked for them. Empty where the collective does
            not tell.
        summed: when it had taken and given everything; None where the collective does not tell.
        ended: when the sum was there.
    """

    nbytes: int
    begun: float
    arrivals: tuple[Arrival, ...]
    summed: float | None
    ended: float


class Finish(NamedTuple):
    """A wait for the means.

    Attributes:
        begun: when the backward had ended.
        ended: when the means were in place.
        buckets: how many.
    """

    begun: float
    ended: float
    buckets: int


class MicroBatch(NamedTuple):
    """What a stage of a pipeline computes for one micro-batch.

    Attributes:
        action: which, and whether forward or backward.
        begun: when.
        ended: when.
    """

    action: Action
    begun: float
    ended: float


class BucketContents(NamedTuple):
    """What travels together.

    Attributes:
        nbytes: of the buffer.
        dtype: of the gradients.
        parameters: their names.
    """

    nbytes: int
    dtype: str
    parameters: tuple[str, ...]


class Recorded(NamedTuple):
    """What has happened in a step."""

    all_reduces: list[AllReduce]
    finishes: list[Finish]
    micro_batches: list[MicroBatch]


class Recorder:
    """Keeps what it is told. All-reduces may come from another thread than all else.

    Attributes:
        plan: the buckets as they were sent last.
    """

    def __init__(self) -> None:
        self.plan: tuple[BucketContents, ...] = ()
        self._buckets: Sequence[LiveBucket] = ()
        # Plain tuples: whoever records is in a hurry.
        self._all_reduces: deque[tuple[int, float, list[tuple[int, float]], float | None, float]] = deque()
        self._finishes: list[Finish] = []
        self._micro_batches: list[MicroBatch] = []
        self._arrivals: list[tuple[int, float]] = []
        self._summed: float | None = None

    def arrived(self, rank: int) -> None:
        """The part of ``rank`` is in place, for the all-reduce under way."""
        self._arrivals.append((rank, time.perf_counter()))

    def summed(self) -> None:
        """This rank has taken and given everything, for the all-reduce under way."""
        self._summed = time.perf_counter()

    def all_reduced(self, nbytes: int, begun: float, ended: float) -> None:
        """An all-reduce is over."""
        self._all_reduces.append((nbytes, begun, self._arrivals, self._summed, ended))
        self._arrivals, self._summed = [], None

    def finished(self, begun: float, ended: float, buckets: Sequence[LiveBucket]) -> None:
        """A backward has got its means."""
        self._finishes.append(Finish(begun, ended, len(buckets)))
        if buckets is not self._buckets:
            self._buckets = buckets
            self.plan = tuple(
                BucketContents(
                    bucket.flat.nbytes,
                    str(bucket.flat.dtype).removeprefix("torch."),
                    tuple(gradient.name for gradient in bucket.gradients),
                )
                for bucket in buckets
            )

    def computed(self, action: Action, begun: float, ended: float) -> None:
        """A stage has computed something for a micro-batch."""
        self._micro_batches.append(MicroBatch(action, begun, ended))

    def take(self) -> Recorded:
        """What has come together since the last call."""
        all_reduces = []
        for _ in range(len(self._all_reduces)):
            nbytes, begun, arrivals, summed, ended = self._all_reduces.popleft()
            all_reduces.append(AllReduce(nbytes, begun, tuple(Arrival(*one) for one in arrivals), summed, ended))
        recorded = Recorded(all_reduces, self._finishes, self._micro_batches)
        self._finishes, self._micro_batches = [], []
        return recorded

    def forget(self) -> None:
        """Let go of the buckets."""
        self._buckets = ()
