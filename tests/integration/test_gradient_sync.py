"""Gradients of all ranks become one gradient, whichever parameters a rank uses."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.helpers.assertions import assert_close_to_single_process, assert_ranks_identical
from tests.helpers.models import (
    Batch,
    Regression,
    blocks,
    network,
    plain_sgd,
    state_of,
    train_single_process,
)
from tests.helpers.trainers import fit_ranks, strategy_under_test

SHAPES = [(2, 24, 4), (3, 24, 2), (4, 32, 2)]


@pytest.mark.parametrize(("world_size", "rows", "batch_size"), SHAPES)
def test_training_equals_one_process_on_the_concatenated_batches(world_size: int, rows: int, batch_size: int) -> None:
    """Symptom: two processes do not give the result of one with the same total batch."""
    ranks = fit_ranks(Regression, world_size, rows=rows, batch_size=batch_size)
    assert_ranks_identical([rank.parameters for rank in ranks])
    expected = train_single_process(network(), blocks(rows, batch_size * world_size))
    assert_close_to_single_process(ranks[0].parameters, expected)


def _in_double_precision(rank: int) -> Regression:
    return Regression(rank, network(dtype=torch.float64))


@pytest.mark.parametrize(("world_size", "rows", "batch_size"), SHAPES)
def test_in_double_precision_it_does_so_to_the_last_digits(world_size: int, rows: int, batch_size: int) -> None:
    """Symptom: the same, where float32 would hide a small mistake."""
    ranks = fit_ranks(_in_double_precision, world_size, rows=rows, batch_size=batch_size, dtype=torch.float64)
    assert_ranks_identical([rank.parameters for rank in ranks])
    net = network(dtype=torch.float64)
    expected = train_single_process(net, blocks(rows, batch_size * world_size, torch.float64))
    assert_close_to_single_process(ranks[0].parameters, expected, tolerance=1e-10)


def test_two_ranks_equal_ddp_bit_for_bit() -> None:
    """Symptom: swapping the strategy changes the numbers of an experiment."""
    ours = fit_ranks(Regression, 2, rows=24, batch_size=4)
    theirs = fit_ranks(Regression, 2, rows=24, batch_size=4, strategy="ddp")
    assert_ranks_identical([ours[0].parameters, theirs[0].parameters])


@pytest.mark.parametrize("bucket_cap_mb", [1e-6, 1000.0], ids=["one parameter a bucket", "one bucket"])
def test_the_size_of_buckets_does_not_change_the_result(bucket_cap_mb: float) -> None:
    """Symptom: gradients are wrong for a model that is larger, or smaller, than a bucket."""
    strategy = partial(strategy_under_test, bucket_cap_mb=bucket_cap_mb)
    ranks = fit_ranks(Regression, 2, rows=24, batch_size=4, strategy=strategy)
    assert_ranks_identical([rank.parameters for rank in ranks])
    assert_close_to_single_process(ranks[0].parameters, train_single_process(network(), blocks(24, 8)))


class _SeededByRank(Regression):
    """Every rank makes another network, with other running statistics."""

    def __init__(self, rank: int) -> None:
        norm = nn.BatchNorm1d(3)
        norm.get_buffer("running_mean").fill_(rank + 1)
        super().__init__(rank, nn.Sequential(*network(seed=100 + rank), norm))
        self.record("built", state_of(self))

    def on_train_start(self) -> None:
        self.record("started", state_of(self))


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_start_from_the_weights_and_buffers_of_rank_0(world_size: int) -> None:
    """Symptom: replicas that were not seeded start from different weights."""
    ranks = fit_ranks(_SeededByRank, world_size, rows=16 * world_size, batch_size=8)
    assert_ranks_identical([ranks[0].records["built"][0]] + [rank.records["started"][0] for rank in ranks])
    assert_ranks_identical([rank.parameters for rank in ranks])


class _TwoHeads(nn.Module):
    """Three layers, of which two make the output."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.a, self.unused, self.b = nn.Linear(8, 3), nn.Linear(8, 3), nn.Linear(8, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.a(inputs) + self.b(inputs)
        return output


def _decaying_sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, weight_decay=0.1)


class _NeverUsesOneLayer(Regression):
    def __init__(self, rank: int) -> None:
        super().__init__(rank, _TwoHeads(), _decaying_sgd)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.record("grad is None", self.net.get_parameter("unused.weight").grad is None)


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_layer_that_no_rank_uses_keeps_its_weights_and_has_no_gradient(world_size: int) -> None:
    """Symptom: a layer that is constructed but not called makes training stop, or shrinks by weight decay."""
    ranks = fit_ranks(_NeverUsesOneLayer, world_size, rows=8 * world_size, batch_size=4)
    assert [rank.records["grad is None"] for rank in ranks] == [[True, True]] * world_size
    assert_ranks_identical([rank.parameters for rank in ranks])
    expected = train_single_process(_TwoHeads(), blocks(8 * world_size, 4 * world_size), _decaying_sgd)
    assert_close_to_single_process(ranks[0].parameters, expected)
    assert torch.equal(ranks[0].parameters["net.unused.weight"], _TwoHeads().unused.weight)


class _UsesOneHeadOnRank0(Regression):
    def __init__(self, rank: int) -> None:
        super().__init__(rank, _TwoHeads(), plain_sgd)

    def loss(self, batch: Batch) -> Tensor:
        inputs, targets = batch
        return F.mse_loss(self.net(inputs) if self.rank == 0 else self.net.get_submodule("a")(inputs), targets)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.record("grad of b", self.net.get_parameter("b.weight").grad)


def _loss_of_both_ranks(net: nn.Module, batch: Batch) -> Tensor:
    inputs, targets = batch
    return (
        F.mse_loss(net(inputs[0::2]), targets[0::2])
        + F.mse_loss(net.get_submodule("a")(inputs[1::2]), targets[1::2])
    ) / 2  # fmt: skip


def test_a_layer_that_one_rank_uses_gets_its_gradient_over_all_ranks() -> None:
    """Symptom: a batch that gives no loss for one head on one rank hangs the job."""
    ranks = fit_ranks(_UsesOneHeadOnRank0, 2, rows=16, batch_size=4)
    assert_ranks_identical([rank.parameters for rank in ranks])
    expected = train_single_process(_TwoHeads(), blocks(16, 8), plain_sgd, _loss_of_both_ranks)
    assert_close_to_single_process(ranks[0].parameters, expected)
    for of_rank_0, of_rank_1 in zip(*(rank.records["grad of b"] for rank in ranks), strict=True):
        assert torch.equal(of_rank_0, of_rank_1)
        assert of_rank_0.abs().max() > 0


class _LosesNothingOnRank1(Regression):
    def __init__(self, rank: int) -> None:
        super().__init__(rank, optimizer=plain_sgd)

    def loss(self, batch: Batch) -> Tensor:
        return torch.zeros((), requires_grad=True) if self.rank == 1 else super().loss(batch)


def _half_the_loss_of_rank_0(net: nn.Module, batch: Batch) -> Tensor:
    return F.mse_loss(net(batch[0][0::2]), batch[1][0::2]) / 2


def test_a_rank_whose_loss_touches_no_parameter_counts_as_zero() -> None:
    """Symptom: a rank that has nothing to learn from its batch hangs the job."""
    ranks = fit_ranks(_LosesNothingOnRank1, 2, rows=16, batch_size=4)
    assert_ranks_identical([rank.parameters for rank in ranks])
    expected = train_single_process(network(), blocks(16, 8), plain_sgd, _half_the_loss_of_rank_0)
    assert_close_to_single_process(ranks[0].parameters, expected)
