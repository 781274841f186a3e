"""Ways to save and to go on, under a pipeline."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.plugins import AsyncCheckpointIO
from torch import Tensor

from ringstrategy import PipelineStrategy
from tests.helpers.compare import Result, result_of
from tests.helpers.features import feature
from tests.helpers.pipelines import (
    Batch,
    Classification,
    Pipelined,
    assert_like_one_process,
    batches,
    rows,
    run_alone,
    run_stages,
)
from tests.helpers.ranks import RanksFailedError

_GROUP = "Checkpoints"
pytestmark = pytest.mark.slow  # the whole table takes minutes

_TOLERANCE = 1e-9


class _Scheduled(Classification):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.8)]


class _SavesInTheMiddle(Callback):
    def __init__(self, path: Path) -> None:
        self._path = path

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 4:
            trainer.save_checkpoint(self._path)


@dataclass(frozen=True)
class _Kept:
    """What a rank knows of its checkpoints, and, on rank 0, all files."""

    best: dict[str, Tensor]
    paths: list[str]
    files: dict[str, Any]
    tested: Any
    predicted: list[Tensor]


def _keep(place: Pipelined, folder: Path, in_background: bool) -> _Kept:
    folder = folder / str(place.world_size)
    best = ModelCheckpoint(
        folder / "best",
        monitor="val_loss",
        mode="max",
        save_top_k=2,
        save_last=True if in_background else "link",
        filename="{epoch}-{step}",
    )
    regular = ModelCheckpoint(folder / "regular", every_n_train_steps=2, save_top_k=-1, filename="{step}")
    trainer = place.trainer(
        max_epochs=4,
        callbacks=[best, regular, _SavesInTheMiddle(folder / "middle.ckpt")],
        plugins=[AsyncCheckpointIO()] if in_background else [],
        enable_checkpointing=True,
    )
    module = _Scheduled()
    trainer.fit(module, batches(12, 12, 12), batches(12, 5))
    # Each load below restores what the callbacks knew when that file was written.
    best_of, paths = dict(best.best_k_models), [best.best_model_path, best.last_model_path]
    predicted: Any = trainer.predict(module, batches(12, 5), ckpt_path=best.last_model_path)
    best.best_model_path = paths[0]
    tested = trainer.test(module, batches(12, 5), ckpt_path="best", verbose=False)
    files = sorted(folder.rglob("*.ckpt")) if place.rank == 0 else []
    return _Kept(
        best={Path(path).name: score for path, score in best_of.items()},
        paths=[str(Path(path).relative_to(folder)) for path in paths],
        files={str(path.relative_to(folder)): torch.load(path, weights_only=True) for path in files},
        tested=tested,
        predicted=predicted,
    )


@feature(
    _GROUP,
    "`ModelCheckpoint`, `trainer.save_checkpoint` in a callback",
    tried="best two of four epochs and the last, every second step, one in the middle; then `test` and `predict` from "
    "these files; both schedules",
    outcome="the same files as one process, within 1e-9",
)
@feature(_GROUP, "`AsyncCheckpointIO`", tried="the same", outcome="the same files as one process, within 1e-9")
@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize("schedule", ["gpipe", pytest.param("1f1b", marks=pytest.mark.slow)])
def test_checkpoints_of_callbacks(schedule: str, in_background: bool, tmp_path: Path) -> None:
    """Symptom: a save in the middle of training holds one stage, or another step's weights; other files are kept."""
    ranks = run_stages(_keep, 2, tmp_path, in_background, chunks=3, schedule=schedule)
    alone = run_alone(_keep, tmp_path, in_background)
    assert len(alone.files) == 2 + 1 + 6 + 1
    assert alone.predicted[1].shape == (5, 4)
    for rank in ranks:
        assert rank.paths == alone.paths
        for ours, theirs in ((rank.best, alone.best), (rank.predicted, alone.predicted), (rank.tested, alone.tested)):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=_TOLERANCE)
    assert list(ranks[0].files) == list(alone.files)
    for name, checkpoint in alone.files.items():
        ours = ranks[0].files[name]
        for key in ("state_dict", "optimizer_states"):
            torch.testing.assert_close(ours[key], checkpoint[key], rtol=0, atol=_TOLERANCE, msg=f"{name}: {key}")
        for key in ("lr_schedulers", "loops", "global_step", "epoch"):
            assert ours[key] == checkpoint[key], f"{name}: {key}"


