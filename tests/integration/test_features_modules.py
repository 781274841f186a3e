"""What modules may be made of under ``ring_ddp``."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint

from tests.helpers.compare import (
    Logged,
    Place,
    Result,
    assert_same,
    fit,
    fit_alone,
    fit_both,
    normalised,
    result_of,
    run_alone,
    run_both,
    run_under,
)
from tests.helpers.features import feature
from tests.helpers.models import Batch, Regression, network
from tests.helpers.ranks import RanksFailedError

pytestmark = pytest.mark.slow  # the whole table takes minutes

_GROUP = "Modules"


class _Blocks(nn.Module):
    """Three blocks, of which one is used twice, recomputed in backward or not."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.inner = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
            self.outer = nn.Linear(8, 3)
        self._reentrant = reentrant

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = inputs.requires_grad_()  # without, a reentrant segment has no gradient
        for block in (self.inner, self.inner, self.outer):
            recomputed = self._reentrant is not None
            hidden = checkpoint(block, hidden, use_reentrant=self._reentrant) if recomputed else block(hidden)
        return hidden


class _Recomputes(Regression):
    def __init__(self, rank: int, reentrant: bool | None, step: str) -> None:
        super().__init__(rank, _Blocks(reentrant))
        self.automatic_optimization = step == "automatic"
        self._step = step

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        if self.automatic_optimization:
            return self.loss(batch)
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        if self._step == "manual_backward":
            self.manual_backward(self.loss(batch))
        else:
            torch.autograd.backward(self.loss(batch))  # not Lightning's
        optimizer.step()
        return None


_STEPS = ["automatic", "manual_backward", "plain backward"]


def _fit_recomputing(place: Place, reentrant: list[bool | None]) -> list[Result]:
    options = {"limit_val_batches": 0}
    return [fit(place, partial(_Recomputes, reentrant=r, step=step), options) for r in reentrant for step in _STEPS]


@feature(
    _GROUP,
    "Gradient checkpointing",
    tried="reentrant and not, a block used twice, automatic and manual optimisation, plain `loss.backward()`",
    outcome="ranks identical, within 1e-6 of one process that keeps its activations",
)
def test_gradient_checkpointing() -> None:
    ours = run_under("ring_ddp", _fit_recomputing, [True, False])
    alone = run_alone(_fit_recomputing, [None])
    for index in range(2 * len(_STEPS)):
        assert_same([rank[index] for rank in ours], alone[index % len(_STEPS)], tolerance=1e-6)


class _Convolutional(Regression):
    def __init__(self, rank: int) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(1)
            net = nn.Sequential(
                nn.Unflatten(1, (2, 2, 2)), nn.Conv2d(2, 4, 2, padding=1), nn.BatchNorm2d(4), nn.ReLU(),
                nn.Conv2d(4, 3, 3), nn.Flatten(),
            )  # fmt: skip
        super().__init__(rank, net.to(memory_format=torch.channels_last))

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.record("strides", [p.grad.stride() == p.stride() for p in self.parameters() if p.grad is not None])


@feature(
    _GROUP,
    "`channels_last` parameters",
    tried="convolutions and BatchNorm",
    outcome="same bits, gradients have the strides of their parameters",
)
def test_channels_last() -> None:
    ours, theirs = fit_both(_Convolutional, limit_val_batches=0)
    assert_same(ours, theirs)
    assert all(all(flags) for rank in ours for flags in rank.records["strides"])


class _NothingToTrain(Logged):
    """Frozen, or without any parameter."""

    def __init__(self, rank: int, empty: bool) -> None:
        super().__init__(rank, nn.Identity() if empty else network())
        self.requires_grad_(False)
        self.automatic_optimization = False  # Lightning wants a loss in the automatic one

    def loss(self, batch: Batch) -> Tensor:
        self.record("batch", batch[0][0, 0].item())
        return F.mse_loss(self.net(batch[0])[:, :3], batch[1])

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> None:
        return None


