"""All-reduce in a ring, over messages.

Every rank sends to its right neighbour only, and receives from its left one. The buffer is cut into one shard per rank.
The shards travel round the ring twice: once to be summed, once to be handed out (Patarasuk and Yuan, "Bandwidth optimal
all-reduce algorithms for clusters of workstations", Journal of Parallel and Distributed Computing 69, 2009):

.. code-block:: text

          0 ──▶ 1                 what each rank receives from its left neighbour, 4 ranks:
          ▲     │
          │     ▼                               rank 0    rank 1    rank 2    rank 3
          3 ◀── 2                 step 0, add   shard 3   shard 0   shard 1   shard 2
                                  step 1, add   shard 2   shard 3   shard 0   shard 1
                                  step 2, add   shard 1   shard 2   shard 3   shard 0    rank r has the sum of r + 1
                                  step 3, copy  shard 0   shard 1   shard 2   shard 3
                                  step 4, copy  shard 3   shard 0   shard 1   shard 2
                                  step 5, copy  shard 2   shard 3   shard 0   shard 1

What a rank receives in one step is what it sends in the next: it forwards every message, with its own part added on
the first way round, except the last. A sum is made in one order, by the ranks on its shard's way, and then only copied:
all ranks end with the same bits.

**Messages and bytes.** There are 2(N - 1) steps, and each moves 1/N of the buffer, of S bytes, per rank:

.. code-block:: text

    messages per rank     2(N - 1)                     for shards of one segment
    bytes sent per rank   2 S (N - 1)/N                no all-reduce can do with less
      exactly, by rank r  2 S - s(r + 1) - s(r + 2)    s(i) the bytes of shard i modulo N; they differ by one element
    time                  2(N - 1)(a + S/N b)          a the latency of a message, b the time per byte

A shard longer than a segment travels as several messages, so that adding one overlaps with the next on its way.
"""

from __future__ import annotations

from collections import deque

from torch import Tensor

from ringstrategy.collectives.chunks import Arrival, ring_arrivals, segments
from ringstrategy.collectives.point_to_point import Messages, Receipt

__all__ = ["ring_all_reduce"]

_AHEAD = 4  # so many messages are expected at a time


def ring_all_reduce(buffer: Tensor, messages: Messages) -> None:
    """Sum ``buffer`` over the ranks, in place.

    Args:
        buffer: real numbers, shape (numel,).
        messages: to and from the other ranks.
    """
    rank, world_size = messages.rank, messages.world_size
    left, right = (rank - 1) % world_size, (rank + 1) % world_size
    longest = messages.segment(buffer.dtype)
    arrivals = iter(enumerate(ring_arrivals(rank, world_size, buffer.numel(), longest)))
    scratch = messages.scratch(_AHEAD, buffer[:longest])
    expected: deque[tuple[Arrival, Tensor, Receipt]] = deque()

    def expect_next() -> None:
        for index, arrival in arrivals:
            # A shard comes round as a sum only after this rank's part of it has left: it may be received in place.
            place = buffer[arrival.start : arrival.stop]
            into = scratch[index % _AHEAD][: len(place)] if arrival.add else place
            expected.append((arrival, into, messages.receive(into, left)))
            return

    for _ in range(_AHEAD):
        expect_next()
    if world_size > 1:
        for start, stop in segments(rank, world_size, buffer.numel(), longest):
            messages.send(buffer[start:stop], right)
    while expected:
        arrival, into, receipt = expected.popleft()
        receipt.wait()
        own = buffer[arrival.start : arrival.stop]
        if arrival.add:
            own.add_(into)
        if arrival.forward:
            messages.send(own, right)
        expect_next()
