"""Room in a ring of bytes."""

from __future__ import annotations

import random

import pytest

from ringstrategy.pipeline.ring_space import RingSpace


def _take(ring: RingSpace, nbytes: int) -> int | None:
    start = ring.find(nbytes)
    if start is not None:
        ring.take(start, nbytes)
    return start


def test_goes_round_and_starts_again_when_empty() -> None:
    ring = RingSpace(10, 110)
    assert _take(ring, 101) is None
    assert _take(ring, 60) == 10
    assert _take(ring, 30) == 70
    assert _take(ring, 20) is None, "10 at the end, none at the beginning"
    ring.free_oldest()
    assert _take(ring, 61) is None
    assert _take(ring, 20) == 10, "what is left at the end is too small"
    assert _take(ring, 40) == 30
    assert _take(ring, 1) is None
    ring.free_oldest()
    assert _take(ring, 40) == 70
    for left in (2, 1, 0):
        ring.free_oldest()
        assert len(ring) == left
    assert _take(ring, 100) == 10
    assert _take(ring, 1) is None


@pytest.mark.parametrize("seed", range(5))
def test_never_gives_a_byte_twice(seed: int) -> None:
    draw = random.Random(seed)
    begin, end = 7, 7 + draw.randrange(50, 400)
    ring = RingSpace(begin, end)
    taken: list[range] = []
    served = 0
    for _ in range(2000):
        if taken and draw.random() < 0.5:
            ring.free_oldest()
            del taken[0]
            continue
        nbytes = draw.randrange(1, 60)
        start = _take(ring, nbytes)
        if start is None:
            assert taken, "an empty ring has room"
            continue
        assert begin <= start
        assert start + nbytes <= end
        assert all(start >= other.stop or start + nbytes <= other.start for other in taken)
        taken.append(range(start, start + nbytes))
        served += 1
        assert len(ring) == len(taken)
    assert served > 500
