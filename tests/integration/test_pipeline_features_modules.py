"""What modules may be made of, under a pipeline."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint

from tests.helpers.assertions import assert_ranks_identical
from tests.helpers.compare import Result, result_of
from tests.helpers.features import feature
from tests.helpers.pipelines import (
    Batch,
    Classification,
    Pipelined,
    assert_like_one_process,
    batches,
    fit,
    fit_alone,
    fit_stages,
    layered,
    run_alone,
    run_stages,
)
from tests.helpers.ranks import RanksFailedError

_GROUP = "Modules"
pytestmark = pytest.mark.slow  # the whole table takes minutes

_LOAD = partial(batches, 12, 12, 12)


class _Recomputed(nn.Module):
    """A block of its own that is recomputed in backward, or not."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
        self._reentrant = reentrant

    def forward(self, inputs: Tensor) -> Tensor:
        if self._reentrant is None:
            output: Tensor = self.inner(inputs)
            return output
        recomputed: Tensor = checkpoint(self.inner, inputs, use_reentrant=self._reentrant)
        return recomputed


def _recomputing(reentrant: bool | None) -> Classification:
    torch.manual_seed(1)
    block = _Recomputed(reentrant)
    return Classification(nn.Sequential(nn.Linear(8, 8), block, nn.Linear(8, 8), block, nn.Linear(8, 4)).double())


def _fit_each(place: Pipelined, builds: list[Any]) -> list[Result]:
    return [fit(place, build, _LOAD, {}) for build in builds]


@feature(
    _GROUP,
    "`torch.utils.checkpoint(use_reentrant=False)`",
    tried="a block used on two stages, both schedules",
    outcome="like one process that keeps its activations; `PipelineStrategy(checkpoint=...)` makes it superfluous",
)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_gradient_checkpointing(schedule: str) -> None:
    ranks = fit_stages(2, partial(_recomputing, False), _LOAD, chunks=2, schedule=schedule)
    assert_like_one_process(ranks, fit_alone(partial(_recomputing, None), _LOAD))


@feature(
    _GROUP,
    "`torch.utils.checkpoint(use_reentrant=True)`",
    tried="the same block",
    outcome="torch refuses it when the layers are measured, and names the remedy: `use_reentrant=False`",
)
def test_reentrant_checkpointing_is_refused() -> None:
    with pytest.raises(RanksFailedError, match="RuntimeError: When use_reentrant=True"):
        fit_stages(2, partial(_recomputing, True), _LOAD, chunks=2)


