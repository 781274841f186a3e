"""One scenario under ``ring_ddp`` and under Lightning's ``ddp``, on the same ranks and with the same seeds."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.helpers.assertions import assert_ranks_identical
from tests.helpers.models import Batch, Regression, network, shard, state_of
from tests.helpers.ranks import run_ranks
from tests.helpers.trainers import STRATEGY, trainer_on_rank

__all__ = [
    "Logged",
    "Normalised",
    "Place",
    "Result",
    "assert_same",
    "fit",
    "fit_alone",
    "fit_both",
    "fit_under",
    "normalised",
    "result_of",
    "run_alone",
    "run_both",
    "run_under",
]

T = TypeVar("T")


@dataclass(frozen=True)
class Place:
    """Where a scenario runs: one rank, under one of the two strategies."""

    rank: int
    world_size: int
    strategy: str

    def trainer(self, **options: Any) -> pl.Trainer:
        """A Trainer here; see :func:`tests.helpers.trainers.trainer_on_rank`."""
        return trainer_on_rank(self.rank, self.world_size, **({"strategy": self.strategy} | options))

    def shard(self, rows: int = 24, batch_size: int = 4) -> DataLoader[tuple[Tensor, ...]]:
        """This rank's share of the data, by default of six batches.

        Args:
            rows: of :func:`tests.helpers.models.data`, over all ranks.
            batch_size: over all ranks, so that it means the same in one process.
        """
        return shard(self.rank, self.world_size, rows, batch_size // self.world_size)


@dataclass(frozen=True)
class Result:
    """A rank after a scenario.

    Attributes:
        state: parameters and buffers by name.
        metrics: ``trainer.callback_metrics``.
        global_step: of the Trainer.
        epoch: of the Trainer.
        records: what the module recorded.
    """

    state: dict[str, Tensor]
    metrics: dict[str, Tensor]
    global_step: int
    epoch: int
    records: dict[str, list[Any]]


def result_of(trainer: pl.Trainer, module: pl.LightningModule) -> Result:
    """The rank as it is now."""
    return Result(
        state=state_of(module),
        metrics={name: value.clone() for name, value in trainer.callback_metrics.items()},
        global_step=trainer.global_step,
        epoch=trainer.current_epoch,
        records=getattr(module, "records", {}),
    )


def normalised() -> nn.Sequential:
    """The network of the tests, with a BatchNorm, whose buffers differ between ranks that do not share them."""
    return nn.Sequential(*network(), nn.BatchNorm1d(3))


class Logged(Regression):
    """Regression that logs and predicts in every stage."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("val_loss", F.mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("test_loss", F.mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        prediction: Tensor = self.net(batch[0])
        return prediction


class Normalised(Logged):
    """The same with a BatchNorm."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank, normalised())


def run_both(
    scenario: Callable[..., T], *args: Any, theirs: str = "ddp", timeout: float = 60.0
) -> tuple[list[T], list[T]]:
    """Run ``scenario(place, *args)`` on two ranks, under ``ring_ddp`` and then under ``ddp``.

    Args:
        scenario: a function at module level; its arguments are copied for each run.
        *args: further arguments.
        theirs: the strategy to compare with.
        timeout: seconds.

    Returns:
        What it returned under each strategy, by rank.
    """
    results = run_ranks(_run_under, 2, (STRATEGY, theirs), scenario, args, timeout=timeout)
    return [ours for ours, _ in results], [theirs for _, theirs in results]


def run_under(strategy: str, scenario: Callable[..., T], *args: Any) -> list[T]:
    """Run ``scenario(place, *args)`` on two ranks under one strategy; results by rank."""
    return [result for (result,) in run_ranks(_run_under, 2, (strategy,), scenario, args)]


def run_alone(scenario: Callable[..., T], *args: Any) -> T:
    """Run ``scenario(place, *args)`` in one process, on whole batches and without any strategy for several."""
    results: list[list[T]] = run_ranks(_run_under, 1, ("auto",), scenario, args, init=False)
    return results[0][0]


def _run_under(
    rank: int, world_size: int, strategies: Sequence[str], scenario: Callable[..., T], args: tuple[Any, ...]
) -> list[T]:
    results = []
    for strategy in strategies:
        pl.seed_everything(rank, verbose=False)
        results.append(scenario(Place(rank, world_size, strategy), *copy.deepcopy(args)))
    return results


def fit(place: Place, build: Callable[[int], pl.LightningModule], options: dict[str, Any]) -> Result:
    """Train on this rank's share of the data, which also is what validation gets."""
    module = build(place.rank)
    trainer = place.trainer(**options)
    trainer.fit(module, place.shard(), place.shard())
    return result_of(trainer, module)


def fit_both(build: Callable[[int], pl.LightningModule] = Logged, **options: Any) -> tuple[list[Result], list[Result]]:
    """Train on two ranks under each of the strategies; see :func:`fit` and :func:`run_both`."""
    return run_both(fit, build, options)


def fit_under(strategy: str, build: Callable[[int], pl.LightningModule] = Logged, **options: Any) -> list[Result]:
    """Train on two ranks under one strategy; see :func:`fit` and :func:`run_under`."""
    return run_under(strategy, fit, build, options)


def fit_alone(build: Callable[[int], pl.LightningModule] = Logged, **options: Any) -> Result:
    """Train in one process on the same batches; see :func:`fit` and :func:`run_alone`."""
    return run_alone(fit, build, options)


def assert_same(ours: Sequence[Result], theirs: Result | Sequence[Result], tolerance: float = 0.0) -> None:
    """Our ranks agree with each other bit for bit, and rank 0 with others in state, metrics and progress.

    Args:
        ours: results of ``ring_ddp``, by rank.
        theirs: those of ``ddp``, or the result of one process.
        tolerance: absolute; 0 asks for the same bits.
    """
    assert_ranks_identical([result.state for result in ours])
    our, their = ours[0], theirs if isinstance(theirs, Result) else theirs[0]
    assert (our.global_step, our.epoch) == (their.global_step, their.epoch)
    assert our.global_step > 0, "nothing was trained"
    torch.testing.assert_close(our.state, their.state, rtol=0.0, atol=tolerance)
    torch.testing.assert_close(our.metrics, their.metrics, rtol=0.0, atol=tolerance)
