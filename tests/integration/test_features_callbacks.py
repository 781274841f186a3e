"""Lightning's callbacks under ``ring_ddp``."""

from __future__ import annotations

import contextlib
import copy
import csv
import io
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.callbacks import (
    Callback,
    DeviceStatsMonitor,
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
    RichProgressBar,
    Timer,
    TQDMProgressBar,
)
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor

from tests.helpers.assertions import assert_ranks_identical
from tests.helpers.compare import (
    Normalised,
    Place,
    Result,
    assert_same,
    fit_both,
    result_of,
    run_both,
)
from tests.helpers.features import feature
from tests.helpers.models import state_of

pytestmark = pytest.mark.slow  # the whole table takes minutes

_GROUP = "Callbacks"


class _Turns(Normalised):
    """A metric that improves until the third epoch."""

    def on_validation_epoch_end(self) -> None:
        self.log("turning", abs(self.current_epoch - 2.0) + self.rank, sync_dist=True)


@feature(
    _GROUP,
    "`EarlyStopping`",
    tried="a metric that turns in the third of eight epochs",
    outcome="both ranks stop after the same epoch as `ddp`; same bits",
)
def test_early_stopping() -> None:
    ours, theirs = fit_both(_Turns, max_epochs=8, callbacks=[EarlyStopping("turning", patience=2)])
    assert_same(ours, theirs)
    assert [rank.epoch for rank in ours] == [5, 5]


def _fit_with_checkpoints(place: Place, folder: Path) -> dict[str, Any]:
    folder = folder / place.strategy
    best = ModelCheckpoint(
        folder / "best", monitor="turning", save_top_k=2, filename="{epoch}-{turning:.1f}", save_last="link"
    )
    regular = ModelCheckpoint(folder / "regular", every_n_train_steps=4, save_top_k=-1, filename="{step}")
    module = _Turns(place.rank)
    trainer = place.trainer(max_epochs=4, callbacks=[best, regular], enable_checkpointing=True)
    trainer.fit(module, place.shard(), place.shard())
    files = sorted(folder.rglob("*.ckpt"))
    return {
        "trained": result_of(trainer, module),
        "best": {Path(path).name: score for path, score in best.best_k_models.items()},
        "paths": [Path(path).relative_to(folder) for path in (best.best_model_path, best.last_model_path)],
        "saved": {str(file.relative_to(folder)): torch.load(file, weights_only=False)["state_dict"] for file in files},
    }


@feature(
    _GROUP,
    "`ModelCheckpoint`",
    tried="best two of four epochs with a link to the last, and every fourth step",
    outcome="the same files with the same bits",
)
def test_model_checkpoints(tmp_path: Path) -> None:
    ours, theirs = run_both(_fit_with_checkpoints, tmp_path)
    assert_same([rank["trained"] for rank in ours], [rank["trained"] for rank in theirs])
    assert ours[0]["paths"] == ours[1]["paths"] == theirs[0]["paths"]
    assert ours[0]["best"] == ours[1]["best"] == theirs[0]["best"]
    assert len(ours[0]["best"]) == 2
    assert len(ours[0]["saved"]) == 3 + 6
    torch.testing.assert_close(ours[0]["saved"], theirs[0]["saved"], rtol=0, atol=0)


class _Schedules(Normalised):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=12)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def _fit_logging(place: Place, folder: Path) -> tuple[Result, list[dict[str, str]], int]:
    folder = folder / place.strategy / str(place.rank)
    module = _Schedules(place.rank)
    stats = {"cpu_percent": 50.0}
    callbacks = [LearningRateMonitor(log_momentum=True), DeviceStatsMonitor(cpu_stats=True)]
    with mock.patch.object(CPUAccelerator, "get_device_stats", return_value=stats) as asked:
        trainer = place.trainer(
            max_epochs=2, callbacks=callbacks, logger=CSVLogger(folder, version="a"), log_every_n_steps=2
        )
        trainer.fit(module, place.shard(), place.shard())
    file = folder / "lightning_logs" / "a" / "metrics.csv"
    rows = list(csv.DictReader(file.open())) if file.exists() else []
    return result_of(trainer, module), rows, asked.call_count


