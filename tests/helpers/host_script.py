"""A training that spans hosts, in float64; as a script it says how each rank ended.

``host_script.py NODES DEVICES [NAME=VALUE ...]``, the values being those of :class:`Options`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import timedelta

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from ringstrategy import PipelineStrategy, RingDDPStrategy
from tests.helpers.hosts import LINK
from tests.helpers.launch_script import digest
from tests.helpers.models import Batch, Regression, network, shard

__all__ = ["BATCH_SIZE", "STEPS", "OnHosts", "Options", "strategy_of"]

STEPS, BATCH_SIZE = 5, 3  # of each rank


@dataclass
class Options:
    """What the training is like.

    Attributes:
        timeout: of the strategy, in seconds.
        raises: the rank that raises in the third step, or -1.
        cuts: the rank that cuts the link of its host then, or -1.
        killed: the rank that is killed then, or -1.
        meets: 1 if ranks wait for each other after the third step, in a barrier of the strategy.
        steps: of each rank.
        pause: seconds that a step takes at least.
        stages: of a pipeline; 0 trains data-parallel.
        save: file for rank 0's parameters.
    """

    timeout: float = 60.0
    raises: int = -1
    cuts: int = -1
    killed: int = -1
    meets: int = 0
    steps: int = STEPS
    pause: float = 0.0
    stages: int = 0
    save: str = ""


class OnHosts(Regression):
    """Brings its data, and may be slow or raise."""

    def __init__(self, options: Options) -> None:
        super().__init__(net=network(dtype=torch.float64))
        self.options = options

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        ranks = self.trainer.world_size // max(self.options.stages, 1)
        place = self.trainer.global_rank // max(self.options.stages, 1)
        return shard(place, ranks, ranks * self.options.steps * BATCH_SIZE, BATCH_SIZE, torch.float64)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        time.sleep(self.options.pause)
        if batch_idx == 2:
            self._strike(self.trainer.global_rank)
            if self.options.meets:
                self.trainer.strategy.barrier("the third step")
        return super().training_step(batch, batch_idx)

    def _strike(self, rank: int) -> None:
        if rank == self.options.cuts:
            subprocess.run(["ip", "link", "set", LINK, "down"], check=True)
        if rank == self.options.killed:
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == self.options.raises:
            raise ValueError(f"boom-on-rank-{rank}")


def strategy_of(options: Options) -> RingDDPStrategy:
    """The strategy under test, with the timeout that is asked for."""
    timeout = timedelta(seconds=options.timeout)
    if options.stages:
        return PipelineStrategy(num_stages=options.stages, chunks=1, timeout=timeout)
    return RingDDPStrategy(timeout=timeout)


def train(nodes: int, devices: int, options: Options) -> None:
    """Train, and say on each rank what came out."""
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy=strategy_of(options),
        devices=devices,
        num_nodes=nodes,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    module = OnHosts(options)
    trainer.fit(module)
    ring = trainer.strategy
    assert isinstance(ring, RingDDPStrategy)
    ended = {"rank": trainer.global_rank, "parameters": digest(module), "bytes_sent": ring.communication.bytes_sent}
    print(json.dumps(ended), flush=True)
    if options.save and trainer.is_global_zero:
        torch.save(module.state_dict(), options.save)


if __name__ == "__main__":
    nodes, devices, *rest = sys.argv[1:]
    given = dict(one.split("=", 1) for one in rest)
    kinds = {name: type(value) for name, value in vars(Options()).items()}
    train(int(nodes), int(devices), Options(**{name: kinds[name](value) for name, value in given.items()}))
