"""A training that one rank ruins: in a chosen phase, in a chosen way. A function for ranks, and a script.

As a script: ``fault_script.py SETTING``, where SETTING is what :meth:`Setting.to_json` returns.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from typing_extensions import override

from ringstrategy import PipelineStrategy, RingDDPStrategy
from ringstrategy.collectives.links import Link
from ringstrategy.collectives.point_to_point import Messages
from tests.helpers.models import Batch, Regression, network, shard
from tests.helpers.trainers import trainer_on_rank

__all__ = ["PHASES", "Ruined", "Schedule", "Setting", "train_from_launcher", "train_on_rank"]

Schedule = Literal["gpipe", "1f1b"]

# In the order in which a run meets them. All ranks have met, and watch each other, from `setup` to `train end`.
PHASES = (
    "before meeting",
    "setup",
    "optimizers",
    "forward",
    *("first micro-batch", "middle micro-batch", "loss", "backward"),  # the layers of a pipeline's stage, and around
    "all-reduce",
    "validation",
    "validation layers",
    *("weights", "optimizer state"),  # about to be gathered from the stages of a pipeline
    "checkpoint",
    "train end",
    "making whole",
    "teardown",
)
# One checkpoint has been written before the fault, and one batch trained after it.
_FAULTY_BATCH = 2
_BATCHES = 4
_CHUNKS = 4


@dataclass(frozen=True)
class Setting:
    """Who fails, when and how.

    Attributes:
        kind: ``"exception"``, ``"out of memory"`` (which ``training_step`` catches), ``"kill"``, ``"stop"`` (by
            signal), ``"pause"`` (by signal, for two seconds), or ``"sleep"`` (for longer than any timeout).
        rank: the rank that fails.
        phase: one of :data:`PHASES`.
        folder: for checkpoints, and for the moment of the fault.
        timeout: of the strategy, in seconds.
        devices: number of ranks that the script starts.
        start_method: how.
        workers: processes that load data, for each rank.
        schedule: of a pipeline; None trains data-parallel.
        stages: of a pipeline; None for one pipeline over all ranks.
        transport: of the strategy.
        algorithm: of the all-reduce.
    """

    kind: str
    rank: int
    phase: str
    folder: str
    timeout: float = 60.0
    devices: int = 2
    start_method: Literal["popen", "spawn", "fork"] = "popen"
    workers: int = 0
    schedule: Schedule | None = None
    stages: int | None = None
    transport: Literal["auto", "backend"] = "auto"
    algorithm: Literal["auto", "ring", "tree", "naive"] = "auto"

    def to_json(self) -> str:
        """For a command line."""
        return json.dumps(asdict(self))

    @property
    def checkpoints(self) -> Path:
        """Where the run saves."""
        return Path(self.folder) / "checkpoints"

    @property
    def after_failure(self) -> Path:
        """Where the run saves what is left after an exception."""
        return Path(self.folder) / "after failure"

    @property
    def _struck(self) -> Path:
        return Path(self.folder) / "struck"

    def seconds_since(self) -> float:
        """Time since the fault; it must have happened."""
        return time.monotonic() - float(self._struck.read_text())

    def strike(self, rank: int, phase: str) -> None:
        """Fail, if it is this rank's turn, and it has not failed before."""
        if (rank, phase) != (self.rank, self.phase) or self._struck.exists():
            return
        # The clock is the same in all processes.
        self._struck.write_text(str(time.monotonic()))
        if self.kind == "exception":
            raise ValueError(f"boom-on-rank-{rank}")
        if self.kind == "out of memory":
            raise torch.OutOfMemoryError(f"boom-on-rank-{rank}")
        if self.kind == "sleep":
            time.sleep(600)
        if self.kind == "pause":
            subprocess.Popen(["sh", "-c", f"sleep 2; kill -CONT {os.getpid()}"])
        # To this thread and not just to the process, which would let it run on for some microseconds.
        signal.pthread_kill(threading.get_ident(), signal.SIGKILL if self.kind == "kill" else signal.SIGSTOP)


class Ruined(Regression):
    """Strikes in the hooks of the module, and in its layers."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(net=network() if setting.schedule is None else _deep_network())
        self._setting = setting
        self._faulty = ""  # the step whose layers strike
        self._computed = Counter[nn.Module]()
        for layer in self.net.children():
            layer.register_forward_hook(self._in_layer)

    def _strike(self, phase: str) -> None:
        self._setting.strike(self.trainer.global_rank, phase)

    @override
    def setup(self, stage: str) -> None:
        self._strike("setup")

    @override
    def configure_optimizers(self) -> Any:
        self._strike("optimizers")
        return super().configure_optimizers()

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        try:
            return self._training_step(batch, batch_idx)
        except torch.OutOfMemoryError:
            return None  # as those do whose batches are at times too large

    def _training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        if batch_idx == _FAULTY_BATCH:
            self._strike("forward")
            self._faulty = "training"
            if self._setting.phase == "all-reduce":
                # A rank first tells each other rank that it begins, and after its sums that it is done.
                _before_send(Link, self.trainer.world_size, lambda: self._strike("all-reduce"))
                # In a ring, what a rank sends second contains what its neighbour has sent first.
                _before_send(
                    Messages, 2 if self._setting.algorithm == "ring" else 1, lambda: self._strike("all-reduce")
                )
        loss = self.loss(batch)
        if batch_idx == _FAULTY_BATCH:
            self._strike("loss")
        return loss

    def _in_layer(self, layer: nn.Module, _: Any, output: Tensor) -> None:
        if self._faulty == "validation":
            self._strike("validation layers")
        if self._faulty != "training":
            return
        self._computed[layer] += 1
        if output.requires_grad:
            output.register_hook(lambda _: self._strike("backward"))  # type: ignore[no-untyped-call]
        if self._computed[layer] == 1:
            self._strike("first micro-batch")
        elif self._computed[layer] == _CHUNKS // 2:
            self._strike("middle micro-batch")

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        if batch_idx == 1:
            self._strike("validation")
            self._faulty = "validation"
        self.log("validation_loss", self.loss(batch), sync_dist=True)

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.trainer.global_step == _FAULTY_BATCH:
            if self.trainer.is_global_zero and self._setting.rank == 0:
                _when_flushing(lambda: self._strike("checkpoint"))
            else:
                self._strike("checkpoint")

    @override
    def on_train_end(self) -> None:
        self._strike("train end")

    @override
    def teardown(self, stage: str) -> None:
        self._strike("teardown")


def _deep_network() -> nn.Sequential:
    """Five layers: each of two or three stages gets some that train."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))


