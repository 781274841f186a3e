"""All-reduce by a parameter server: rank 0 gathers all buffers, adds them, and sends the sum to everybody.

What everybody would write first, and what the others are measured against (the star of Li et al., "Scaling distributed
machine learning with the parameter server", OSDI 2014, with one server):

.. code-block:: text

    gather and add            send the sum

      1    2    3               1    2    3
      │    │    │               ▲    ▲    ▲
      └────┼────┘               └────┼────┘
           ▼                         │
           0                         0

Rank 0 adds in the order of the ranks, and the sum is only copied: all ranks end with the same bits.

**Messages and bytes.** Rank 0 is the bottleneck: what it sends and receives grows with the number of ranks.

.. code-block:: text

    messages, all ranks   2(N - 1)
    bytes sent            rank 0: S (N - 1), all others: S, for a buffer of S bytes
    time                  2(N - 1)(a + S b)     a the latency of a message, b the time per byte at rank 0
"""

from __future__ import annotations

from torch import Tensor

from ringstrategy.collectives.point_to_point import Messages

__all__ = ["naive_all_reduce"]


def naive_all_reduce(buffer: Tensor, messages: Messages) -> None:
    """Sum ``buffer`` over the ranks, in place.

    Args:
        buffer: real numbers, shape (numel,).
        messages: to and from the other ranks.
    """
    if not buffer.numel():
        return
    others = range(1, messages.world_size)
    if messages.rank == 0:
        (theirs,) = messages.scratch(1, buffer)
        for rank in others:
            messages.receive(theirs, rank).wait()
            buffer.add_(theirs)
        for rank in others:
            messages.send(buffer, rank)
    else:
        messages.send(buffer, 0)
        messages.receive(buffer, 0).wait()  # comes only after rank 0 has received what was sent
