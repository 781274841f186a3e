"""Ways to save and to go on, under ``ring_ddp``."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.plugins import AsyncCheckpointIO
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

from ringstrategy import AtomicCheckpointIO
from tests.helpers.compare import Normalised, Place, Result, assert_same, result_of, run_both, run_under
from tests.helpers.features import feature
from tests.helpers.models import Batch
from tests.helpers.ranks import RanksFailedError

pytestmark = pytest.mark.slow  # the whole table takes minutes

_GROUP = "Checkpoints"


class _OwnCheckpointIO(TorchCheckpointIO):
    """A user's own, which signs what it saves."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        super().save_checkpoint(checkpoint | {"saved by": "user"}, path, storage_options)


class _LooksOnWhileSaving(AtomicCheckpointIO):
    """Notes which thread saves."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        in_background = threading.current_thread() is not threading.main_thread()
        super().save_checkpoint(checkpoint | {"saved in background": in_background}, path, storage_options)


def _save_in_background(place: Place, folder: Path, kind: str) -> dict[str, Any]:
    base = {"bare": None, "atomic": _LooksOnWhileSaving(), "own": _OwnCheckpointIO()}[kind]
    folder = folder / place.strategy
    io = AsyncCheckpointIO(base)
    saving = ModelCheckpoint(folder, every_n_train_steps=2, save_top_k=-1, filename="{step}")
    module = Normalised(place.rank)
    trainer = place.trainer(plugins=[io], callbacks=[saving], enable_checkpointing=True)
    trainer.fit(module, place.shard())
    return {
        "result": result_of(trainer, module),
        "used": type(io.checkpoint_io).__name__,
        "is ours": isinstance(io.checkpoint_io, AtomicCheckpointIO),
        "files": {path.name: torch.load(path, weights_only=False) for path in sorted(folder.iterdir())},
    }


@feature(
    _GROUP,
    "`AsyncCheckpointIO`",
    tried="bare, around `AtomicCheckpointIO`, around a user's own; a save every second step",
    outcome="bare, it gets `AtomicCheckpointIO`; else what it was given; same bits in the files as `ddp`",
)
@pytest.mark.parametrize("kind", ["bare", "atomic", "own"])
def test_saving_in_the_background(kind: str, tmp_path: Path) -> None:
    ours, theirs = run_both(_save_in_background, tmp_path, kind)
    assert_same([rank["result"] for rank in ours], [rank["result"] for rank in theirs])
    assert [rank["is ours"] for rank in ours] == [kind != "own"] * 2
    assert kind == "bare" or ours[0]["used"] == theirs[0]["used"]
    assert list(ours[0]["files"]) == ["step=2.ckpt", "step=4.ckpt", "step=6.ckpt"]
    for name, checkpoint in ours[0]["files"].items():
        torch.testing.assert_close(checkpoint["state_dict"], theirs[0]["files"][name]["state_dict"], rtol=0, atol=0)
        assert checkpoint.get("saved by") == ("user" if kind == "own" else None)
        assert checkpoint.get("saved in background") == (True if kind == "atomic" else None)


class _Fails(Normalised):
    def __init__(self, rank: int, failing: set[int]) -> None:
        super().__init__(rank)
        self._failing = failing

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        if batch_idx == 3 and self.rank in self._failing:
            raise ValueError(f"no luck on rank {self.rank}")
        return super().training_step(batch, batch_idx)


def _fail_and_save(place: Place, folder: Path, failing: set[int]) -> None:
    trainer = place.trainer(callbacks=[OnExceptionCheckpoint(folder)], enable_checkpointing=True)
    trainer.fit(_Fails(place.rank, failing), place.shard())


def _fit_three_steps(place: Place) -> Result:
    module = Normalised(place.rank)
    trainer = place.trainer(limit_train_batches=3)
    trainer.fit(module, place.shard())
    return result_of(trainer, module)


@feature(
    _GROUP,
    "`OnExceptionCheckpoint`",
    tried="an exception in the fourth step, on both ranks, on rank 0, on rank 1",
    outcome="the run ends with the exception; the file holds the parameters of three steps",
)
@pytest.mark.parametrize("failing", [{0, 1}, {0}, {1}], ids=["both ranks", "rank 0", "rank 1"])
def test_saving_on_an_exception(failing: set[int], tmp_path: Path) -> None:
    with pytest.raises(RanksFailedError, match="ValueError: no luck on rank") as raised:
        run_under("ring_ddp", _fail_and_save, tmp_path, failing)
    assert all(outcome.error_type in ("ValueError", "RankFailure") for outcome in raised.value.outcomes)
    checkpoint = torch.load(tmp_path / "on_exception.ckpt", weights_only=False)
    assert checkpoint["global_step"] == 3
    expected = run_under("ring_ddp", _fit_three_steps)[0].state
    for name, tensor in checkpoint["state_dict"].items():
        if "running" not in name and "num_batches" not in name:
            assert torch.equal(tensor, expected[name]), name


class _Requeued(Normalised):
    """SLURM's signal comes before one of the batches, or to this rank never."""

    def __init__(self, rank: int, batch_of_rank: dict[int, int]) -> None:
        super().__init__(rank)
        self._batch = batch_of_rank.get(rank)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == self._batch:
            os.kill(os.getpid(), signal.SIGUSR1)


