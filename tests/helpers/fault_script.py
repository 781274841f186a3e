"""A training that one rank ruins: in a chosen phase, in a chosen way. A function for ranks, and a script.

As a script: ``fault_script.py SETTING``, where SETTING is what :meth:`Setting.to_json` returns.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from typing_extensions import override

from ringstrategy import RingDDPStrategy
from ringstrategy.collectives.links import Link
from tests.helpers.models import Batch, Regression, data, shard
from tests.helpers.trainers import trainer_on_rank

__all__ = ["KINDS", "PHASES", "Setting", "train", "train_on_rank"]

KINDS = ("exception", "kill", "stop", "sleep")
# In the order in which a run meets them. All ranks have met, and watch each other, from `setup` to `train end`.
PHASES = ("before meeting", "setup", "forward", "all-reduce", "validation", "checkpoint", "train end", "teardown")
# One checkpoint has been written before the fault, and one batch trained after it.
_FAULTY_BATCH = 2
_BATCHES = 4


@dataclass(frozen=True)
class Setting:
    """Who fails, when and how.

    Attributes:
        kind: ``"exception"``, ``"kill"``, ``"stop"`` (by signal), or ``"sleep"`` (for longer than any timeout).
        rank: the rank that fails.
        phase: one of :data:`PHASES`.
        folder: for checkpoints, and for the moment of the fault.
        timeout: of the strategy, in seconds.
        devices: number of ranks that the script starts.
        start_method: how.
    """

    kind: str
    rank: int
    phase: str
    folder: str
    timeout: float = 60.0
    devices: int = 2
    start_method: str = "popen"

    def to_json(self) -> str:
        """For a command line."""
        return json.dumps(asdict(self))

    @property
    def checkpoints(self) -> Path:
        """Where the run saves."""
        return Path(self.folder) / "checkpoints"

    def seconds_since(self) -> float:
        """Time since the fault; it must have happened."""
        return time.monotonic() - float((Path(self.folder) / "struck").read_text())

    def strike(self, rank: int, phase: str) -> None:
        """Fail, if it is this rank's turn."""
        if (rank, phase) != (self.rank, self.phase):
            return
        # The clock is the same in all processes.
        (Path(self.folder) / "struck").write_text(str(time.monotonic()))
        if self.kind == "exception":
            raise ValueError(f"boom-on-rank-{rank}")
        if self.kind == "sleep":
            time.sleep(600)
        # To this thread and not just to the process, which would let it run on for some microseconds.
        signal.pthread_kill(threading.get_ident(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[self.kind])


class Ruined(Regression):
    """Strikes in the hooks of the module."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        self._setting = setting

    def _strike(self, phase: str) -> None:
        self._setting.strike(self.trainer.global_rank, phase)

    @override
    def setup(self, stage: str) -> None:
        self._strike("setup")

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        if batch_idx == _FAULTY_BATCH:
            self._strike("forward")
            if self._setting.phase == "all-reduce":
                # The first send says that an all-reduce begins, the second that its first chunk is ready.
                _before_call(2, "send", lambda: self._strike("all-reduce"))
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        if batch_idx == 1:
            self._strike("validation")
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


def _before_call(count: int, name: str, strike: Callable[[], None]) -> None:
    """Strike before the ``count``-th call of a method of the links of the ring."""
    original, calls = getattr(Link, name), 0

    def ruined(link: Link, *args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == count:
            strike()
        return original(link, *args)

    setattr(Link, name, ruined)


def _when_flushing(strike: Callable[[], None]) -> None:
    """Strike when the checkpoint's file is complete and has not taken its place yet."""
    original = os.fsync

    def ruined(descriptor: int) -> None:
        strike()
        original(descriptor)

    os.fsync = ruined


class RuinedStrategy(RingDDPStrategy):
    """Strikes before the ranks have met."""

    setting: Setting

    @override
    def setup_distributed(self) -> None:
        self.setting.strike(self.local_rank, "before meeting")
        super().setup_distributed()


def train(rank: int | None, setting: Setting, trainer: Callable[..., pl.Trainer]) -> None:
    """Fit four batches, save after each, and validate."""
    strategy = RuinedStrategy(timeout=timedelta(seconds=setting.timeout), start_method=setting.start_method)  # type: ignore[arg-type]
    strategy.setting = setting
    saver = ModelCheckpoint(setting.checkpoints, every_n_train_steps=1, save_top_k=-1)
    options: dict[str, Any] = {"strategy": strategy, "callbacks": [saver], "enable_checkpointing": True}
    trainer(**options).fit(Ruined(setting), *_loaders(setting.devices, rank))


def _loaders(world_size: int, rank: int | None) -> list[Any]:
    rows, batch_size = 4 * _BATCHES * world_size, 4
    return [shard(rank or 0, world_size, rows, batch_size) for _ in ("training", "validation")]


def train_on_rank(rank: int, world_size: int, setting: Setting) -> None:
    """The training on one of the ranks of :func:`tests.helpers.ranks.run_ranks`."""
    train(rank, setting, lambda **options: trainer_on_rank(rank, world_size, **options))


def main(setting: Setting) -> None:
    """The training in a program that starts its ranks itself."""
    train(
        None,
        setting,
        lambda **options: pl.Trainer(
            accelerator="cpu",
            devices=setting.devices,
            max_epochs=1,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            use_distributed_sampler=False,
            **options,
        ),
    )


if __name__ == "__main__":
    main(Setting(**json.loads(sys.argv[1])))
