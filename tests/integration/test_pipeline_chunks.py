"""``chunks="auto"``: the number of micro-batches is found on the first batch, and nothing else happens there."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from ringstrategy.pipeline.tuning import candidates, fastest
from tests.helpers.compare import Result
from tests.helpers.pipelines import (
    Classification,
    Pipelined,
    assert_like_one_process,
    batches,
    fit_alone,
    fit_stages,
    layered,
    run_stages,
)


@pytest.mark.parametrize(("rows", "least", "expected"), [
    (64, 1, (1, 2, 4, 8, 16, 32)), (7, 1, (1, 2, 4)), (7, 2, (1, 2)), (1, 2, (1,)), (0, 1, (1,)), (None, 1, (1,)),
])  # fmt: skip
def test_counts_that_a_batch_has_rows_for(rows: int | None, least: int, expected: tuple[int, ...]) -> None:
    assert candidates(rows, least) == expected


def test_the_slowest_rank_decides() -> None:
    tried: list[int] = []

    def slowest(times: torch.Tensor) -> torch.Tensor:
        assert times.shape == (3,)
        return torch.tensor([0.3, 0.1, 0.2])

    assert fastest([1, 2, 4], tried.append, slowest) == 2
    assert tried == [1, 1, 2, 2, 4, 4]


def _with_statistics() -> Classification:
    net = layered()
    return Classification(nn.Sequential(net[0], nn.BatchNorm1d(8, dtype=torch.float64), *net[1:]))


def _without_statistics() -> Classification:
    return Classification()


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_training_is_that_of_one_process(schedule: str) -> None:
    """Symptom: trials move weights, gradients or random numbers."""
    load = partial(batches, 16, 16, 16)
    ranks = fit_stages(2, _without_statistics, load, chunks="auto", schedule=schedule)
    assert_like_one_process(ranks, fit_alone(_without_statistics, load))


def _statistics_at_the_start(place: Pipelined) -> tuple[int, torch.Tensor]:
    module = _with_statistics()
    trainer = place.trainer(max_steps=1)
    trainer.fit(module, batches(16))
    norm = module.net.get_submodule("1")
    assert isinstance(norm, nn.BatchNorm1d)
    assert norm.num_batches_tracked is not None
    assert norm.running_mean is not None
    return int(norm.num_batches_tracked), norm.running_mean.clone()


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_statistics_move_once_in_the_first_step(schedule: str) -> None:
    """Symptom: every trial counts as a batch."""
    automatic = run_stages(_statistics_at_the_start, 2, chunks="auto", schedule=schedule)
    fixed = run_stages(_statistics_at_the_start, 2, chunks=1, schedule=schedule)
    assert [count for count, _ in automatic] == [1, 1]
    torch.testing.assert_close(automatic[0][1], fixed[0][1], rtol=0.0, atol=1e-12)


def test_every_replica_chooses_alike() -> None:
    """Symptom: replicas split their batches differently."""
    ranks: list[Result] = fit_stages(4, load=partial(batches, 16, 16), chunks="auto", num_stages=2)
    assert_like_one_process(ranks, fit_alone(load=partial(batches, 16, 16)))
