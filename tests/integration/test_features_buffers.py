"""Buffers, above all running statistics, under ``ring_ddp``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

from tests.helpers.assertions import assert_ranks_identical
from tests.helpers.compare import Normalised, Place, Result, assert_same, result_of, run_both
from tests.helpers.features import feature
from tests.helpers.models import Batch, parameters_of
from tests.helpers.trainers import strategy_under_test

_GROUP = "Buffers"


class _Alternates(Normalised):
    """BatchNorm in training and in evaluation mode, batch by batch."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.register_buffer("seen", torch.zeros(2, dtype=torch.int64))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.net.get_submodule("3").train(batch_idx % 2 == 0)

    def loss(self, batch: Batch) -> Tensor:
        # A buffer that is read in training: rank 0's values count.
        self.get_buffer("seen").add_(self.rank + 1)
        return super().loss(batch) * self.get_buffer("seen")[0]


def _fit_with_buffers(place: Place, broadcast: bool) -> Result:
    make = strategy_under_test if place.strategy == "ring_ddp" else DDPStrategy
    module = _Alternates(place.rank)
    trainer = place.trainer(strategy=make(broadcast_buffers=broadcast))
    trainer.fit(module, place.shard(), place.shard())
    return result_of(trainer, module)


@feature(
    _GROUP,
    "`broadcast_buffers`",
    tried="on and off, BatchNorm in training and in evaluation mode batch by batch, a buffer that scales the loss",
    outcome="same bits; off, each rank keeps its own buffers as with `ddp`",
)
@pytest.mark.parametrize("broadcast", [True, False])
def test_buffers(broadcast: bool) -> None:
    ours, theirs = run_both(_fit_with_buffers, broadcast)
    if broadcast:
        assert_same(ours, theirs)
        return
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our.state, their.state, rtol=0, atol=0)
        torch.testing.assert_close(our.metrics, their.metrics, rtol=0, atol=0)
    assert not torch.equal(ours[0].state["net.3.running_mean"], ours[1].state["net.3.running_mean"])


class _SwitchesInTheStep(Normalised):
    """BatchNorm is in training mode when the step begins, and in evaluation mode for one of its forwards."""

    def loss(self, batch: Batch) -> Tensor:
        trained = super().loss(batch)
        self.net.eval()
        evaluated = super().loss(batch)
        self.net.train()
        return trained + evaluated


def _fit_switching(place: Place) -> dict[str, Tensor]:
    module = _SwitchesInTheStep(place.rank)
    strategy = "ring_ddp" if place.strategy == "ring_ddp" else DDPStrategy(broadcast_buffers=False)
    place.trainer(strategy=strategy).fit(module, place.shard())
    return parameters_of(module)


@feature(
    _GROUP,
    "BatchNorm switched to evaluation inside `training_step`",
    tried="a forward in each mode in every step",
    outcome="differs: each rank reads its own running statistics, as `ddp` does with `broadcast_buffers=False`; "
    "parameters are identical on all ranks",
)
def test_statistics_read_within_a_step_are_the_ranks_own() -> None:
    ours, theirs = run_both(_fit_switching)
    assert_ranks_identical(ours + theirs)