def _requeue(place: Place, folder: Path, batch_of_rank: dict[int, int]) -> tuple[Result, list[str]]:
    folder = folder / place.strategy
    folder.mkdir(parents=True, exist_ok=True)
    scontrol = folder.parent / "scontrol"
    if place.rank == 0:
        scontrol.write_text('#!/bin/sh\necho "$@" >> "$REQUEUED"\n')
        scontrol.chmod(0o755)
    os.environ |= {
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_PROCID": str(place.rank),
        "SLURM_LOCALID": str(place.rank),
        "SLURM_NODEID": "0",
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NAME": "train",
        "REQUEUED": str(folder / "requeued"),
        "PATH": f"{scontrol.parent}:{os.environ['PATH']}",
    }
    options: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 2,
        "strategy": place.strategy,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
        "default_root_dir": folder,
    }
    first = pl.Trainer(**options, max_epochs=1)
    assert isinstance(first.strategy, DDPStrategy)
    assert isinstance(first.strategy.cluster_environment, SLURMEnvironment)
    first.fit(_Requeued(place.rank, batch_of_rank), place.shard())
    module = Normalised(place.rank + 5)
    second = pl.Trainer(**options, max_epochs=2)
    second.fit(module, place.shard())
    return result_of(second, module), (folder / "requeued").read_text().splitlines()


@feature(
    _GROUP,
    "SLURM requeue signal",
    tried="SIGUSR1 to both ranks before the third batch, under SLURM's variables and a made-up `scontrol`, then a "
    "second job",
    outcome="same bits",
)
def test_requeueing(tmp_path: Path) -> None:
    ours, theirs = run_both(_requeue, tmp_path, {0: 2, 1: 2})
    assert_same([result for result, _ in ours], [result for result, _ in theirs])
    assert [requeued for _, requeued in ours] == [["requeue 4711"]] * 2


def _requeue_each(place: Place, folder: Path, cases: list[dict[int, int]]) -> list[tuple[Result, list[str]]]:
    return [_requeue(place, folder / str(index), case) for index, case in enumerate(cases)]


@feature(
    _GROUP,
    "SLURM requeue signal, not at once",
    tried="to one rank a batch later than to the other, or never",
    outcome="saved and requeued once; same bits as above",
)
def test_requeueing_when_ranks_hear_of_it_apart(tmp_path: Path) -> None:
    ours = run_under("ring_ddp", _requeue_each, tmp_path, [{0: 2, 1: 2}, {0: 2, 1: 3}, {0: 3, 1: 2}, {0: 2}, {1: 2}])
    (expected, _) = ours[0][0]
    for of_ranks in zip(*ours, strict=True):
        assert_same([result for result, _ in of_ranks], expected)
        assert [requeued for _, requeued in of_ranks] == [["requeue 4711"]] * 2