def _before_send(kind: type[Link | Messages], count: int, strike: Callable[[], None]) -> None:
    """Strike before this rank's ``count``-th token or message to another rank."""
    original, calls = kind.send, 0

    def ruined(*arguments: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == count:
            strike()
        original(*arguments)

    patch.object(kind, "send", ruined).start()


def _when_flushing(strike: Callable[[], None]) -> None:
    """Strike when the checkpoint's file is complete and has not taken its place yet."""
    original = os.fsync

    def ruined(descriptor: int) -> None:
        strike()
        original(descriptor)

    patch.object(os, "fsync", ruined).start()


class RuinedStrategy(RingDDPStrategy):
    """Strikes before the ranks have met."""

    setting: Setting

    @override
    def setup_distributed(self) -> None:
        self.setting.strike(self.local_rank, "before meeting")
        super().setup_distributed()


class RuinedPipeline(PipelineStrategy):
    """Strikes before the ranks have met, and when they are about to give each other what they hold."""

    setting: Setting

    @override
    def setup_distributed(self) -> None:
        self.setting.strike(self.local_rank, "before meeting")
        super().setup_distributed()

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        self._strike_in_second_checkpoint("weights")
        return super().lightning_module_state_dict()

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        self._strike_in_second_checkpoint("optimizer state")
        return super().optimizer_state(optimizer)

    def _strike_in_second_checkpoint(self, phase: str) -> None:
        assert self.lightning_module is not None
        if self.lightning_module.global_step == _FAULTY_BATCH:
            self.setting.strike(self.global_rank, phase)

    @override
    def teardown(self) -> None:
        self.setting.strike(self.global_rank, "making whole")
        super().teardown()


def _strategy(setting: Setting) -> RuinedStrategy | RuinedPipeline:
    common: dict[str, Any] = {
        "timeout": timedelta(seconds=setting.timeout),
        "start_method": setting.start_method,
        "transport": setting.transport,
        "algorithm": setting.algorithm,
    }
    strategy: RuinedStrategy | RuinedPipeline
    if setting.schedule is None:
        strategy = RuinedStrategy(**common)
    else:
        strategy = RuinedPipeline(
            num_stages=setting.stages, chunks=_CHUNKS, schedule=setting.schedule, balance="size", **common
        )
    strategy.setting = setting
    return strategy


def train(setting: Setting, rank: int = 0, trainer: Callable[..., pl.Trainer] = pl.Trainer) -> None:
    """Fit four batches, save after each, and validate.

    Args:
        setting: what goes wrong.
        rank: whose share of the data is taken; what the ranks compute does not matter here.
        trainer: makes the Trainer.
    """
    callbacks: list[pl.Callback] = [ModelCheckpoint(setting.checkpoints, every_n_train_steps=1, save_top_k=-1)]
    if setting.schedule is not None and setting.start_method == "popen":
        callbacks.append(OnExceptionCheckpoint(setting.after_failure))
    options: dict[str, Any] = {
        "strategy": _strategy(setting),
        "callbacks": callbacks,
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": True,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "use_distributed_sampler": False,
    }
    rows, batch_size = 4 * _BATCHES * setting.devices, 4
    validation = shard(rank, setting.devices, rows, batch_size)
    training = DataLoader(validation.dataset, batch_size, num_workers=setting.workers)
    # The strategy has more patience with ranks that start than a test has.
    with patch("ringstrategy.strategies.ring_ddp._MEETING_TIMEOUT", timedelta(seconds=max(setting.timeout, 20.0))):
        trainer(**options).fit(Ruined(setting), training, validation)


def train_on_rank(rank: int, world_size: int, setting: Setting) -> None:
    """The training on one of the ranks of :func:`tests.helpers.ranks.run_ranks`."""
    train(setting, rank, partial(trainer_on_rank, rank, world_size))


def train_from_launcher(rank: int, world_size: int, setting: Setting) -> None:
    """The training in a process that starts the ranks itself."""
    train(setting, trainer=partial(pl.Trainer, accelerator="cpu", devices=setting.devices))


if __name__ == "__main__":
    train_from_launcher(0, 1, Setting(**json.loads(sys.argv[1])))
