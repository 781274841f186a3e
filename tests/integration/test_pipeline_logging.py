"""Every rank sees the same losses, metrics and decisions, whichever stage it is."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torchmetrics import MeanMetric, SumMetric
from torchmetrics.classification import MulticlassAccuracy

from tests.helpers.compare import Result, result_of
from tests.helpers.models import plain_sgd
from tests.helpers.pipelines import (
    SCHEDULES,
    Batch,
    Classification,
    Pipelined,
    assert_like_one_process,
    batches,
    fit_alone,
    fit_stages,
    layered,
    run_alone,
    run_stages,
)

_LOAD = partial(batches, 12, 12, 3)


class _Logs(Classification):
    """Logs by every option of ``self.log`` that says how values of batches become one."""

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        outputs, labels = self.net(batch[0]), batch[1]
        rows = len(labels)
        loss = F.cross_entropy(outputs, labels)
        hits = outputs.argmax(1) == labels
        both: Any = {"on_step": True, "on_epoch": True}
        self.log("loss", loss, prog_bar=True, batch_size=rows, **both)
        self.log("number", loss.item(), batch_size=rows, **both)
        self.log_dict({"accuracy": hits.double().mean(), "constant": 3.0}, batch_size=rows, **both)
        self.log("hits", hits.sum().double(), reduce_fx="sum", batch_size=rows, **both)
        self.log("most", outputs.max(), reduce_fx="max", batch_size=rows, **both)
        self.log("least", outputs.min(), reduce_fx="min", batch_size=rows, **both)
        return {"loss": loss, "outputs": outputs.detach(), "rows": float(rows)}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.record("returned", outputs["outputs"])
        self.record("loss", outputs["loss"])


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("stages", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_what_is_logged_and_returned_is_that_of_one_process(stages: int, schedule: str) -> None:
    """Symptom: metrics exist on the last rank only, or are means of micro-batches' means."""
    ranks = fit_stages(stages, _Logs, _LOAD, chunks=4, schedule=schedule)
    alone = fit_alone(_Logs, _LOAD)
    assert_like_one_process(ranks, alone)
    assert {"number_step", "constant_epoch", "hits_epoch", "most_step", "least_epoch"} <= ranks[0].metrics.keys()
    for rank in ranks:
        torch.testing.assert_close(rank.records, alone.records, rtol=0.0, atol=1e-9)


class _Measures(Classification):
    """Logs objects of torchmetrics in every loop."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(4, average="micro")
        self.classes = MulticlassAccuracy(4, average="macro")
        self.mean, self.rows = MeanMetric(), SumMetric()

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        outputs, labels = self.net(batch[0]), batch[1]
        self.accuracy(outputs, labels)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True, batch_size=len(labels))
        self.rows.update(len(labels))
        self.log("rows", self.rows, on_step=False, on_epoch=True, batch_size=len(labels))
        return F.cross_entropy(outputs, labels)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        outputs, labels = self.net(batch[0]), batch[1]
        self.classes.update(outputs, labels)
        self.mean.update(F.cross_entropy(outputs, labels, reduction="none"))
        self.log_dict({"val_classes": self.classes, "val_mean": self.mean}, batch_size=len(labels))

    def on_train_epoch_end(self) -> None:
        self.record("accuracy", self.accuracy.compute())


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("stages", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_torchmetrics(stages: int, schedule: str) -> None:
    """Symptom: stages count as replicas, so that a sum comes out doubled; or only the last stage has seen anything."""
    options = {"max_epochs": 2}
    ranks = fit_stages(stages, _Measures, _LOAD, options=options, chunks=4, schedule=schedule)
    alone = fit_alone(_Measures, _LOAD, options=options)
    assert_like_one_process(ranks, alone, tolerance=1e-6)  # their states are in single precision
    assert alone.metrics["rows"].item() == 27
    for rank in ranks:
        torch.testing.assert_close(rank.records, alone.records, rtol=0.0, atol=1e-6)


class _Decides(Classification):
    """Lowers its learning rate where the loss does not fall, and says what it did.

    Args:
        dtype: of its weights.
        rate: learning rate, by which the validation loss soon rises.
    """

    def __init__(self, dtype: torch.dtype, rate: float = 1.0) -> None:
        super().__init__(layered(dtype=dtype))
        self._rate = rate

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self._rate)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "loss"}}

    def on_train_epoch_end(self) -> None:
        optimizer: Any = self.optimizers()
        self.record("rate", optimizer.param_groups[0]["lr"])


def _decide(place: Pipelined, folder: Path, dtype: torch.dtype, options: dict[str, Any]) -> tuple[Result, list[Any]]:
    module = _Decides(dtype)
    stopping = EarlyStopping("val_loss", patience=2, min_delta=0.02)
    saving = ModelCheckpoint(folder, "{epoch}", monitor="val_loss", save_top_k=1)
    watching = LearningRateMonitor()
    trainer = place.trainer(
        max_epochs=9, callbacks=[stopping, saving, watching], logger=CSVLogger(folder), enable_checkpointing=True,
        log_every_n_steps=1, **options,
    )  # fmt: skip
    load = partial(batches, 12, 12, 3, dtype=dtype)
    trainer.fit(module, load(), load())
    seen = [stopping.stopped_epoch, Path(saving.best_model_path).name, watching.lrs, module.records["rate"]]
    return result_of(trainer, module), seen


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("dtype", "options", "tolerance"),
    [(torch.float64, {}, 1e-6), pytest.param(torch.float32, {"precision": "bf16-mixed"}, 2e-2, marks=pytest.mark.slow)],
    ids=["double", "bf16-mixed"],
)
def test_callbacks_and_schedulers_decide_alike(
    dtype: torch.dtype, options: dict[str, Any], tolerance: float, schedule: str, tmp_path: Path
) -> None:
    """Symptom: ranks stop at different epochs, save other files, or go on with other learning rates."""
    ranks = run_stages(_decide, 3, tmp_path / "ours", dtype, options, chunks=4, schedule=schedule)
    alone, expected = run_alone(_decide, tmp_path / "alone", dtype, options)
    assert all(seen == ranks[0][1] for _, seen in ranks)
    assert 0 < expected[0] < 8, "it did not stop early"
    assert len(set(expected[3])) > 1, "the rate did not change"
    assert ranks[0][1] == expected
    assert_like_one_process([result for result, _ in ranks], alone, tolerance)
    assert [file.name for file in (tmp_path / "ours").glob("*.ckpt")] == [ranks[0][1][1]]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("precision", ["32-true", pytest.param("bf16-mixed", marks=pytest.mark.slow)])
def test_every_parameter_of_every_stage_trains(precision: str, schedule: str) -> None:
    """Symptom: only the first stage's parameters change."""
    build = partial(Classification, layered(dtype=torch.float32), plain_sgd)
    load, options = partial(batches, 12, dtype=torch.float32), {"precision": precision}
    ranks = fit_stages(3, build, load, options=options, chunks=4, schedule=schedule, balance=[2, 2, 1])
    tolerance = 1e-6 if precision == "32-true" else 2e-2
    assert_like_one_process(ranks, fit_alone(build, load, options=options), tolerance)
    before = layered(dtype=torch.float32).state_dict()
    assert all(bool((after != before[name.removeprefix("net.")]).any()) for name, after in ranks[0].state.items())
