"""All-reduce in a binary tree, over messages.

Sums go up to the root, the result goes down again. That takes a number of steps which grows with the logarithm of the
number of ranks, where a ring takes a number that grows with the number itself: a tree is for short buffers and many
ranks (Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", International
Journal of High Performance Computing Applications 19, 2005):

.. code-block:: text

    reduce                    broadcast

           0                         0            level 0
         ▲   ▲                     ▼   ▼
        1     2                   1     2         level 1
       ▲ ▲   ▲                   ▼ ▼   ▼
      3   4 5                   3   4 5           level 2

    segments on their way, 3 levels:

    turn             0      1      2      3      4      5
    leaf             ↑ 0    ↑ 1    ↑ 2    ↑ 3    ↑ 4,↓0 ↑ 5,↓1
    level 1                 ↑ 0    ↑ 1    ↑ 2,↓0 ↑ 3,↓1 ↑ 4,↓2
    root                           ↓ 0    ↓ 1    ↓ 2    ↓ 3

A buffer travels in segments, so that all levels are at work at the same time. A rank of level k expects the sum of a
segment 2k segments later than it has sent its own part. A sum is made by the ranks on its way up, the root's is the
one that counts, and it is only copied: all ranks end with the same bits.

**Messages and bytes.** Every link carries a buffer of S bytes up and down once:

.. code-block:: text

    messages, all ranks   2(N - 1)                     for a buffer of one segment
    bytes sent, all       2 S (N - 1)                  as in a ring, but not evenly:
      by a rank           S (c + 1), the root S c      c its number of children, 0 to 2
    time                  2 d (a + S b)                d = ⌊log2 N⌋ levels below the root, one segment;
                                                       a the latency of a message, b the time per byte
      about               2 S b + 2 d (a + s b)        in segments of s bytes: two children share their parent's port
"""

from __future__ import annotations

from torch import Tensor

from ringstrategy.collectives.chunks import segments, tree_depth, tree_links
from ringstrategy.collectives.point_to_point import Messages, Receipt

__all__ = ["tree_all_reduce"]

_AHEAD = 2  # so many messages are expected from each child at a time


def tree_all_reduce(buffer: Tensor, messages: Messages) -> None:
    """Sum ``buffer`` over the ranks, in place.

    Args:
        buffer: real numbers, shape (numel,).
        messages: to and from the other ranks.
    """
    parent, children = tree_links(messages.rank, messages.world_size)
    longest = messages.segment(buffer.dtype)
    pieces = [buffer[start:stop] for start, stop in segments(0, 1, buffer.numel(), longest)]
    lag = 2 * tree_depth(messages.rank)
    scratch = messages.scratch(_AHEAD * len(children), buffer[:longest])
    expected: dict[tuple[int, int], tuple[Tensor, Receipt]] = {}  # by place of the child, and segment

    def expect(place: int, index: int) -> None:
        if index < len(pieces):
            into = scratch[_AHEAD * place + index % _AHEAD][: len(pieces[index])]
            expected[place, index] = into, messages.receive(into, children[place])

    for index in range(_AHEAD):
        for place in range(len(children)):
            expect(place, index)
    # The sum of a segment comes only after this rank's part of it has left: it may be received in place.
    sums = [] if parent is None else [messages.receive(piece, parent) for piece in pieces]
    for turn in range(len(pieces) + lag):
        if turn < len(pieces):
            for place in range(len(children)):
                into, receipt = expected.pop((place, turn))
                receipt.wait()
                pieces[turn].add_(into)
                expect(place, turn + _AHEAD)
            if parent is not None:
                messages.send(pieces[turn], parent)
        if turn >= lag:
            if parent is not None:
                sums[turn - lag].wait()
            for child in children:
                messages.send(pieces[turn - lag], child)