def _fit_nothing(place: Place) -> list[Result]:
    return [fit(place, partial(_NothingToTrain, empty=empty), {}) for empty in (False, True)]


@feature(
    _GROUP,
    "Nothing to train",
    tried="all parameters frozen, or none at all, no optimizer",
    outcome="metrics within 1e-6 of one process",
)
def test_nothing_to_train() -> None:
    ours = run_under("ring_ddp", _fit_nothing)
    for index, alone in enumerate(run_alone(_fit_nothing)):
        first, second = (rank[index] for rank in ours)
        torch.testing.assert_close(first.metrics, alone.metrics, rtol=0, atol=1e-6)
        torch.testing.assert_close(first.metrics, second.metrics, rtol=0, atol=0)
        torch.testing.assert_close(first.state, alone.state, rtol=0, atol=0)
        assert len(first.records["batch"]) == 12


def _fit_synchronised(place: Place) -> None:
    place.trainer(sync_batchnorm=True).fit(Regression(place.rank, normalised()), place.shard())


@feature(_GROUP, "`sync_batchnorm` on CPU", tried="training with BatchNorm", outcome="torch refuses it, as with `ddp`")
@pytest.mark.parametrize(("strategy", "message"), [
    ("ring_ddp", "SyncBatchNorm expected input tensor to be on GPU"),
    ("ddp", "SyncBatchNorm layers only work with GPU modules"),
])  # fmt: skip
def test_synchronised_batch_norm_is_refused(strategy: str, message: str) -> None:
    with pytest.raises(RanksFailedError, match=message):
        run_under(strategy, _fit_synchronised)


class _Gathers(Regression):
    """Its loss takes every rank's outputs, as in contrastive learning."""

    def loss(self, batch: Batch) -> Tensor:
        outputs: Tensor = self.net(batch[0])
        everyones = self.all_gather(outputs, sync_grads=True)
        assert isinstance(everyones, Tensor)
        return F.mse_loss(outputs, batch[1]) + everyones.reshape(-1, 3).mean(dim=0).square().sum()


class _GathersAlone(Regression):
    def loss(self, batch: Batch) -> Tensor:
        outputs: Tensor = self.net(batch[0])
        return F.mse_loss(outputs, batch[1]) + outputs.mean(dim=0).square().sum()


@feature(
    _GROUP, "`self.all_gather(sync_grads=True)`", tried="a loss over the outputs of all ranks", outcome="same bits"
)
def test_gathering_with_gradients() -> None:
    ours, theirs = fit_both(_Gathers, limit_val_batches=0)
    assert_same(ours, theirs)
    assert_same(ours, fit_alone(_GathersAlone, limit_val_batches=0), tolerance=1e-6)


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.out, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.out.weight = self.into.weight

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.last(torch.tanh(self.out(torch.tanh(self.into(inputs)))))
        return output


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.recurrent = nn.LSTM(8, 3, num_layers=2, batch_first=True)

    def forward(self, inputs: Tensor) -> Tensor:
        rows: Tensor = self.recurrent(self.layer(inputs[:, None, :]))[0][:, 0]
        return rows


def _parametrized() -> nn.Module:
    return nn.Sequential(weight_norm(nn.Linear(8, 8)), nn.Dropout(0.2), spectral_norm(nn.Linear(8, 3)))


def _fit_architectures(place: Place) -> list[Result]:
    results = []
    for make in (_Tied, _Attention, _parametrized):
        torch.manual_seed(1)
        module = Regression(place.rank, make())
        trainer = place.trainer()
        trainer.fit(module, place.shard())
        results.append(result_of(trainer, module))
    return results


@feature(
    _GROUP,
    "Tied weights, `weight_norm`, `spectral_norm`, attention, LSTM, dropout",
    tried="three networks",
    outcome="same bits",
)
def test_architectures() -> None:
    for of_ours, of_theirs in zip(*(zip(*ranks, strict=True) for ranks in run_both(_fit_architectures)), strict=True):
        assert_same(of_ours, of_theirs)