@feature(
    _GROUP,
    "`LearningRateMonitor`, `DeviceStatsMonitor`",
    tried="learning rate and momentum of `OneCycleLR` and invented statistics, in `CSVLogger`",
    outcome="the same log, written by rank 0 alone; same bits",
)
def test_monitors(tmp_path: Path) -> None:
    ours, theirs = run_both(_fit_logging, tmp_path)
    assert_same([result for result, _, _ in ours], [result for result, _, _ in theirs])
    (_, log, asked), (_, other_log, _) = ours
    assert log == theirs[0][1]
    assert len({row["lr-SGD"] for row in log if row["lr-SGD"]}) == 6
    assert any(row["lr-SGD-momentum"] for row in log)
    assert any(row["DeviceStatsMonitor.on_train_batch_end/cpu_percent"] == "50.0" for row in log)
    assert other_log == []
    assert asked > 0


class _TimeByBatches(Timer):
    """A clock that every batch moves on."""

    def __init__(self, seconds_per_batch: int) -> None:
        super().__init__(duration={"seconds": 100}, interval="step")
        self._seconds_per_batch = seconds_per_batch
        self._elapsed = 0

    def time_elapsed(self, stage: Any = None) -> float:
        return self._elapsed

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self._elapsed += self._seconds_per_batch
        super().on_train_batch_end(*args, **kwargs)


def _fit_timed(place: Place, seconds_per_batch: dict[int, int]) -> Result:
    module = Normalised(place.rank)
    trainer = place.trainer(callbacks=[_TimeByBatches(seconds_per_batch[place.rank])])
    trainer.fit(module, place.shard())
    return result_of(trainer, module)


@feature(
    _GROUP,
    "`Timer`",
    tried="the clock of one rank is faster",
    outcome="rank 0's clock counts, as with `ddp`; same bits",
)
@pytest.mark.parametrize(("seconds_per_batch", "steps"), [({0: 40, 1: 10}, 3), ({0: 20, 1: 80}, 5)])
def test_timer(seconds_per_batch: dict[int, int], steps: int) -> None:
    ours, theirs = run_both(_fit_timed, seconds_per_batch)
    assert_same(ours, theirs)
    assert [rank.global_step for rank in ours] == [steps] * 2


def _fit_with_bar(place: Place, bar: Callback) -> tuple[Result, str]:
    module = Normalised(place.rank)
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
        trainer = place.trainer(callbacks=[bar], enable_progress_bar=True)
        trainer.fit(module, place.shard(), place.shard())
    return result_of(trainer, module), shown.getvalue()


@feature(
    _GROUP,
    "`TQDMProgressBar`, `RichProgressBar`",
    tried="training with validation",
    outcome="shown by rank 0 alone; same bits",
)
@pytest.mark.parametrize("bar", [TQDMProgressBar(), RichProgressBar()], ids=["TQDM", "rich"])
def test_progress_bars(bar: Callback) -> None:
    ours, theirs = run_both(_fit_with_bar, bar)
    assert_same([result for result, _ in ours], [result for result, _ in theirs])
    assert ["Epoch 0" in shown for _, shown in ours] == [True, False]
    assert ["6/6" in shown for _, shown in ours] == [True, False]


class _Copies(Callback):
    """Keeps a copy of the module after each batch, and disturbs it."""

    def __init__(self) -> None:
        self.copies: list[dict[str, Tensor]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        duplicate = copy.deepcopy(pl_module)
        self.copies.append(state_of(duplicate))
        for parameter in duplicate.parameters():
            torch.autograd.backward(parameter.sum())
            parameter.data.zero_()


def _fit_copying(place: Place) -> tuple[Result, list[dict[str, Tensor]]]:
    module = Normalised(place.rank)
    copies = _Copies()
    trainer = place.trainer(callbacks=[copies])
    trainer.fit(module, place.shard())
    return result_of(trainer, module), copies.copies


@feature(
    _GROUP,
    "`copy.deepcopy` of the module in a callback",
    tried="after every batch; the copy goes backward and loses its weights",
    outcome="same bits in every copy, training is not disturbed",
)
def test_copies_of_the_module() -> None:
    ours, theirs = run_both(_fit_copying)
    assert_same([result for result, _ in ours], [result for result, _ in theirs])
    torch.testing.assert_close(ours[0][1], theirs[0][1], rtol=0, atol=0)
    for copies in zip(*(copies for _, copies in ours), strict=True):
        assert_ranks_identical([{n: t for n, t in state.items() if "running" not in n} for state in copies])
