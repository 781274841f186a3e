"""Who sums which part of a buffer, and who sends it to whom."""

from __future__ import annotations

import random
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringstrategy.collectives.chunks import Arrival, ring_arrivals, segments, split, tree_depth, tree_links


@given(st.integers(0, 50), st.integers(0, 50), st.integers(1, 9))
def test_split_covers_the_range_once_in_near_equal_pieces(start: int, length: int, parts: int) -> None:
    pieces = split(start, start + length, parts)
    assert [i for a, b in pieces for i in range(a, b)] == list(range(start, start + length))
    assert max(b - a for a, b in pieces) - min(b - a for a, b in pieces) <= 1


@given(st.integers(1, 6), st.integers(0, 200), st.integers(1, 60))
def test_the_segments_of_all_ranks_cover_the_buffer_once(world_size: int, numel: int, longest: int) -> None:
    pieces = [piece for rank in range(world_size) for piece in segments(rank, world_size, numel, longest)]
    assert [i for start, stop in pieces for i in range(start, stop)] == list(range(numel))
    assert all(0 < stop - start <= longest for start, stop in pieces)


@given(st.integers(1, 6), st.integers(0, 200))
def test_no_rank_sums_more_than_its_share(world_size: int, numel: int) -> None:
    shares = [sum(b - a for a, b in segments(rank, world_size, numel, 7)) for rank in range(world_size)]
    assert max(shares) - min(shares) <= 1


def _play_ring(world_size: int, numel: int, longest: int, seed: int) -> tuple[list[list[int]], list[int]]:
    """Ranks that receive and forward in any order that their links allow: the buffers, and elements sent by each."""
    chooser = random.Random(seed)
    buffers = [[1000 * rank + i for i in range(numel)] for rank in range(world_size)]
    plans = [deque(ring_arrivals(rank, world_size, numel, longest)) for rank in range(world_size)]
    links: list[deque[list[int]]] = [deque() for _ in range(world_size)]  # what is on its way to a rank
    sent = [0] * world_size

    def send(rank: int, start: int, stop: int) -> None:
        links[(rank + 1) % world_size].append(buffers[rank][start:stop])
        sent[rank] += stop - start

    for rank in range(world_size):
        for start, stop in segments(rank, world_size, numel, longest):
            send(rank, start, stop)
    while ready := [rank for rank in range(world_size) if plans[rank] and links[rank]]:
        rank = chooser.choice(ready)
        arrival, message = plans[rank].popleft(), links[rank].popleft()
        assert len(message) == arrival.stop - arrival.start <= longest
        for i, value in enumerate(message, start=arrival.start):
            buffers[rank][i] = buffers[rank][i] + value if arrival.add else value
        if arrival.forward:
            send(rank, arrival.start, arrival.stop)
    assert not any(plans), "deadlock"
    assert not any(links), "a message that nobody took"
    return buffers, sent


@settings(deadline=None)
@given(st.integers(2, 6), st.integers(0, 70), st.integers(1, 40), st.integers(0, 10_000))
def test_every_interleaving_of_a_ring_sums_on_all_ranks(world_size: int, numel: int, longest: int, seed: int) -> None:
    buffers, sent = _play_ring(world_size, numel, longest, seed)
    assert buffers == [[sum(1000 * rank + i for rank in range(world_size)) for i in range(numel)]] * world_size
    shards = [stop - start for start, stop in split(0, numel, world_size)]
    assert sent == [
        2 * numel - shards[(rank + 1) % world_size] - shards[(rank + 2) % world_size] for rank in range(world_size)
    ]


def test_two_ranks_of_a_ring_step_by_step() -> None:
    """Rank 0 adds the second half, and is given the first."""
    assert ring_arrivals(0, 2, 10, longest=3) == [
        Arrival(5, 8, add=True, forward=True),
        Arrival(8, 10, add=True, forward=True),
        Arrival(0, 3, add=False, forward=False),
        Arrival(3, 5, add=False, forward=False),
    ]


def test_a_rank_alone_receives_nothing() -> None:
    assert ring_arrivals(0, 1, 10, longest=3) == []
    assert tree_links(0, 1) == (None, [])


@pytest.mark.parametrize("world_size", range(1, 20))
def test_every_rank_of_a_tree_hangs_on_the_root_by_as_many_links_as_its_depth(world_size: int) -> None:
    for rank in range(world_size):
        parent, children = tree_links(rank, world_size)
        assert len(children) <= 2
        assert all(rank < child < world_size and tree_links(child, world_size)[0] == rank for child in children)
        links = 0
        while parent is not None:
            assert rank in tree_links(parent, world_size)[1]
            rank, parent = parent, tree_links(parent, world_size)[0]
            links += 1
        assert rank == 0
    assert tree_depth(world_size - 1) == max(map(tree_depth, range(world_size))) == links == world_size.bit_length() - 1
