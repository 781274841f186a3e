"""Profilers, tuner, loggers and metrics under ``ring_ddp``."""

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
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric, SumMetric
from torchmetrics.classification import MulticlassAccuracy

from tests.helpers.assertions import assert_ranks_identical
from tests.helpers.compare import Logged, Normalised, Place, Result, assert_same, fit, result_of, run_alone, run_both
from tests.helpers.features import feature
from tests.helpers.models import Batch, data, network, state_of

pytestmark = pytest.mark.slow  # the whole table takes minutes

_GROUP = "Tools"


def _fit_profiled(place: Place, kind: str, folder: Path) -> tuple[Result, str]:
    folder = folder / place.strategy
    profilers: dict[str, Any] = {
        "simple": SimpleProfiler,
        "advanced": AdvancedProfiler,
        "pytorch": PyTorchProfiler,
    }
    profiler: Profiler = profilers[kind](dirpath=folder, filename=f"profile-{place.rank}")
    module = Normalised(place.rank)
    trainer = place.trainer(profiler=profiler)
    trainer.fit(module, place.shard(), place.shard())
    return result_of(trainer, module), "".join(path.read_text() for path in folder.glob(f"*profile-{place.rank}*.txt"))


@feature(
    _GROUP,
    "`SimpleProfiler`, `AdvancedProfiler`, `PyTorchProfiler`",
    tried="training with validation",
    outcome="same bits, each rank reports its steps",
)
@pytest.mark.parametrize(("kind", "action"), [
    ("simple", "run_training_batch"),
    ("advanced", "run_training_batch"),
    ("pytorch", "[Strategy]RingDDPStrategy.validation_st"),
])  # fmt: skip
def test_profilers(kind: str, action: str, tmp_path: Path) -> None:
    ours, theirs = run_both(_fit_profiled, kind, tmp_path)
    assert_same([result for result, _ in ours], [result for result, _ in theirs])
    for _, report in ours:
        assert action in report


class _Tuned(Logged):
    """Has what the tuner looks for."""

    def __init__(self, place: Place) -> None:
        super().__init__(place.rank)
        self.lr = 0.02
        self.batch_size = 2
        self._place = place

    def train_dataloader(self) -> DataLoader[Any]:
        rows = [tensor[self._place.rank :: self._place.world_size] for tensor in data(64)]
        return DataLoader(TensorDataset(*rows), self.batch_size)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def _find_learning_rate(place: Place, folder: Path) -> dict[str, Any]:
    folder = folder / place.strategy
    module = _Tuned(place)
    before = state_of(module)
    trainer = place.trainer(default_root_dir=folder, limit_val_batches=0)
    found = Tuner(trainer).lr_find(module, num_training=20, min_lr=1e-3, max_lr=2.0)
    assert found is not None
    after = state_of(module)
    trainer.fit(module)
    return {
        "results": found.results,
        "suggestion": found.suggestion(),
        "lr": module.lr,
        "restored": all(torch.equal(before[name], after[name]) for name in before),
        "trained": result_of(trainer, module),
        "left": [path.name for path in folder.rglob("*.ckpt")] if place.rank == 0 else [],
    }


@feature(
    _GROUP,
    "`Tuner.lr_find`",
    tried="twenty rates, then training with the one it suggests",
    outcome="same losses, same suggestion, weights put back, same bits after training",
)
def test_finding_a_learning_rate(tmp_path: Path) -> None:
    ours, theirs = run_both(_find_learning_rate, tmp_path)
    assert_same([rank["trained"] for rank in ours], [rank["trained"] for rank in theirs])
    for rank in ours:
        assert rank["restored"]
        assert rank["results"] == theirs[0]["results"]
        assert rank["lr"] == rank["suggestion"] == theirs[0]["suggestion"] != 0.02
        assert rank["left"] == []


def _find_batch_size(place: Place) -> str:
    trainer = place.trainer(limit_val_batches=0)
    with pytest.raises(ValueError, match="not supported with distributed strategies") as refusal:
        Tuner(trainer).scale_batch_size(_Tuned(place))
    return str(refusal.value)


@feature(
    _GROUP,
    "`Tuner.scale_batch_size`",
    tried="on two ranks",
    outcome="Lightning refuses all distributed strategies, with the words that `ddp` gets",
)
def test_finding_a_batch_size_is_refused() -> None:
    ours, theirs = run_both(_find_batch_size)
    assert ours == theirs


