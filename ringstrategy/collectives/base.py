"""The contract that every collective fulfils."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

__all__ = ["Collective", "Watch", "Work"]


class Work(Protocol):
    """An all-reduce under way."""

    def wait(self) -> None:
        """Block until the buffer holds the sum over ranks and may be written again.

        On CUDA the current stream waits; the host does not.

        Raises:
            RankFailure: another rank failed, left, or did not answer within the timeout.
        """


class Watch(Protocol):
    """Is told of the all-reduces of a rank, in whichever thread they run; times are of ``time.perf_counter``."""

    def arrived(self, rank: int) -> None:
        """The part of another rank is in place for the all-reduce under way, and perhaps has been for a while."""

    def summed(self) -> None:
        """This rank has taken and given everything in the all-reduce under way."""

    def all_reduced(self, nbytes: int, begun: float, ended: float) -> None:
        """An all-reduce of so many bytes is over."""


class Collective(Protocol):
    """Sums buffers over the ranks of one process group.

    Every rank makes the same calls, in the same order, with buffers of the same length and dtype. After an all-reduce
    every rank holds the same bits.

    Attributes:
        name: what the benchmarks and logs call it, e.g. ``"shared_memory"``.
        rank: this process's rank.
        world_size: number of ranks.
        bytes_sent: bytes of gradient buffers this rank has handed to another so far.
        busy_seconds: time this rank has spent in all-reduces so far; 0 where the backend does not tell.
    """

    name: str
    rank: int
    world_size: int
    bytes_sent: int
    busy_seconds: float

    def allocate(self, nbytes: int) -> Tensor:
        """Memory that :meth:`all_reduce` works in. Collective: every rank calls it with the same size.

        Args:
            nbytes: size in bytes.

        Returns:
            A one-dimensional, zeroed ``uint8`` tensor, aligned for every dtype. Memory that was allocated before
            stays readable, but can no longer be reduced.
        """

    def all_reduce(self, buffer: Tensor, background: bool = True, exact: int = 0) -> Work:
        """Start summing ``buffer`` over all ranks, in place.

        Args:
            buffer: a contiguous one-dimensional view into the memory of the last :meth:`allocate`. It must not be
                touched before :meth:`Work.wait` returns.
            background: the caller has other work to do meanwhile. False allows to leave all to :meth:`Work.wait`, which
                saves waking a thread.
            exact: so many elements at the end are no gradients, but counts; whoever sends fewer bits spares them.
        """

    def watch(self, watch: Watch | None) -> None:
        """Tell ``watch`` of every all-reduce from here on, as far as this collective knows; None ends that."""

    def abort(self, error: BaseException) -> None:
        """Make every pending and later :meth:`Work.wait` raise ``error``. Safe to call from any thread."""

    def close(self) -> None:
        """Release threads, sockets and memory. Idempotent; touches no other rank."""
