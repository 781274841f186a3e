"""How fast training is, and how much of it is waiting for other ranks."""

from __future__ import annotations

import time
from typing import Any

import lightning.pytorch as pl
import torch

__all__ = ["TrainingMeter"]


class TrainingMeter(pl.Callback):
    """Logs two numbers at the end of every epoch, both over the whole run so far.

    ``samples_per_s``: training samples per second of the whole run; the stages of a pipeline, which read the same
    ones, count once. ``communication_share``: the share of the training time in which a rank waited for others,
    averaged over the ranks that read samples of their own; only where the strategy counts it
    (``strategy.communication.exposed_seconds``).

    The clock runs from batch to batch. It stands still in validation, between epochs, and for the first batches,
    in which memory is allocated and the order of the gradients is learnt. Fewer batches than that log nothing.

    Args:
        skip_batches: number of first batches left out.
    """

    def __init__(self, skip_batches: int = 1) -> None:
        self.skip_batches = skip_batches
        self.batches = 0
        self.samples = 0
        self.seconds = 0.0
        self.waited = 0.0
        self._mark: tuple[float, float] | None = None

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Start the clock, unless it still runs from the batch before."""
        if self._mark is None:
            self._mark = _clocks(trainer)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Add the time since the end of the batch before."""
        if trainer.is_last_batch and pl_module.device.type == "cuda":
            torch.cuda.synchronize(pl_module.device)  # the host runs ahead of the device
        now = _clocks(trainer)
        if self.batches >= self.skip_batches and self._mark is not None:
            _, labels = batch
            self.samples += len(labels)
            self.seconds += now[0] - self._mark[0]
            self.waited += now[1] - self._mark[1]
        self.batches += 1
        self._mark = now

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop the clock."""
        self._mark = None

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop the clock and log."""
        self._mark = None
        if self.seconds == 0.0:
            return
        pl_module.log("samples_per_s", self.samples / self.seconds * _readers(trainer), sync_dist=True)
        if _seconds_waited(trainer) is not None:
            pl_module.log("communication_share", self.waited / self.seconds, sync_dist=True)


def _readers(trainer: pl.Trainer) -> int:
    """How many ranks read samples of their own."""
    sampler = trainer.distributed_sampler_kwargs
    return 1 if sampler is None else int(sampler["num_replicas"])


def _clocks(trainer: pl.Trainer) -> tuple[float, float]:
    """Seconds by the wall, and those of them in which this rank waited for others."""
    return time.perf_counter(), _seconds_waited(trainer) or 0.0


def _seconds_waited(trainer: pl.Trainer) -> float | None:
    """What the strategy has counted so far; ``None`` if it does not count."""
    communication = getattr(trainer.strategy, "communication", None)
    return None if communication is None else float(communication.exposed_seconds)
