"""The ring's index arithmetic, run by a simulator that knows nothing of processes."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringstrategy.collectives.chunks import Step, ring_steps, split


@given(st.integers(0, 50), st.integers(0, 50), st.integers(1, 9))
def test_split_covers_the_range_once_in_near_equal_pieces(start: int, length: int, parts: int) -> None:
    pieces = split(start, start + length, parts)
    assert [i for a, b in pieces for i in range(a, b)] == list(range(start, start + length))
    assert max(b - a for a, b in pieces) - min(b - a for a, b in pieces) <= 1


def _simulate(world_size: int, numel: int, chunk: int, seed: int) -> list[list[int]]:
    """Run the plans with a random scheduler; a rank may read its neighbour only as far as tokens allow."""
    chooser = random.Random(seed)
    buffers = [[1000 * rank + i for i in range(numel)] for rank in range(world_size)]
    plans = [ring_steps(rank, world_size, numel, chunk) for rank in range(world_size)]
    taken = [0] * world_size
    announced = [0] * world_size

    def may_go_on(rank: int) -> bool:
        left = (rank - 1) % world_size
        return taken[rank] < len(plans[rank]) and announced[left] >= plans[rank][taken[rank]].after

    while ready := [rank for rank in range(world_size) if may_go_on(rank)]:
        rank = chooser.choice(ready)
        step = plans[rank][taken[rank]]
        mine, left = buffers[rank], buffers[(rank - 1) % world_size]
        for i in range(step.start, step.stop):
            mine[i] = mine[i] + left[i] if step.reduce else left[i]
        taken[rank] += 1
        announced[rank] += step.announce
    assert taken == [len(plan) for plan in plans], "deadlock"
    return buffers


@settings(deadline=None)
@given(st.integers(2, 6), st.integers(0, 70), st.integers(1, 40), st.integers(0, 10_000))
def test_every_interleaving_sums_on_all_ranks(world_size: int, numel: int, chunk: int, seed: int) -> None:
    expected = [sum(1000 * rank + i for rank in range(world_size)) for i in range(numel)]
    assert _simulate(world_size, numel, chunk, seed) == [expected] * world_size


@pytest.mark.parametrize("world_size", [2, 3, 4, 5])
def test_each_rank_reads_the_bytes_of_a_ring(world_size: int) -> None:
    """2(N - 1)/N of the buffer, the least any all-reduce can do (Patarasuk and Yuan, 2009)."""
    numel = 60 * world_size
    for rank in range(world_size):
        steps = ring_steps(rank, world_size, numel, chunk=20)
        assert sum(step.stop - step.start for step in steps) == 2 * (world_size - 1) * numel // world_size


def test_two_ranks_step_by_step() -> None:
    """One block: rank 0 adds its second half, then copies its first."""
    assert ring_steps(0, 2, 10, chunk=5) == [
        Step(5, 10, reduce=True, after=0, announce=True),
        Step(0, 5, reduce=False, after=1, announce=False),
    ]


def test_a_neighbour_is_a_wave_ahead() -> None:
    """What a step needs was finished one wave earlier, so equal ranks do not wait for each other."""
    steps = ring_steps(0, 2, 100, chunk=5)
    announced = 0
    for step in steps[2:-1]:
        assert step.after <= announced + 1
        announced += step.announce