class _Convolutional(Classification):
    def __init__(self) -> None:
        torch.manual_seed(1)
        net = nn.Sequential(
            nn.Unflatten(1, (2, 2, 2)), nn.Conv2d(2, 4, 2, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Flatten()
        )
        super().__init__(net.double().to(memory_format=torch.channels_last))

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.record("strides", [p.grad.stride() == p.stride() for p in self.parameters() if p.grad is not None])


@feature(
    _GROUP,
    "`channels_last` parameters",
    tried="convolutions, three stages",
    outcome="like one process, gradients have the strides of their parameters",
)
def test_channels_last() -> None:
    ranks = fit_stages(3, _Convolutional, _LOAD, chunks=2)
    assert_like_one_process(ranks, fit_alone(_Convolutional, _LOAD))
    assert all(all(flags) for rank in ranks for flags in rank.records["strides"])


class _NothingToTrain(Classification):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.automatic_optimization = False  # Lightning wants a loss in the automatic one

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("loss", self.loss(batch))

    def configure_optimizers(self) -> None:
        return None


class _TrainsOneLayer(Classification):
    def __init__(self, layer: int) -> None:
        super().__init__()
        for index, child in enumerate(self.net.children()):
            child.requires_grad_(index == layer)


@feature(
    _GROUP,
    "Frozen layers",
    tried="all of them, without an optimizer; all but the first; all but the last",
    outcome="like one process",
)
def test_frozen_layers() -> None:
    builds: list[Any] = [_NothingToTrain, partial(_TrainsOneLayer, 0), partial(_TrainsOneLayer, 4)]
    ranks = run_stages(_fit_each, 2, builds, chunks=2)
    for expected, *of_ranks in zip(run_alone(_fit_each, builds), *ranks, strict=True):
        for rank in of_ranks:
            torch.testing.assert_close(rank.state, expected.state, rtol=0, atol=1e-9)
            torch.testing.assert_close(rank.metrics, expected.metrics, rtol=0, atol=1e-9)


@feature(
    _GROUP,
    "Frozen layers under 1F1B",
    tried="all but the first; all but the last",
    outcome="like one process",
)
def test_frozen_layers_under_1f1b() -> None:
    builds: list[Any] = [partial(_TrainsOneLayer, 0), partial(_TrainsOneLayer, 4)]
    ranks = run_stages(_fit_each, 2, builds, chunks=2, schedule="1f1b")
    for expected, *of_ranks in zip(run_alone(_fit_each, builds), *ranks, strict=True):
        assert_like_one_process(of_ranks, expected)


def _normalised() -> Classification:
    return Classification(nn.Sequential(*list(layered())[:4], nn.BatchNorm1d(8), nn.Linear(8, 4)).double())


@feature(
    _GROUP,
    "`sync_batchnorm` on CPU",
    tried="training with BatchNorm",
    outcome="torch refuses it, as with `ddp`",
)
def test_synchronised_batch_norm_is_refused() -> None:
    with pytest.raises(RanksFailedError, match="SyncBatchNorm expected input tensor to be on GPU"):
        fit_stages(2, _normalised, _LOAD, options={"sync_batchnorm": True}, chunks=1, balance=[3, 3])


class _Gathers(Classification):
    """Its loss takes every replica's outputs, as in contrastive learning."""

    def loss(self, batch: Batch) -> Tensor:
        outputs: Tensor = self.net(batch[0])
        everyones = self.all_gather(outputs, sync_grads=True)
        assert isinstance(everyones, Tensor)
        # In one process, without a strategy, nothing is gathered.
        replicas = everyones.shape[0] if everyones.dim() == 3 else 1
        self.record("replicas", replicas)
        return F.cross_entropy(outputs, batch[1]) + everyones.reshape(-1, 4).mean(dim=0).square().sum()


@feature(
    _GROUP,
    "`self.all_gather(sync_grads=True)`",
    tried="a loss over the outputs of all pipelines: one, and two on the same rows",
    outcome="stages do not count, pipelines do; like one process",
)
@pytest.mark.parametrize("replicas", [1, 2])
def test_gathering_with_gradients(replicas: int) -> None:
    ranks = fit_stages(2 * replicas, _Gathers, _LOAD, options={"limit_val_batches": 0}, num_stages=2, chunks=2)
    alone = fit_alone(_Gathers, _LOAD, options={"limit_val_batches": 0})
    assert_like_one_process(ranks, alone)
    assert all(rank.records["replicas"] == [replicas] * 3 for rank in ranks)


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.out, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.out.weight = self.into.weight

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.last(torch.tanh(self.out(torch.tanh(self.into(inputs)))))
        return output


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.recurrent = nn.LSTM(8, 4, num_layers=2, batch_first=True)

    def forward(self, inputs: Tensor) -> Tensor:
        rows: Tensor = self.recurrent(self.layer(inputs[:, None, :]))[0][:, 0]
        return rows


def _parametrized() -> nn.Module:
    return nn.Sequential(weight_norm(nn.Linear(8, 8)), nn.Tanh(), spectral_norm(nn.Linear(8, 4)))


def _build(kind: str) -> Classification:
    torch.manual_seed(1)
    network = {"tied": _Tied, "attention": _Attention, "parametrized": _parametrized}[kind]()
    return Classification(network.double())


@feature(
    _GROUP,
    "Tied weights, `weight_norm`, `spectral_norm` (one micro-batch), attention, LSTM",
    tried="three networks, both schedules",
    outcome="like one process",
)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("kind", "chunks"), [("tied", 3), ("attention", 3), ("parametrized", 1)])
def test_architectures(kind: str, chunks: int, schedule: str) -> None:
    build = partial(_build, kind)
    ranks = fit_stages(2, build, _LOAD, chunks=chunks, schedule=schedule)
    assert_like_one_process(ranks, fit_alone(build, _LOAD))


def _dropping() -> Classification:
    return Classification(nn.Sequential(nn.Dropout(0.3), *layered(), nn.Dropout(0.3)))


def _fit_twice(place: Pipelined) -> list[Result]:
    results = []
    for _ in range(2):
        torch.manual_seed(7)
        results.append(fit(place, _dropping, _LOAD, {}))
    return results


@feature(
    _GROUP,
    "Dropout",
    tried="on both stages, recomputed in backward and not, twice the same run",
    outcome="ranks identical, same bits again; other masks than in one process",
)
def test_dropout() -> None:
    runs = [run_stages(_fit_twice, 2, chunks=2, checkpoint=mode) for mode in ("always", "never")]
    assert_ranks_identical([result.state for ranks in runs for rank in ranks for result in rank])


class _Alternates(Classification):
    """BatchNorm in training and in evaluation mode, batch by batch, and a buffer that scales the loss."""

    def __init__(self, rank: int) -> None:
        super().__init__(_normalised().net)
        self.register_buffer("seen", torch.zeros(2, dtype=torch.int64))
        self._rank = rank

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.net.get_submodule("4").train(batch_idx % 2 == 0)

    def loss(self, batch: Batch) -> Tensor:
        self.get_buffer("seen").add_(1)
        return super().loss(batch) * self.get_buffer("seen")[0]


def _fit_alternating(place: Pipelined) -> Result:
    module = _Alternates(place.rank)
    trainer = place.trainer()
    trainer.fit(module, _LOAD(), _LOAD())
    return result_of(trainer, module)


@feature(
    _GROUP,
    "Buffers",
    tried="BatchNorm in training and in evaluation mode batch by batch, a buffer outside the network that scales the "
    "loss",
    outcome="like one process",
)
def test_buffers() -> None:
    ranks = run_stages(_fit_alternating, 2, chunks=1, balance=[3, 3])
    assert_like_one_process(ranks, run_alone(_fit_alternating))
