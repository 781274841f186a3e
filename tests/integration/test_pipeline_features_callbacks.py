"""Lightning's callbacks under a pipeline."""

from __future__ import annotations

import contextlib
import csv
import io
import logging
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.callbacks import (
    Callback,
    DeviceStatsMonitor,
    EarlyStopping,
    LearningRateMonitor,
    ModelSummary,
    RichModelSummary,
    RichProgressBar,
    Timer,
    TQDMProgressBar,
)
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn

from tests.helpers.compare import Result, result_of
from tests.helpers.features import feature
from tests.helpers.pipelines import (
    Classification,
    Pipelined,
    assert_like_one_process,
    fit_alone,
    fit_stages,
    layered,
    rows,
    run_alone,
    run_stages,
)

_GROUP = "Callbacks"
pytestmark = pytest.mark.slow  # the whole table takes minutes


class _Turns(Classification):
    """A metric that improves until the third epoch."""

    def on_validation_epoch_end(self) -> None:
        self.log("turning", abs(self.current_epoch - 2.0))


@feature(
    _GROUP,
    "`EarlyStopping`",
    tried="a metric that turns in the third of eight epochs",
    outcome="all ranks stop after the same epoch; like one process",
)
def test_early_stopping() -> None:
    options = {"max_epochs": 8, "callbacks": [EarlyStopping("turning", patience=2)]}
    ranks = fit_stages(3, _Turns, rows, options=options, chunks=2)
    assert_like_one_process(ranks, fit_alone(_Turns, rows, options=options))
    assert [rank.epoch for rank in ranks] == [5, 5, 5]


class _Schedules(Classification):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=12)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def _fit_logging(place: Pipelined, folder: Path) -> tuple[Result, list[dict[str, str]], int]:
    folder = folder / f"{place.world_size}-{place.rank}"
    module = _Schedules()
    stats = {"cpu_percent": 50.0}
    callbacks = [LearningRateMonitor(log_momentum=True), DeviceStatsMonitor(cpu_stats=True)]
    with mock.patch.object(CPUAccelerator, "get_device_stats", return_value=stats) as asked:
        trainer = place.trainer(
            max_epochs=2, callbacks=callbacks, logger=CSVLogger(folder, version="a"), log_every_n_steps=2
        )
        trainer.fit(module, rows(), rows())
    file = folder / "lightning_logs" / "a" / "metrics.csv"
    found = list(csv.DictReader(file.open())) if file.exists() else []
    return result_of(trainer, module), found, asked.call_count


def _almost(log: list[dict[str, str]]) -> list[dict[str, Any]]:
    """A log with its numbers rounded."""
    return [{key: round(float(text), 9) if text else None for key, text in row.items()} for row in log]


@feature(
    _GROUP,
    "`LearningRateMonitor`, `DeviceStatsMonitor`",
    tried="learning rate and momentum of `OneCycleLR` and invented statistics, in `CSVLogger`, both schedules",
    outcome="the log of one process, written by rank 0 alone",
)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_monitors(schedule: str, tmp_path: Path) -> None:
    ranks = run_stages(_fit_logging, 2, tmp_path, chunks=2, schedule=schedule)
    alone, expected, _ = run_alone(_fit_logging, tmp_path)
    assert_like_one_process([result for result, _, _ in ranks], alone)
    (_, log, asked), (_, other_log, _) = ranks
    assert _almost(log) == _almost(expected)
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


def _fit_timed(place: Pipelined, seconds_per_batch: list[int]) -> Result:
    module = Classification()
    trainer = place.trainer(callbacks=[_TimeByBatches(seconds_per_batch[place.rank])])
    trainer.fit(module, rows())
    return result_of(trainer, module)


@feature(_GROUP, "`Timer`", tried="the clock of one rank is faster", outcome="rank 0's clock counts")
@pytest.mark.parametrize(("seconds_per_batch", "steps"), [([40, 10], 3), ([20, 80], 5)])
def test_timer(seconds_per_batch: list[int], steps: int) -> None:
    ranks = run_stages(_fit_timed, 2, seconds_per_batch, chunks=2)
    assert_like_one_process(ranks, run_alone(_fit_timed, seconds_per_batch))
    assert [rank.global_step for rank in ranks] == [steps] * 2


class _Shown(Classification):
    """Nested, and with an input to show the sizes of."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Linear(8, 8).double(), layered()))
        self.example_input_array = torch.ones(6, 8, dtype=torch.float64)

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.net(inputs)
        return output


def _fit_shown(place: Pipelined, callback: Callback, options: dict[str, Any]) -> tuple[Result, str]:
    module = _Shown()
    shown = io.StringIO()
    logging.getLogger("lightning.pytorch").addHandler(logging.StreamHandler(shown))
    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
        trainer = place.trainer(callbacks=[callback], **options)
        trainer.fit(module, rows(), rows())
    return result_of(trainer, module), shown.getvalue()


@feature(
    _GROUP,
    "`TQDMProgressBar`, `RichProgressBar`",
    tried="training with validation",
    outcome="shown by rank 0 alone; like one process",
)
@pytest.mark.parametrize("bar", [TQDMProgressBar(), RichProgressBar()], ids=["TQDM", "rich"])
def test_progress_bars(bar: Callback) -> None:
    options = {"enable_progress_bar": True}
    ranks = run_stages(_fit_shown, 2, bar, options, chunks=2)
    assert_like_one_process([result for result, _ in ranks], run_alone(_fit_shown, bar, options)[0])
    assert ["Epoch 0" in shown for _, shown in ranks] == [True, False]
    assert ["6/6" in shown for _, shown in ranks] == [True, False]


@feature(
    _GROUP,
    "`ModelSummary`, `RichModelSummary`",
    tried="nested layers, of which one lies on two stages, with the sizes of their inputs and outputs",
    outcome="parameters of the whole model; sizes and FLOPs only of layers on the first stage, for a micro-batch",
)
@pytest.mark.parametrize("summary", [ModelSummary(max_depth=-1), RichModelSummary(max_depth=-1)], ids=["plain", "rich"])
def test_summaries(summary: Callback) -> None:
    options = {"enable_model_summary": True}
    ranks = run_stages(_fit_shown, 2, summary, options, chunks=2, balance=[3, 3])
    alone, expected = run_alone(_fit_shown, summary, options)
    assert_like_one_process([result for result, _ in ranks], alone)
    assert [_layers(shown) for _, shown in ranks] == [_layers(expected), []]
    (_, shown), _ = ranks
    assert len(_layers(shown)) == 8
    assert "252" in shown
    assert shown.count("[3, 8]") == 6
    assert "Hooks on '1' of Sequential do not run" in shown


def _layers(summary: str) -> list[list[str]]:
    """Names, types and numbers of parameters of a summary's layers."""
    rows = (re.split(r" *[|│] *", line.strip(" │")) for line in summary.splitlines())
    return [row[:4] for row in rows if row[0].isdigit() and row[1].startswith("net")]
