"""Profilers, tuner, loggers and metrics under a pipeline."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.profilers import AdvancedProfiler, Profiler, PyTorchProfiler, SimpleProfiler
from lightning.pytorch.tuner.tuning import Tuner
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric, SumMetric
from torchmetrics.classification import MulticlassAccuracy

from tests.helpers.compare import Result, result_of
from tests.helpers.features import feature
from tests.helpers.models import state_of
from tests.helpers.pipelines import (
    Batch,
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
from tests.helpers.ranks import RanksFailedError

_GROUP = "Tools"
pytestmark = pytest.mark.slow  # the whole table takes minutes

_PROFILERS: dict[str, Any] = {"simple": SimpleProfiler, "advanced": AdvancedProfiler, "pytorch": PyTorchProfiler}


def _nested() -> Classification:
    return Classification(nn.Sequential(nn.Linear(8, 8).double(), layered()))


def _fit_profiled(place: Pipelined, kind: str, folder: Path) -> tuple[Result, str]:
    name = f"profile-{place.world_size}-{place.rank}"
    profiler: Profiler = _PROFILERS[kind](dirpath=folder, filename=name)
    module = _nested()
    trainer = place.trainer(profiler=profiler)
    trainer.fit(module, rows(), rows())
    return result_of(trainer, module), "".join(path.read_text() for path in folder.glob(f"*{name}*.txt"))


@feature(
    _GROUP,
    "`SimpleProfiler`, `AdvancedProfiler`, `PyTorchProfiler`",
    tried="training with validation, nested layers, both schedules",
    outcome="each rank reports its steps, like one process; `PyTorchProfiler` does not name modules that lie on "
    "several stages",
)
@pytest.mark.parametrize("schedule", ["gpipe", pytest.param("1f1b", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("kind", "action"), [
    ("simple", "run_training_batch"),
    ("advanced", "run_training_batch"),
    ("pytorch", "[Strategy]PipelineStrategy.validation_"),
])  # fmt: skip
def test_profilers(kind: str, action: str, schedule: str, tmp_path: Path) -> None:
    ranks = run_stages(_fit_profiled, 2, kind, tmp_path, chunks=2, balance=[3, 3], schedule=schedule)
    assert_like_one_process([result for result, _ in ranks], run_alone(_fit_profiled, kind, tmp_path)[0])
    for _, report in ranks:
        assert action in report


class _Tuned(Classification):
    """Has what the tuner looks for."""

    def __init__(self) -> None:
        super().__init__()
        self.lr = 0.02
        self.batch_size = 4

    def train_dataloader(self) -> DataLoader[Any]:
        return rows(96, self.batch_size)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def _find_learning_rate(place: Pipelined, folder: Path) -> dict[str, Any]:
    folder = folder / str(place.world_size)
    module = _Tuned()
    before = state_of(module)
    trainer = place.trainer(default_root_dir=folder, limit_val_batches=0)
    found = Tuner(trainer).lr_find(module, num_training=20, min_lr=1e-3, max_lr=1.0)
    assert found is not None
    after = state_of(module)
    trainer.fit(module)
    return {
        "losses": found.results,
        "lr": module.lr,
        "restored": all(torch.equal(before[name], after[name]) for name in before),
        "trained": result_of(trainer, module),
        "left": [path.name for path in folder.rglob("*.ckpt")] if place.rank == 0 else [],
    }


@feature(
    _GROUP,
    "`Tuner.lr_find`",
    tried="twenty rates, then training with the one it suggests, both schedules",
    outcome="same losses, same suggestion, weights put back; like one process",
)
@pytest.mark.parametrize("schedule", ["gpipe", pytest.param("1f1b", marks=pytest.mark.slow)])
def test_finding_a_learning_rate(schedule: str, tmp_path: Path) -> None:
    ranks = run_stages(_find_learning_rate, 2, tmp_path, chunks=2, schedule=schedule)
    alone = run_alone(_find_learning_rate, tmp_path)
    assert_like_one_process([rank["trained"] for rank in ranks], alone["trained"])
    for rank in ranks:
        assert rank["restored"]
        assert rank["left"] == []
        torch.testing.assert_close(rank["losses"], alone["losses"], rtol=0, atol=1e-9)
        assert rank["lr"] == pytest.approx(alone["lr"], abs=1e-12)
        assert rank["lr"] != 0.02


def _find_batch_size(place: Pipelined) -> str:
    trainer = place.trainer(limit_val_batches=0)
    with pytest.raises(ValueError, match="not supported with distributed strategies") as refusal:
        Tuner(trainer).scale_batch_size(_Tuned())
    return str(refusal.value)


@feature(
    _GROUP,
    "`Tuner.scale_batch_size`",
    tried="on two stages",
    outcome="Lightning refuses all distributed strategies",
)
def test_finding_a_batch_size_is_refused() -> None:
    assert len(set(run_stages(_find_batch_size, 2))) == 1


def _fit_logged(
    place: Pipelined, folder: Path
) -> tuple[Result, dict[str, list[tuple[int, float]]], list[dict[str, str]]]:
    folder = folder / f"{place.world_size}-{place.rank}"
    loggers = [TensorBoardLogger(folder, "board", "a"), CSVLogger(folder, "table", "a")]
    module = Classification()
    trainer = place.trainer(max_epochs=2, logger=loggers, log_every_n_steps=2)
    trainer.fit(module, rows(), rows())
    scalars, lines = {}, []
    if (folder / "board").exists():
        events = EventAccumulator(str(folder / "board" / "a"))
        events.Reload()
        scalars = {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    if (folder / "table").exists():
        with (folder / "table" / "a" / "metrics.csv").open() as file:
            lines = list(csv.DictReader(file))
    return result_of(trainer, module), scalars, lines


@feature(
    _GROUP,
    "`TensorBoardLogger`, `CSVLogger`",
    tried="both at once, two epochs, both schedules",
    outcome="the values of one process at the same steps, written by rank 0 alone",
)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_loggers(schedule: str, tmp_path: Path) -> None:
    ranks = run_stages(_fit_logged, 2, tmp_path, chunks=2, schedule=schedule)
    alone, scalars, lines = run_alone(_fit_logged, tmp_path)
    assert_like_one_process([result for result, _, _ in ranks], alone)
    (_, our_scalars, our_lines), (_, other_scalars, other_lines) = ranks
    assert our_scalars.keys() == scalars.keys() >= {"loss_step", "loss_epoch", "val_loss"}
    assert len(scalars["loss_step"]) == 6
    torch.testing.assert_close(our_scalars, scalars, rtol=0, atol=1e-6)
    assert [line.keys() for line in our_lines] == [line.keys() for line in lines]
    for our_line, line in zip(our_lines, lines, strict=True):
        assert {name for name, text in our_line.items() if text} == {name for name, text in line.items() if text}
        for name, text in line.items():
            assert not text or float(our_line[name]) == pytest.approx(float(text), abs=1e-9), name
    assert (other_scalars, other_lines) == ({}, [])


@feature(
    _GROUP,
    "`TensorBoardLogger(log_graph=True)`",
    tried="training",
    outcome="refused: it traces the module in one process",
)
def test_drawing_the_graph_is_refused(tmp_path: Path) -> None:
    options = {"logger": TensorBoardLogger(tmp_path, log_graph=True)}
    with pytest.raises(RanksFailedError, match="ValueError: A logger with log_graph=True") as raised:
        fit_stages(2, options=options)
    assert all(outcome.error_type in ("ValueError", "RankFailure") for outcome in raised.value.outcomes)


class _LogsEverywhere(Classification):
    """Logs in every way that Lightning has, in every stage."""

    def _log_all(self, stage: str, batch: Batch, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        for reduction in ("mean", "max", "min"):
            self.log(f"{stage}/{reduction}", loss, reduce_fx=reduction, sync_dist=True, on_step=False, on_epoch=True)
        self.log(f"{stage}/both", loss, sync_dist=True, on_step=True, on_epoch=True, batch_size=len(batch[1]))
        self.log(f"{stage}/local", loss, on_step=False, on_epoch=True)
        self.log(f"{stage}/number", 0.5 + batch_idx, sync_dist=True, on_step=False, on_epoch=True)
        self.log_dict({f"{stage}/a": loss, f"{stage}/b": loss * 2}, sync_dist=True, on_step=False, on_epoch=True)
        self.log(f"{stage}/rank zero", loss, rank_zero_only=True, on_step=False, on_epoch=True)
        return loss

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        return self._log_all("train", batch, batch_idx)

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._log_all("val", batch, batch_idx)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self._log_all("test", batch, batch_idx)


def _log_everywhere(place: Pipelined) -> tuple[Result, list[Any]]:
    module = _LogsEverywhere()
    trainer = place.trainer(max_epochs=2)
    trainer.fit(module, rows(), [rows(), rows(16)])
    fitted = result_of(trainer, module)
    validated = trainer.validate(module, [rows(), rows(16)], verbose=False)
    tested = trainer.test(module, rows(), verbose=False)
    return fitted, [validated, tested, dict(trainer.logged_metrics)]


@feature(
    _GROUP,
    "`self.log`",
    tried="training, validation with two loaders, test; mean, max, min, per step, per epoch, numbers, `log_dict`, "
    "`sync_dist`, `rank_zero_only`",
    outcome="the values of one process on all ranks; `rank_zero_only` as with `ddp`",
)
def test_logging_in_every_stage() -> None:
    ranks = run_stages(_log_everywhere, 2, chunks=2)
    alone, evaluated = run_alone(_log_everywhere)
    assert_like_one_process([result for result, _ in ranks], alone)
    for _, ours in ranks:
        torch.testing.assert_close(ours, evaluated, rtol=0, atol=1e-9)


class _Measures(Classification):
    """Logs objects of torchmetrics."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(4, average="micro")
        self.mean, self.rows = MeanMetric(), SumMetric()

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        outputs = self.net(batch[0])
        loss = F.cross_entropy(outputs, batch[1])
        self.accuracy(outputs, batch[1])
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        losses = F.cross_entropy(self.net(batch[0]), batch[1], reduction="none")
        self.mean(losses)
        self.rows(len(losses))
        self.log_dict({"mean": self.mean, "rows": self.rows})


@feature(
    _GROUP,
    "torchmetrics objects",
    tried="accuracy, mean and sum, logged per epoch, both schedules; also with two pipelines on the same rows",
    outcome="like one process: stages count once (and pipelines each)",
)
@pytest.mark.parametrize(("ranks", "stages", "schedule"), [
    (2, 2, "gpipe"),
    (2, 2, "1f1b"),
    pytest.param(4, 2, "gpipe", marks=pytest.mark.slow),
])  # fmt: skip
def test_torchmetrics(ranks: int, stages: int, schedule: str) -> None:
    options = {"max_epochs": 2}
    results = fit_stages(ranks, _Measures, rows, options=options, num_stages=stages, chunks=2, schedule=schedule)
    alone = fit_alone(_Measures, rows, options=options)
    for result in results:
        torch.testing.assert_close(result.state, alone.state, rtol=0, atol=1e-9)
        expected = {**alone.metrics, "rows": alone.metrics["rows"] * ranks / stages}
        torch.testing.assert_close(result.metrics, expected, rtol=0, atol=1e-6)
