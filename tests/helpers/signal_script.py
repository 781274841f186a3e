"""A long training that says when all ranks train and how it ended: ``signal_script.py STRATEGY``."""

from __future__ import annotations

import sys
import time

import lightning.pytorch as pl
from torch import Tensor

from tests.helpers.launch_script import Sharded, trainer
from tests.helpers.models import Batch

__all__ = ["TRAINING", "Slow", "train"]

TRAINING = "rank {} trains"


class Slow(Sharded):
    """Takes a fifth of a second for a step, of training or of validation."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        time.sleep(0.2)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        time.sleep(0.2)
        super().validation_step(batch, batch_idx)


class Teller(pl.Callback):
    """Says what the ranks go through."""

    def on_train_batch_end(self, trainer: pl.Trainer, *args: object) -> None:
        if trainer.global_step == 2:
            print(TRAINING.format(trainer.global_rank), flush=True)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        print(f"on_exception on rank {trainer.global_rank}: {type(exception).__name__}", flush=True)


def train(strategy: str) -> None:
    """Train for a minute, unless something comes in between."""
    trainer(strategy, callbacks=[Teller()], max_epochs=50).fit(Slow())
    print("finished", flush=True)


if __name__ == "__main__":
    train(sys.argv[1])
