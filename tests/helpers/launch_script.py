"""One training to be launched in every way there is; as a script it says how it ended.

``launch_script.py fit STRATEGY`` trains once, ``twice`` is two trainers in turn, ``cli ...`` is a LightningCLI.
"""

from __future__ import annotations

import hashlib
import sys
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.cli import LightningCLI
from torch import Tensor
from torch.utils.data import DataLoader

import ringstrategy
from tests.helpers.models import Batch, Regression, shard

__all__ = ["BATCH_SIZE", "ROWS", "Sharded", "digest", "trainer"]

WORLD_SIZE, ROWS, BATCH_SIZE = 2, 24, 4


class Sharded(Regression):
    """Brings its data: each rank has its share."""

    def __init__(self) -> None:
        super().__init__()

    def _shard(self) -> DataLoader[tuple[Tensor, ...]]:
        return shard(self.trainer.global_rank, self.trainer.world_size, ROWS, BATCH_SIZE)

    train_dataloader = val_dataloader = test_dataloader = _shard

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("loss", self.loss(batch), sync_dist=True)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("loss", self.loss(batch), sync_dist=True)


def digest(module: torch.nn.Module) -> str:
    """Stands for the bits of all parameters."""
    parameters = torch.cat([parameter.detach().reshape(-1) for parameter in module.parameters()])
    return hashlib.sha256(parameters.numpy().tobytes()).hexdigest()[:16]


def trainer(strategy: Any, **options: Any) -> pl.Trainer:
    """A Trainer that starts two ranks."""
    defaults = {
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "use_distributed_sampler": False,
    }
    return pl.Trainer(accelerator="cpu", devices=WORLD_SIZE, strategy=strategy, **(defaults | options))


def fit(strategy: str) -> None:
    """Train, and say what came out."""
    module = Sharded()
    fitted = trainer(strategy)
    fitted.fit(module)
    if fitted.is_global_zero:
        print(f"parameters {digest(module)}", flush=True)


def twice() -> None:
    """Two trainers in turn, each with every entry point."""
    for number in range(2):
        module, user = Sharded(), trainer("ring_ddp")
        (before,) = user.validate(module, verbose=False)
        user.fit(module)
        (validated,) = user.validate(module, verbose=False)
        (tested,) = user.test(module, verbose=False)
        strategy = user.strategy
        assert isinstance(strategy, ringstrategy.RingDDPStrategy)
        print(
            f"trainer {number} rank {user.global_rank}: all-reduces {strategy.communication.all_reduces}, "
            f"parameters {digest(module)}, before {before['loss']:.6f}, "
            f"validated {validated['loss']:.6f}, tested {tested['loss']:.6f}",
            flush=True,
        )


def cli(arguments: list[str]) -> None:
    """A command line as users build it."""
    used = LightningCLI(Sharded, args=arguments, save_config_callback=None)
    if used.trainer.is_global_zero:
        print(f"parameters {digest(used.model)}", flush=True)


if __name__ == "__main__":
    command, *arguments = sys.argv[1:]
    if command == "fit":
        fit(*arguments)
    elif command == "twice":
        twice()
    else:
        cli(arguments)
