"""Evaluations that count every sample once, or say that they do not."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sized
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities import rank_zero_warn
from lightning.pytorch.trainer.states import RunningStage
from torch.utils.data import DataLoader, RandomSampler, Sampler, SequentialSampler

from ringstrategy import _lightning
from ringstrategy.evaluation.dealt_sampler import DealtSampler, Shuffled
from ringstrategy.evaluation.loops import UnevenEvaluationLoop, UnevenPredictionLoop
from ringstrategy.evaluation.ranks import EvaluatingRanks

__all__ = ["Evaluation"]


class Evaluation:
    """Has a trainer evaluate every sample once.

    Args:
        exact: if not, it only warns where Lightning's sampler repeats samples.

    Raises:
        ValueError: ``exact`` is neither True nor False.
    """

    def __init__(self, exact: bool) -> None:
        if not isinstance(exact, bool):
            raise ValueError(f"exact_evaluation={exact!r} must be True or False.")
        self._exact = exact
        self._warned = False
        self._undo: list[Callable[[], None]] = []

    def attach(self, trainer: pl.Trainer, ranks: EvaluatingRanks) -> None:
        """Change the trainer's samplers and loops, until :meth:`detach`.

        Args:
            trainer: it has not loaded data for an evaluation yet.
            ranks: that evaluate together.
        """
        self.detach()
        sampling = trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}

        def sampler(loader: DataLoader[Any], shuffle: bool, stage: RunningStage) -> Sampler[int] | None:
            if self._exact:
                return _deal(loader, shuffle and stage != RunningStage.PREDICTING, **sampling)
            if stage != RunningStage.PREDICTING:  # there, Lightning's sampler does not repeat either
                self._warn(loader, stage, sampling["num_replicas"])
            return None

        self._undo.append(_lightning.with_evaluation_samplers(trainer, sampler))
        if self._exact:
            for loop in _lightning.evaluation_loops(trainer):
                self._undo.append(_lightning.with_loop_class(loop, UnevenEvaluationLoop, ranks=ranks))
            predicting = trainer.predict_loop
            self._undo.append(_lightning.with_loop_class(predicting, UnevenPredictionLoop, ranks=ranks))

    def detach(self) -> None:
        """Undo :meth:`attach`. Idempotent."""
        while self._undo:
            self._undo.pop()()

    def _warn(self, loader: DataLoader[Any], stage: RunningStage, ranks: int) -> None:
        samples = len(_in_order(loader))
        repeated = -samples % ranks
        if repeated and not self._warned:
            self._warned = True
            again = "1 sample once more" if repeated == 1 else f"{repeated} samples once more"
            rank_zero_warn(
                f"The {samples} samples of {stage.dataloader_prefix}_dataloader do not divide evenly among {ranks} "
                f"ranks, so that Lightning's sampler evaluates {again}, and metrics count what is repeated. "
                "exact_evaluation=True of the strategy evaluates each sample once."
            )


def _in_order(loader: DataLoader[Any]) -> Sized:
    """Whatever has as many elements as one process evaluates samples."""
    sampler = loader.sampler
    if isinstance(sampler, (RandomSampler, SequentialSampler)):
        assert isinstance(loader.dataset, Sized)
        return loader.dataset
    assert isinstance(sampler, Sized)
    return sampler


def _deal(loader: DataLoader[Any], shuffle: bool, num_replicas: int, rank: int) -> DealtSampler:
    """Deal what Lightning's sampler would distribute: the dataset, or what a sampler of the user's draws of it."""
    order: Iterable[int] = loader.sampler
    if isinstance(order, (RandomSampler, SequentialSampler)):
        assert isinstance(loader.dataset, Sized)
        count = len(loader.dataset)
        order = Shuffled(count, int(os.getenv("PL_GLOBAL_SEED", "0"))) if shuffle else range(count)
    batch_size = getattr(loader.batch_sampler, "batch_size", None)
    return DealtSampler(order, batch_size if isinstance(batch_size, int) else 1, rank, num_replicas)