class _Fails(Classification):
    """Fails in the fourth step, on some ranks."""

    def __init__(self, rank: int, failing: set[int]) -> None:
        super().__init__()
        self._fails = rank in failing

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        if batch_idx == 3 and self._fails:
            raise ValueError("no luck")
        return super().training_step(batch, batch_idx)


def _fail_and_save(place: Pipelined, folder: Path, failing: set[int]) -> None:
    trainer = place.trainer(callbacks=[OnExceptionCheckpoint(folder)], enable_checkpointing=True)
    trainer.fit(_Fails(place.rank, failing), batches(*[12] * 6))


@feature(
    _GROUP,
    "`OnExceptionCheckpoint`",
    tried="an exception in the fourth step, on the first stage, on the second, on both",
    outcome="the run ends with the exception; nothing is written, for the other stages' layers are out of reach, and a "
    "warning says so",
)
@pytest.mark.parametrize("failing", [{0}, {1}, {0, 1}], ids=["stage 0", "stage 1", "both stages"])
def test_no_half_a_checkpoint_after_a_failure(failing: set[int], tmp_path: Path) -> None:
    """Symptom: the rank that failed waits for the others' weights; or a file without them looks like a checkpoint."""
    with pytest.raises(RanksFailedError, match="ValueError: no luck") as raised:
        run_stages(_fail_and_save, 2, tmp_path, failing, chunks=2)
    outcomes = raised.value.outcomes
    assert all(outcome.error_type in ("ValueError", "RankFailure") for outcome in outcomes)
    assert "No checkpoint was written" in outcomes[0].output
    assert list(tmp_path.iterdir()) == []


class _Requeued(_Scheduled):
    """SLURM's signal comes before one of the batches, or to this rank never."""

    def __init__(self, before_batch: int | None) -> None:
        super().__init__()
        self._batch = before_batch

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == self._batch:
            os.kill(os.getpid(), signal.SIGUSR1)


def _requeue(place: Pipelined, folder: Path, batch_of_rank: dict[int, int]) -> tuple[Result, list[str]]:
    folder.mkdir(parents=True, exist_ok=True)
    scontrol = folder.parent / "scontrol"
    if place.rank == 0:
        scontrol.write_text('#!/bin/sh\necho "$@" >> "$REQUEUED"\n')
        scontrol.chmod(0o755)
    ranks = max(1, place.world_size)
    os.environ |= {
        "SLURM_NTASKS": str(ranks),
        "SLURM_NTASKS_PER_NODE": str(ranks),
        "SLURM_PROCID": str(place.rank),
        "SLURM_LOCALID": str(place.rank),
        "SLURM_NODEID": "0",
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NAME": "train",
        "REQUEUED": str(folder / "requeued"),
        "PATH": f"{scontrol.parent}:{os.environ['PATH']}",
    }

    def trainer(epochs: int) -> pl.Trainer:
        return pl.Trainer(
            accelerator="cpu",
            devices=ranks,
            strategy=PipelineStrategy(**place.arguments) if place.world_size else "auto",
            max_epochs=epochs,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )

    trainer(1).fit(_Requeued(batch_of_rank.get(place.rank)), rows())
    module = _Scheduled()
    second = trainer(2)
    second.fit(module, rows())
    return result_of(second, module), (folder / "requeued").read_text().splitlines()


def _requeue_each(place: Pipelined, folder: Path, cases: list[dict[int, int]]) -> list[tuple[Result, list[str]]]:
    return [_requeue(place, folder / str(index), case) for index, case in enumerate(cases)]


@feature(
    _GROUP,
    "SLURM requeue signal",
    tried="SIGUSR1 under SLURM's variables and a made-up `scontrol`: to both stages before the third batch, to one a "
    "batch later, or to one alone; then a second job",
    outcome="saved and requeued once; like one process",
)
@pytest.mark.parametrize("schedule", ["gpipe", pytest.param("1f1b", marks=pytest.mark.slow)])
def test_requeueing(schedule: str, tmp_path: Path) -> None:
    cases = [{0: 2, 1: 2}, {0: 2, 1: 3}, {0: 3, 1: 2}, {0: 2}, {1: 2}]
    ranks = run_stages(_requeue_each, 2, tmp_path, cases, chunks=2, schedule=schedule)
    alone, _ = run_alone(_requeue, tmp_path / "alone", {0: 2})
    for of_ranks in zip(*ranks, strict=True):
        assert_like_one_process([result for result, _ in of_ranks], alone)
        assert [requeued for _, requeued in of_ranks] == [["requeue 4711"]] * 2
