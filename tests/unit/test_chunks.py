"""Who sums which part of a buffer."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ringstrategy.collectives.chunks import segments, split


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
