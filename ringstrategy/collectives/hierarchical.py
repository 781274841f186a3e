"""All-reduce over several hosts: shared memory inside each host, the process group's messages between hosts.

A flat ring sends 2(N - 1)/N of the buffer over every link between two ranks, those between hosts included. Here the
ranks of a host first add up what they have, so that between hosts only one buffer per host travels, and each rank
carries a part of it, its lane:

                     host a                                    host b
               rank 0       rank 1                       rank 2       rank 3
    buffers   A0  B0       A1  B1                       A2  B2       A3  B3
              ─────────────────────                     ─────────────────────
    1. add    A0 + A1 = Aa    Bb: B0 + B1 = Ba          A2 + A3 = Ab      B2 + B3 = Bb      shared memory
    2. swap      Aa ◀──────────────── lane 0 ─────────────▶ Ab                              messages
                            Ba ◀───────────────── lane 1 ────────────────▶ Bb               messages
    3. give   A = Aa + Ab   B = Ba + Bb                 A = Aa + Ab       B = Ba + Bb       shared memory
              to rank 1     to rank 0                   to rank 3         to rank 2

In step 2 each of H hosts owns one piece of the segment. A rank sends every other host's piece to the rank of its lane
there, adds up the copies of its own, in the order of the hosts, and sends the sum back: 2(H - 1) messages, and
2(H - 1)/H of the lane's part in each direction, as a ring would, in two message times instead of 2(H - 1). Over all
lanes a host sends 2(H - 1)/H of the buffer; with two hosts of n ranks a flat ring sends (2n - 1)/n times as much over
the link between them. Every sum is made once and copied: all ranks end with the same bits.

A lane's part is cut into segments, which follow each other through the three steps. While one is on the wire, another
is added or handed out:

    add and send      0   1   2   3   4
    sum and send              0   1   2   3   4
    hand out                          0   1   2   3   4
                                                          time ▶

There are as many lanes as the smallest host has ranks; further ranks of larger hosts bring and take their buffers, and
the others carry them. With compression, float32 numbers cross in 16 bits; within a host nothing is rounded.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from ringstrategy.collectives.base import Watch
from ringstrategy.collectives.half_precision import Compression, wire_dtype
from ringstrategy.collectives.host_memory import HostMemory, Views
from ringstrategy.collectives.host_plan import lane_segments, lanes, places_by_host
from ringstrategy.collectives.host_segments import HalfSegment, HostMessages, Peer, PlainSegment, Segment
from ringstrategy.collectives.links import LinkLost
from ringstrategy.collectives.worker import StartedWork, Worker
from ringstrategy.process_group import HostPart, RankGroup

__all__ = ["HierarchicalAllReduce"]

# Long enough that starting its messages costs little, short enough that several are under way in one bucket.
_SEGMENT_BYTES = 512 * 1024
# So many segments are begun before the first is waited for: the link is never idle while this rank computes.
_AHEAD = 2


@dataclass(frozen=True, slots=True)
class _Plan:
    """What this rank does for one buffer; without segments it is in no lane."""

    offset: int
    nbytes: int
    segments: tuple[Segment, ...]


class HierarchicalAllReduce:
    """All-reduce between ranks of several hosts, on CPU; see the module for how it works.

    Args:
        group: the ranks. A silent peer is given up after its timeout.
        segment_bytes: most bytes of a segment.

    Attributes:
        compression: the type in which float32 travels between hosts; None sends it in full. To be set, on all ranks
            alike, before the first all-reduce.

    Raises:
        OSError: sockets or memory cannot be had here.
    """

    name = "hierarchical"

    def __init__(self, group: RankGroup, segment_bytes: int = _SEGMENT_BYTES) -> None:
        self.rank = group.rank
        self.world_size = group.world_size
        self.busy_seconds = 0.0
        self.compression: Compression | None = None
        self._group = group
        self._segment_bytes = segment_bytes
        hosts = [rank.host for rank in group.ranks]
        self._lanes = lanes(hosts)
        self._lane = next((lane for lane, places in enumerate(self._lanes) if group.rank in places), None)
        self._host = next(host for host, places in enumerate(places_by_host(hosts)) if group.rank in places)
        self._hosts = len(self._lanes[0])
        self._plans: dict[tuple[int, int, int, torch.dtype], _Plan] = {}
        self._exact: deque[int] = deque()  # of what is queued in the worker
        self._messages = HostMessages(group)
        self._memory = HostMemory(HostPart(group), self.name)
        # Nothing interrupts a message of gloo's, so a failure wakes only those who wait for the worker.
        self._worker = Worker(self.name, self._reduce)

    # -- the contract ------------------------------------------------------------------------------------------------

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent to other hosts so far."""
        return self._messages.bytes_sent

    @bytes_sent.setter
    def bytes_sent(self, count: int) -> None:
        self._messages.bytes_sent = count

    def allocate(self, nbytes: int) -> Tensor:
        """Make the memory in which buffers live, and exchange it within each host. Collective; see the contract.

        Raises:
            OSError: on every rank, if one has no memory.
        """
        self._worker.raise_if_aborted()
        self._plans.clear()
        problem: OSError | LinkLost | None = None
        try:
            memory = self._memory.allocate(nbytes)
        except (OSError, LinkLost) as error:
            self._memory.hang_up()
            problem = error
        # Other hosts would notice only by waiting.
        failed = self._group.exchange(problem is not None)
        if problem is not None:
            raise problem
        if any(failed):
            raise OSError(f"{self._group.ranks[failed.index(True)]} cannot share memory with its neighbours")
        return memory

    def all_reduce(self, buffer: Tensor, background: bool = True, exact: int = 0) -> StartedWork:
        """Start summing ``buffer``, a view into the memory of :meth:`allocate`; see the contract."""
        self._worker.raise_if_aborted()
        self._exact.append(exact)
        return self._worker.start(buffer, background)

    def watch(self, watch: Watch | None) -> None:
        """Tell ``watch`` of all-reduces, and of the ranks of this host in them; see the contract."""
        self._worker.watch = self._memory.watch = watch

    def abort(self, error: BaseException) -> None:
        """Make pending and later calls raise ``error``. Safe from any thread."""
        self._worker.abort(error)
        self._memory.hang_up()

    def close(self) -> None:
        """Stop the worker, close the sockets, and let go of the memory. Views of it stay readable."""
        self._worker.close()
        self._memory.close()
        self._plans.clear()

    # -- in the worker -----------------------------------------------------------------------------------------------

    def _reduce(self, buffer: Tensor) -> None:
        begun = time.perf_counter()
        plan = self._plan(buffer, self._exact.popleft())
        try:
            self._memory.begin(plan.offset, plan.nbytes)
            under_way = [segment.carry(self._messages) for segment in plan.segments]
            for tick in range(len(under_way) + 2 * _AHEAD):
                for index in (tick, tick - _AHEAD, tick - 2 * _AHEAD):
                    if 0 <= index < len(under_way):
                        next(under_way[index], None)
            self._memory.end()
        except BaseException:
            self._memory.hang_up()  # the other ranks of the host need not wait for this one
            raise
        self.busy_seconds += time.perf_counter() - begun

    def _plan(self, buffer: Tensor, exact: int) -> _Plan:
        key = (self._memory.offset(buffer), buffer.numel(), exact, buffer.dtype)
        if key in self._plans:
            return self._plans[key]
        views = self._memory.views(buffer)
        dtype = views.own.dtype
        half = None if self.compression is None else wire_dtype(dtype, self.compression)
        segments: list[Segment] = []
        if self._lane is not None and half in (None, dtype):
            segments += self._plain(views, 0, views.own.numel())
        elif self._lane is not None:
            assert half is not None
            body = views.own.numel() - exact * (2 if buffer.is_complex() else 1)
            segments += [*self._half(views, body, half), *self._plain(views, body, views.own.numel())]
        return self._plans.setdefault(key, _Plan(views.offset, views.nbytes, tuple(segments)))

    def _plain(self, views: Views, start: int, stop: int) -> list[Segment]:
        longest = self._segment_bytes // views.own.element_size()
        # As many segments are under way as need room of their own.
        rooms = views.own.new_empty(_AHEAD + 1, self._hosts - 1, -(-longest // self._hosts))
        return [
            PlainSegment(own, others, mine, peers, list(rooms[index % len(rooms), :, : mine.numel()]))
            for index, (own, others, mine, peers) in enumerate(self._cut(views, start, stop))
        ]

    def _half(self, views: Views, stop: int, dtype: torch.dtype) -> list[Segment]:
        return [HalfSegment(*parts, dtype) for parts in self._cut(views, 0, stop)]

    def _cut(self, views: Views, start: int, stop: int) -> list[tuple[Tensor, list[Tensor], Tensor, list[Peer]]]:
        """This rank's segments of a stretch: its own, those of its neighbours, its host's piece, the other hosts'."""
        assert self._lane is not None
        own, others = views.own[start:stop], [other[start:stop] for other in views.others]
        longest = self._segment_bytes // own.element_size()
        found = []
        for pieces in lane_segments(self._lane, len(self._lanes), self._hosts, own.numel(), longest):
            whole = slice(pieces[0][0], pieces[-1][1])
            peers = [
                Peer(place, own[slice(*piece)])
                for host, (place, piece) in enumerate(zip(self._lanes[self._lane], pieces, strict=True))
                if host != self._host
            ]
            mine = own[slice(*pieces[self._host])]
            found.append((own[whole], [other[whole] for other in others], mine, peers))
        return found
