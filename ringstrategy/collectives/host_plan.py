"""Which rank of each host carries which part of a buffer to the other hosts: index arithmetic only."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from ringstrategy.collectives.chunks import segments, split

__all__ = ["lane_segments", "lanes", "places_by_host"]


def places_by_host(hosts: Sequence[Hashable]) -> list[list[int]]:
    """The places of each host's ranks; hosts in the order of their first rank.

    Args:
        hosts: of each rank, by its place.

    >>> places_by_host(["a", "b", "a", "b", "b"])
    [[0, 2], [1, 3, 4]]
    """
    places: dict[Hashable, list[int]] = {}
    for place, host in enumerate(hosts):
        places.setdefault(host, []).append(place)
    return list(places.values())


def lanes(hosts: Sequence[Hashable]) -> list[tuple[int, ...]]:
    """One rank of each host per lane; as many lanes as the smallest host has ranks.

    Every rank is in at most one. What the ranks of a larger host have beyond that number is added by the others.

    >>> lanes(["a", "a", "b", "b", "b"])
    [(0, 2), (1, 3)]
    """
    return list(zip(*places_by_host(hosts), strict=False))


def lane_segments(lane: int, lanes: int, hosts: int, numel: int, longest: int) -> list[list[tuple[int, int]]]:
    """The part of a buffer that one lane carries.

    Args:
        lane: which one.
        lanes: how many there are.
        hosts: number of hosts.
        numel: length of the buffer in elements.
        longest: most elements of a segment.

    Returns:
        For each segment, start and stop of each host's piece. Over all lanes they cover the buffer once.

    >>> lane_segments(1, 2, 2, 10, longest=3)
    [[(5, 7), (7, 8)], [(8, 9), (9, 10)]]
    """
    return [split(start, stop, hosts) for start, stop in segments(lane, lanes, numel, longest)]
