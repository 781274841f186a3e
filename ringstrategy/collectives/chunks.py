"""Who sums which part of a buffer: index arithmetic only."""

from __future__ import annotations

__all__ = ["segments", "split"]


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
