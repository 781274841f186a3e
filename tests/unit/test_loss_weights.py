"""What batches count for: the arithmetic, without ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ringstrategy import PipelineStrategy, RingDDPStrategy
from ringstrategy.gradients.weights import LossWeights, Window, check_average, count_samples, weighted
from tests.helpers.pipelines import batches

_SIZES = st.lists(st.integers(0, 300), min_size=1, max_size=5)


@given(sizes=st.lists(_SIZES, min_size=1, max_size=4))
def test_a_window_ends_with_the_mean_over_samples(sizes: list[list[int]]) -> None:
    """On ranks with windows of any sizes; the gradient of a batch is a number that no other has."""
    total = sum(map(sum, sizes))
    mean = total / len(sizes)
    found, expected = 0.0, 0.0
    for rank, mine in enumerate(sizes):
        window, accumulated, divisor = Window(), 0.0, 7.0
        *before, last = enumerate(mine)
        for number, size in before:
            accumulated += window.add(size) * _gradient(rank, number) / divisor
        so_far, factor = window.factors(last[1], mean, divisor)
        found += (so_far * accumulated + factor * _gradient(rank, last[0]) / divisor) / len(sizes)
        expected += sum(size * _gradient(rank, number) for number, size in enumerate(mine)) / max(total, 1)
    assert found == pytest.approx(expected, rel=1e-12, abs=1e-12)


def _gradient(rank: int, number: int) -> float:
    return 1.0 + 10 * rank + number


@given(size=st.integers(1, 10**6), batches=st.integers(1, 64), ranks=st.integers(1, 64))
def test_equal_batches_have_factors_of_exactly_one(size: int, batches: int, ranks: int) -> None:
    """Otherwise the default's bits would not be those of ``average="samples"`` where nothing is uneven."""
    window = Window()
    assert all(window.add(size) == 1.0 for _ in range(batches - 1))
    mean = float(size * batches * ranks) / ranks
    so_far, factor = window.factors(size, mean, divisor=batches)
    assert factor == 1.0
    assert so_far == (1.0 if batches > 1 else 0.0)


def test_without_any_weight_nothing_is_left() -> None:
    assert Window().factors(0, 0.0, 1) == (0.0, 0.0)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3.0])
def test_a_factor_of_zero_leaves_no_gradient_of_whatever_loss(value: float) -> None:
    parameter = torch.tensor([2.0, 3.0], requires_grad=True)
    loss = (parameter * value).sum()
    nothing = weighted(loss, 0.0)
    assert nothing.item() == 0.0
    nothing.backward()  # type: ignore[no-untyped-call]
    assert parameter.grad is not None  # whoever takes part in a backward still does
    assert weighted(loss, 1.0) is loss


@pytest.mark.parametrize(("batch", "rows"), [
    (torch.zeros(7, 2), 7),
    ([torch.zeros(3, 2), torch.zeros(3)], 3),
    ({"image": torch.zeros(5, 3, 2, 2), "label": torch.zeros(5), "name": "a"}, 5),
    (torch.tensor(1.0), 1),
])  # fmt: skip
def test_samples_are_rows_of_the_first_tensor(batch: Any, rows: int) -> None:
    assert count_samples(batch) == rows


@dataclass
class _Opaque:
    rows: int


@pytest.mark.parametrize("batch", [_Opaque(3), 3, {}, "text"])
def test_a_batch_without_tensors_needs_a_function(batch: Any) -> None:
    with pytest.raises(ValueError, match=r"average='samples' finds no tensor in a batch of type .*average=lambda"):
        count_samples(batch)


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_weights_that_make_no_sense(weight: float) -> None:
    weights = LossWeights(lambda batch: weight, None, 1, None, nn.Linear(1, 1))
    with pytest.raises(ValueError, match=r"average weighs a batch by .*; the weight must be finite and not negative"):
        weights.begin(next(iter(batches(4))), counts=True, first=True, last=True)


@pytest.mark.parametrize("strategy", [RingDDPStrategy, PipelineStrategy])
@pytest.mark.parametrize("average", ["sample", "", None, 1])
def test_unknown_averages(average: Any, strategy: Any) -> None:
    with pytest.raises(ValueError, match=r"average=.* is unknown; choose 'ranks', 'samples' or a function"):
        strategy(average=average)


def test_known_averages() -> None:
    for average in ("ranks", "samples", len):
        check_average(average)
