"""One training to be launched in every way there is; as a script it says how it ended.

Commands: ``fit STRATEGY`` trains once, ``nodes STRATEGY`` on one rank of each of two nodes, ``twice STRATEGY`` with two
trainers in turn, ``cli ...`` as a LightningCLI; ``late`` ranks go on after the training, one ``late RANK`` fails there.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import lightning.pytorch as pl
import torch
from lightning.pytorch.cli import LightningCLI
from torch import Tensor
from torch.utils.data import DataLoader

from ringstrategy import RingDDPStrategy
from ringstrategy.process_group import Host
from tests.helpers.models import Batch, Regression, shard

__all__ = ["BATCH_SIZE", "ROWS", "WORLD_SIZE", "Sharded", "Used", "digest", "fit", "trainer", "twice"]

WORLD_SIZE, ROWS, BATCH_SIZE = 2, 24, 4


class Sharded(Regression):
    """Brings its data: each rank has its share."""

    def __init__(self) -> None:
        super().__init__()

    def _shard(self) -> DataLoader[tuple[Tensor, ...]]:
        return shard(self.trainer.global_rank, self.trainer.world_size, ROWS, BATCH_SIZE)

    train_dataloader = val_dataloader = test_dataloader = predict_dataloader = _shard

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("loss", self.loss(batch), sync_dist=True)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self.loss(batch)


class Used(NamedTuple):
    """What came out of a trainer: parameters, losses before and after training, and the number of all-reduces.

    ``predicted`` is the mean over this rank's batches, the other losses are those that were logged.
    """

    parameters: str
    before: float
    validated: float
    tested: float
    predicted: float
    all_reduces: int


def digest(module: torch.nn.Module) -> str:
    """Stands for the bits of all parameters."""
    parameters = torch.cat([parameter.detach().reshape(-1) for parameter in module.parameters()])
    return hashlib.sha256(parameters.numpy().tobytes()).hexdigest()[:16]


def trainer(strategy: Any, **options: Any) -> pl.Trainer:
    """A Trainer that starts two ranks."""
    defaults = {
        "devices": WORLD_SIZE,
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "use_distributed_sampler": False,
    }
    return pl.Trainer(accelerator="cpu", strategy=strategy, **(defaults | options))


def fit(strategy: str, **options: Any) -> None:
    """Train, and say what came out."""
    module = Sharded()
    fitted = trainer(strategy, **options)
    fitted.fit(module)
    if fitted.is_global_zero:
        print(f"parameters {digest(module)}", flush=True)


def fit_on_nodes(strategy: str) -> None:
    """Train on one rank of each of torchrun's two nodes, which they take for hosts that share nothing."""
    host = replace(Host.here(), name=f"node-{os.environ['GROUP_RANK']}")
    with patch.object(Host, "here", lambda: host):
        fit(strategy, devices=1, num_nodes=WORLD_SIZE)


def twice(make: Callable[[], pl.Trainer]) -> list[Used]:
    """Use two trainers in turn, each with every entry point."""
    return [_use(make()) for _ in range(2)]


def _use(trainer: pl.Trainer) -> Used:
    module = Sharded()
    (before,) = trainer.validate(module, verbose=False)
    trainer.fit(module)
    (validated,) = trainer.validate(module, verbose=False)
    (tested,) = trainer.test(module, verbose=False)
    losses: list[Any] | None = trainer.predict(module)
    assert losses
    strategy = trainer.strategy
    assert isinstance(strategy, RingDDPStrategy)
    all_reduces = strategy.communication.all_reduces
    return Used(
        digest(module), before["loss"], validated["loss"], tested["loss"], float(sum(losses) / len(losses)), all_reduces
    )


def late(failing: int | None = None) -> None:
    """Train, and have ranks other than 0 end later than rank 0, or fail."""
    fitted = trainer("ring_ddp")
    fitted.fit(Sharded())
    if fitted.global_rank == 0:
        print("rank 0 is done", flush=True)
    else:
        time.sleep(2.0)
        if fitted.global_rank == failing:
            raise ValueError(f"late on rank {failing}")
        print(f"rank {fitted.global_rank} is done", flush=True)


def cli(arguments: list[str]) -> None:
    """A command line as users build it."""
    used = LightningCLI(Sharded, args=arguments, save_config_callback=None)
    if used.trainer.is_global_zero:
        print(f"parameters {digest(used.model)}", flush=True)


if __name__ == "__main__":
    command, *arguments = sys.argv[1:]
    if command == "fit":
        fit(*arguments)
    elif command == "nodes":
        fit_on_nodes(*arguments)
    elif command == "twice":
        for used in twice(partial(trainer, *arguments)):
            print(json.dumps(used), flush=True)
    elif command == "late":
        late(*map(int, arguments))
    else:
        cli(arguments)
