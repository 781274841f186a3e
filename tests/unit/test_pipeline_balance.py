"""Which layers make up which stage."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringstrategy.pipeline.balance import check_balance, partition


def _work(costs: Sequence[float], send: Sequence[float], sizes: Sequence[int]) -> list[float]:
    """What each stage costs."""
    ends = list(itertools.accumulate(sizes))
    borders = [0.0, *(send[end - 1] for end in ends[:-1]), 0.0]
    return [
        sum(costs[end - size : end]) + left + right
        for size, end, left, right in zip(sizes, ends, borders, borders[1:], strict=False)
    ]


def _all_partitions(layers: int, stages: int) -> list[tuple[int, ...]]:
    cuts = itertools.combinations(range(1, layers), stages - 1)
    return [tuple(b - a for a, b in itertools.pairwise((0, *cut, layers))) for cut in cuts]


@st.composite
def _chains(draw: st.DrawFn) -> tuple[list[int], list[int], int]:
    costs = draw(st.lists(st.integers(0, 20), min_size=1, max_size=8))
    send = draw(st.lists(st.integers(0, 20), min_size=len(costs), max_size=len(costs)))
    return costs, send, draw(st.integers(1, len(costs)))


@given(_chains(), st.sampled_from([1.0, 1e-6, 1e9]))
def test_no_partition_is_better(chain: tuple[list[int], list[int], int], unit: float) -> None:
    costs, send, stages = chain

    def quality(sizes: Sequence[int]) -> tuple[float, float]:
        work = _work(costs, send, sizes)
        return max(work), sum(cost**2 for cost in work)

    found = partition([cost * unit for cost in costs], stages, [cost * unit for cost in send])
    assert len(found) == stages
    assert sum(found) == len(costs)
    assert min(found) > 0
    assert quality(found) == min(map(quality, _all_partitions(len(costs), stages)))


@pytest.mark.parametrize(
    ("costs", "stages", "send", "expected"),
    [
        ([5.0], 1, None, (1,)),
        ([1.0, 2.0, 3.0], 3, None, (1, 1, 1)),
        ([4.0, 1.0, 2.0, 2.0, 3.0], 2, None, (3, 2)),
        ([1.0, 1.0, 1.0, 1.0], 2, [0.0, 9.0, 0.0, 0.0], (3, 1)),
        ([1.0, 1.0, 1.0, 1.0], 2, [0.0, 9.0, 1.0], (1, 3)),
        ([3.0, 0.0, 0.0, 3.0, 0.0], 2, None, (3, 2)),
        ([0.0, 0.0, 0.0], 2, None, (2, 1)),
        ([0.1] * 9, 3, None, (3, 3, 3)),
    ],
)
def test_partitions(costs: list[float], stages: int, send: list[float] | None, expected: tuple[int, ...]) -> None:
    assert partition(costs, stages, send) == expected


def test_equal_layers_are_spread_evenly() -> None:
    for cost in (1.0, 0.1, 1 / 3):
        sizes = partition([cost] * 70, 12)
        assert sorted(sizes) == [5] * 2 + [6] * 10


@pytest.mark.parametrize(
    ("costs", "stages", "send", "message"),
    [
        ([1.0, 2.0], 3, None, "2 layers cannot be divided into 3 stages"),
        ([], 1, None, "0 layers cannot be divided into 1 stages"),
        ([1.0], 0, None, "1 layers cannot be divided into 0 stages"),
        ([1.0, 2.0, 3.0], 2, [1.0], "there are 3 layers, but 1 costs of sending"),
        ([1.0, -2.0], 1, None, "at least 0"),
        ([1.0, float("nan")], 1, None, "finite"),
        ([1.0, 1.0], 1, [float("inf")], "finite"),
    ],
)
def test_what_cannot_be_partitioned(costs: list[float], stages: int, send: list[float] | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        partition(costs, stages, send)


def test_a_balance_that_fits() -> None:
    assert check_balance([3, 5], layers=8, stages=2) == (3, 5)
    assert check_balance((1,), layers=1, stages=1) == (1,)


@pytest.mark.parametrize(
    ("balance", "message"),
    [
        ([3, 4], r"balance=\[3, 4\] adds up to 7 layers, but the module has 8"),
        ([3, 6], r"balance=\[3, 6\] adds up to 9 layers, but the module has 8"),
        ([8], r"balance=\[8\] is for 1 stages, but there are 2"),
        ([3, 3, 2], "is for 3 stages, but there are 2"),
        ([], r"balance=\[\] is for 0 stages"),
        ([8, 0], "at least 1"),
        ([9, -1], "at least 1"),
        ([3.0, 5.0], "whole number"),
        ([True, 7], "whole number"),
        (["3", 5], "whole number"),
    ],
)
def test_a_balance_that_does_not_fit(balance: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_balance(balance, layers=8, stages=2)
