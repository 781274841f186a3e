"""Who sums which part of a buffer, and who sends it to whom: index arithmetic only."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Arrival", "ring_arrivals", "segments", "split", "tree_depth", "tree_links"]


def split(start: int, stop: int, parts: int) -> list[tuple[int, int]]:
    """Cut ``[start, stop)`` into ``parts`` contiguous pieces whose lengths differ by at most one.

    >>> split(0, 10, 4)
    [(0, 3), (3, 6), (6, 8), (8, 10)]
    """
    quotient, remainder = divmod(stop - start, parts)
    pieces = []
    for part in range(parts):
        end = start + quotient + (part < remainder)
        pieces.append((start, end))
        start = end
    return pieces


def segments(rank: int, world_size: int, numel: int, longest: int) -> list[tuple[int, int]]:
    """The part of a buffer that ``rank`` sums, in pieces that stay in cache.

    Args:
        rank: whose part.
        world_size: number of ranks.
        numel: length of the buffer in elements.
        longest: most elements of a piece.

    Returns:
        Start and stop of each piece; over all ranks they cover the buffer once.

    >>> segments(1, 2, 10, longest=3)
    [(5, 8), (8, 10)]
    """
    start, stop = split(0, numel, world_size)[rank]
    return [(begin, min(begin + longest, stop)) for begin in range(start, stop, longest)]


class Arrival(NamedTuple):
    """What a rank of a ring does with one message of its left neighbour.

    Attributes:
        start: first element.
        stop: one past the last.
        add: add them to one's own (reduce-scatter) rather than put them in their place (all-gather).
        forward: send the outcome on to the right neighbour.
    """

    start: int
    stop: int
    add: bool
    forward: bool


def ring_arrivals(rank: int, world_size: int, numel: int, longest: int) -> list[Arrival]:
    """All messages that a rank of a ring receives in one all-reduce, in their order.

    The buffer is cut into one shard per rank, a shard into segments. A rank starts by sending its own shard. In step t
    it receives shard ``rank - 1 - t``, which its left neighbour has received one step earlier.

    Args:
        rank: this rank.
        world_size: number of ranks.
        numel: length of the buffer in elements.
        longest: most elements of a message.

    Returns:
        The segments of ``2 * (world_size - 1)`` shards; the first half is to be added.

    >>> ring_arrivals(0, 2, 10, longest=5)
    [Arrival(start=5, stop=10, add=True, forward=True), Arrival(start=0, stop=5, add=False, forward=False)]
    """
    steps = 2 * (world_size - 1)
    return [
        Arrival(start, stop, add=step < world_size - 1, forward=step < steps - 1)
        for step in range(steps)
        for start, stop in segments((rank - 1 - step) % world_size, world_size, numel, longest)
    ]


def tree_links(rank: int, world_size: int) -> tuple[int | None, list[int]]:
    """Parent and children of a rank in a binary tree that is filled level by level.

    >>> tree_links(1, 5), tree_links(0, 2), tree_links(4, 5)
    ((0, [3, 4]), (None, [1]), (1, []))
    """
    children = [child for child in (2 * rank + 1, 2 * rank + 2) if child < world_size]
    return (rank - 1) // 2 if rank else None, children


def tree_depth(rank: int) -> int:
    """How many links lie between a rank and the root of that tree.

    >>> [tree_depth(rank) for rank in range(8)]
    [0, 1, 1, 2, 2, 2, 2, 3]
    """
    return (rank + 1).bit_length() - 1
