"""All-reduce between ranks of one host, over shared memory.

Each rank owns one piece of anonymous memory in which its buckets live, and maps those of all others. A ring all-reduce
(Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009) moves every shard
round the ring twice: once to be summed, once to be handed out. In shared memory every rank is every other's neighbour,
so a rank takes all the steps of its own shard in one go:

                  memory of rank 0      memory of rank 1      memory of rank 2
                 ┌──────┬──────┬──────┐┌──────┬──────┬──────┐┌──────┬──────┬──────┐
    shards       │  A0  │  B0  │  C0  ││  A1  │  B1  │  C1  ││  A2  │  B2  │  C2  │
                 └──────┴──────┴──────┘└──────┴──────┴──────┘└──────┴──────┴──────┘
    rank 0         A0 + A1 + A2 ──────────▶  A  ──────────────▶  A
    rank 1           B  ◀──────────────── B0 + B1 + B2 ────────────▶  B
    rank 2                  C  ◀──────────────── C  ◀────────────── C0 + C1 + C2

It moves the same bytes as a ring, 2(N - 1)/N of the buffer per rank, and needs two hand-overs where a ring needs
2(N - 1): "my gradients are in place" before, "I have taken and given everything" after. Each sum is made once, in one
order, by one rank: all ranks end with the same bits. A piece is summed and written through while it is in cache.

Nothing is serialised and nothing passes through the kernel but those tokens, which also order the memory accesses on
every architecture. A peer that dies shows as end-of-file at once.

A worker thread takes the all-reduces in the order in which they were started, while backward goes on.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from ringstrategy.collectives.base import Watch
from ringstrategy.collectives.chunks import segments
from ringstrategy.collectives.host_memory import HostMemory
from ringstrategy.collectives.worker import StartedWork, Worker
from ringstrategy.process_group import RankGroup

__all__ = ["SharedMemoryRing"]

# A piece of this size is still in the core's own cache when it is written through, and costs more than the call.
_SEGMENT_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True)
class _Plan:
    """What this rank does for one buffer.

    Attributes:
        offset: first byte of the buffer in each rank's memory.
        nbytes: its length.
        pieces: of this rank's shard: its own memory, and the same place in the others'.
        bytes_sent: what it reads from the others and writes to them.
    """

    offset: int
    nbytes: int
    pieces: tuple[tuple[Tensor, tuple[Tensor, ...]], ...]
    bytes_sent: int


class SharedMemoryRing:
    """All-reduce between the ranks of one host; see the module for how it works.

    Args:
        group: ranks of one host. Its timeout bounds the silence of a peer.
        segment_bytes: most bytes that are summed in one go.

    Raises:
        OSError: sockets or memory cannot be had here.
    """

    name = "shared_memory"

    def __init__(self, group: RankGroup, segment_bytes: int = _SEGMENT_BYTES) -> None:
        self.rank = group.rank
        self.world_size = group.world_size
        self.bytes_sent = 0
        self.busy_seconds = 0.0
        self._segment_bytes = segment_bytes
        self._plans: dict[tuple[int, int, torch.dtype], _Plan] = {}
        self._memory = HostMemory(group, self.name)
        self._worker = Worker("shared-memory", self._reduce, self._memory.hang_up)

    # -- the contract ------------------------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> Tensor:
        """Make the memory in which buffers live, and exchange it with the other ranks. Collective.

        Args:
            nbytes: size in bytes, the same on all ranks.

        Returns:
            A zeroed ``uint8`` tensor of ``nbytes`` elements in shared memory.

        Raises:
            OSError: the memory is not there, or another rank allocated another size.
            LinkLost: a rank left.
        """
        self._worker.raise_if_aborted()
        self._plans.clear()
        return self._memory.allocate(nbytes)

    def all_reduce(self, buffer: Tensor, background: bool = True, exact: int = 0) -> StartedWork:
        """Start summing ``buffer``, a view into the memory of :meth:`allocate`; see the contract."""
        return self._worker.start(buffer, background)

    def watch(self, watch: Watch | None) -> None:
        """Tell ``watch`` of all-reduces; see the contract."""
        self._worker.watch = self._memory.watch = watch

    def abort(self, error: BaseException) -> None:
        """Make pending and later calls raise ``error``. Safe from any thread."""
        self._worker.abort(error)

    def close(self) -> None:
        """Stop the worker, close the sockets, and let go of the memory. Views of it stay readable."""
        self._worker.close()
        self._memory.close()
        self._plans.clear()

    # -- in the worker, or in the thread that waits ------------------------------------------------------------------

    def _reduce(self, buffer: Tensor) -> None:
        begun = time.perf_counter()
        plan = self._plan(buffer)
        self._memory.begin(plan.offset, plan.nbytes)
        for own, others in plan.pieces:
            for other in others:
                own.add_(other)
            for other in others:
                other.copy_(own)
        self._memory.end()
        self.bytes_sent += plan.bytes_sent
        self.busy_seconds += time.perf_counter() - begun

    def _plan(self, buffer: Tensor) -> _Plan:
        key = (self._memory.offset(buffer), buffer.numel(), buffer.dtype)
        if key in self._plans:
            return self._plans[key]
        offset, nbytes, own, others = self._memory.views(buffer)
        shard = segments(self.rank, self.world_size, own.numel(), self._segment_bytes // own.element_size())
        pieces = tuple((own[start:stop], tuple(other[start:stop] for other in others)) for start, stop in shard)
        sent = 2 * sum(other.nbytes for _, parts in pieces for other in parts)
        return self._plans.setdefault(key, _Plan(offset, nbytes, pieces, sent))