def _fit_logged(place: Place, folder: Path) -> tuple[Result, dict[str, list[tuple[int, float]]], list[dict[str, str]]]:
    folder = folder / place.strategy / str(place.rank)
    loggers = [TensorBoardLogger(folder, "board", "a"), CSVLogger(folder, "table", "a")]
    module = Normalised(place.rank)
    trainer = place.trainer(max_epochs=2, logger=loggers, log_every_n_steps=2)
    trainer.fit(module, place.shard(), place.shard())
    result, scalars, rows = result_of(trainer, module), {}, []
    if (folder / "board").exists():
        events = EventAccumulator(str(folder / "board" / "a"))
        events.Reload()
        scalars = {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    if (folder / "table").exists():
        with (folder / "table" / "a" / "metrics.csv").open() as file:
            rows = list(csv.DictReader(file))
    return result, scalars, rows


@feature(
    _GROUP,
    "`TensorBoardLogger`, `CSVLogger`",
    tried="both at once, two epochs",
    outcome="the same values at the same steps, written by rank 0 alone; same bits",
)
def test_loggers(tmp_path: Path) -> None:
    ours, theirs = run_both(_fit_logged, tmp_path)
    assert_same([result for result, _, _ in ours], [result for result, _, _ in theirs])
    (_, scalars, rows), (_, other_scalars, other_rows) = ours
    assert scalars == theirs[0][1]
    assert rows == theirs[0][2]
    assert {"loss_step", "loss_epoch", "val_loss"} <= scalars.keys()
    assert len(scalars["loss_step"]) == 6
    assert len([row for row in rows if row["val_loss"]]) == 2
    assert (other_scalars, other_rows) == ({}, [])


class _LogsEverywhere(Logged):
    """Logs in every way that Lightning has, in every stage."""

    def _log_all(self, stage: str, batch: Batch, batch_idx: int) -> None:
        loss = F.mse_loss(self.net(batch[0]), batch[1])
        for reduction in ("mean", "sum", "max", "min"):
            self.log(f"{stage}/{reduction}", loss, reduce_fx=reduction, sync_dist=True, on_step=False, on_epoch=True)
        self.log(f"{stage}/both", loss, sync_dist=True, on_step=True, on_epoch=True, batch_size=batch_idx + 1)
        self.log(f"{stage}/local", loss, on_step=False, on_epoch=True)
        self.log(f"{stage}/number", 0.5 + self.rank, sync_dist=True, on_step=False, on_epoch=True)
        self.log_dict({f"{stage}/a": loss, f"{stage}/b": loss * 2}, sync_dist=True, on_step=False, on_epoch=True)
        self.log(f"{stage}/rank zero", loss, rank_zero_only=True, on_step=False, on_epoch=True)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        self._log_all("train", batch, batch_idx)
        return self.loss(batch)

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._log_all("val", batch, batch_idx)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self._log_all("test", batch, batch_idx)


def _log_everywhere(place: Place) -> dict[str, Any]:
    module = _LogsEverywhere(place.rank)
    trainer = place.trainer(max_epochs=2)
    trainer.fit(module, place.shard(), [place.shard(), place.shard(16)])
    fitted = result_of(trainer, module)
    validated = trainer.validate(module, [place.shard(), place.shard(16)], verbose=False)
    tested = trainer.test(module, place.shard(), verbose=False)
    return {"fitted": fitted, "evaluated": [validated, tested], "logged": dict(trainer.logged_metrics)}


@feature(
    _GROUP,
    "`self.log(..., sync_dist=True)`",
    tried="training, validation with two loaders, test; mean, sum, max, min, per step, per epoch, numbers, "
    "`log_dict`, `rank_zero_only`",
    outcome="same values, on both ranks",
)
def test_logging_in_every_stage() -> None:
    ours, theirs = run_both(_log_everywhere)
    assert_same([rank["fitted"] for rank in ours], [rank["fitted"] for rank in theirs])
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our["evaluated"], their["evaluated"], rtol=0, atol=0)
        torch.testing.assert_close(our["fitted"].metrics, their["fitted"].metrics, rtol=0, atol=0)
    synced = [
        {n: v for n, v in rank["fitted"].metrics.items() if "local" not in n and "zero" not in n} for rank in ours
    ]
    assert_ranks_identical(synced)
    assert len(synced[0]) == 10 + 2 * 9


class _Measures(Logged):
    """Logs objects of torchmetrics."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank, network())
        self.accuracy = MulticlassAccuracy(3, average="micro")
        self.mean, self.rows = MeanMetric(), SumMetric()

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        outputs, classes = self.net(batch[0]), batch[1].argmax(dim=1)
        loss = F.cross_entropy(outputs, classes)
        self.accuracy(outputs, classes)
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        losses = F.cross_entropy(self.net(batch[0]), batch[1].argmax(dim=1), reduction="none")
        self.mean(losses)
        self.rows(len(losses))
        self.log_dict({"mean": self.mean, "rows": self.rows})


def _measure(place: Place) -> Result:
    return fit(place, _Measures, {"max_epochs": 2})


@feature(
    _GROUP,
    "torchmetrics objects",
    tried="accuracy, mean and sum, logged per epoch",
    outcome="within 1e-6 of one process, same bits as `ddp`",
)
def test_torchmetrics() -> None:
    ours, theirs = run_both(_measure)
    assert_same(ours, theirs)
    assert_same(ours, run_alone(_measure), tolerance=1e-6)
    assert_ranks_identical([rank.metrics for rank in ours])
    assert ours[0].metrics["rows"] == 24
