"""A save that fails on one rank ends the job: at once, on all ranks, with the reason, and with no half a file."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from ringstrategy import AtomicCheckpointIO
from tests.helpers.models import Regression, shard
from tests.helpers.ranks import RanksFailedError, run_ranks
from tests.helpers.scripts import start_script
from tests.helpers.trainers import trainer_on_rank


class FullDisk(AtomicCheckpointIO):
    """Has no room for any checkpoint."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


class RaisesWhenSaved(Regression):
    def __init__(self, rank: int, failing: int) -> None:
        super().__init__(rank)
        self.failing = failing

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.rank == self.failing:
            raise ValueError(f"boom on rank {self.rank}")


def _save_on_a_full_disk(rank: int, world_size: int, folder: Path) -> None:
    _fit(Regression(rank), rank, world_size, folder, plugins=[FullDisk()])


def _raise_on_rank_0(rank: int, world_size: int, folder: Path) -> None:
    _fit(RaisesWhenSaved(rank, failing=0), rank, world_size, folder)


def _raise_on_rank_1(rank: int, world_size: int, folder: Path) -> None:
    _fit(RaisesWhenSaved(rank, failing=1), rank, world_size, folder)


def _fit(module: Regression, rank: int, world_size: int, folder: Path, **options: Any) -> None:
    keeper = ModelCheckpoint(dirpath=folder, every_n_train_steps=1)
    trainer = trainer_on_rank(rank, world_size, enable_checkpointing=True, callbacks=[keeper], **options)
    trainer.fit(module, shard(rank, world_size, rows=24, batch_size=4))


SAVES = [(_save_on_a_full_disk, 0, "OSError"), (_raise_on_rank_0, 0, "ValueError"), (_raise_on_rank_1, 1, "ValueError")]


@pytest.mark.parametrize(("fit", "failing", "error"), SAVES)
def test_a_save_that_fails_ends_every_rank_with_its_reason(
    tmp_path: Path, fit: Callable[[int, int, Path], None], failing: int, error: str
) -> None:
    """Symptom: the job sits in the barrier after the save."""
    with pytest.raises(RanksFailedError) as failure:
        run_ranks(fit, 2, tmp_path, grace=10.0)
    failed, other = failure.value.outcomes[failing], failure.value.outcomes[1 - failing]
    assert failed.error_type == error
    assert other.error is not None
    assert "killed" not in other.error, "it did not end by itself"
    assert f"rank {failing}" in other.error + other.output
    assert error in other.error + other.output
    assert not list(tmp_path.glob(".*")), "half a checkpoint was left"


SCRIPT = """
import os
from pathlib import Path

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint

import ringstrategy
from tests.helpers.models import shard
from tests.integration.test_checkpoint_failures import {module}, {checkpoint_io}

rank = int(os.environ.get("LOCAL_RANK", 0))
trainer = pl.Trainer(
    accelerator="cpu", devices=2, strategy="ring_ddp", max_epochs=1, use_distributed_sampler=False, logger=False,
    plugins=[{checkpoint_io}()], callbacks=[ModelCheckpoint(dirpath={folder!r}, every_n_train_steps=1)],
)
trainer.fit({module}(rank, {arguments}), shard(rank, 2, rows=24, batch_size=4))
"""


@pytest.mark.parametrize(("module", "arguments", "checkpoint_io", "message"), [
    pytest.param("Regression", "", "FullDisk", "OSError: [Errno 28] No space left on device", marks=pytest.mark.slow),
    pytest.param("RaisesWhenSaved", "0", "AtomicCheckpointIO", "ValueError: boom on rank 0", marks=pytest.mark.slow),
    pytest.param("RaisesWhenSaved", "1", "AtomicCheckpointIO", "ValueError: boom on rank 1", marks=pytest.mark.slow),
])  # fmt: skip
def test_the_job_ends_with_an_error_and_leaves_nothing(
    tmp_path: Path, module: str, arguments: str, checkpoint_io: str, message: str
) -> None:
    """Symptom: the same, as a user meets it: in a script that starts its own ranks."""
    script = SCRIPT.format(module=module, arguments=arguments, checkpoint_io=checkpoint_io, folder=str(tmp_path))
    with start_script(script) as running:
        running.wait_for(message)
        ended = running.finish(timeout=20.0)
    assert not ended.timed_out, ended
    assert ended.returncode != 0, ended
    assert ended.leftover_pids == (), ended
    assert not list(tmp_path.glob(".*"))
