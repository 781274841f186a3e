"""What the Trainer's loops can be told, under ``ring_ddp``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import Tensor

from tests.helpers.compare import Normalised, Place, Result, assert_same, fit, fit_both, normalised, result_of, run_both
from tests.helpers.features import feature
from tests.helpers.models import Batch, Regression

pytestmark = pytest.mark.slow  # the whole table takes minutes

_GROUP = "Loops"


class _NotesBatches(Normalised):
    """Notes which batches it sees."""

    def loss(self, batch: Batch) -> Tensor:
        self.record("seen in training", batch[0][0, 0].item())
        return super().loss(batch)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.record("inference mode", torch.is_inference_mode_enabled())
        super().validation_step(batch, batch_idx)


_FLAGS: dict[str, tuple[dict[str, Any], int]] = {
    "limit_train_batches, as a number": ({"limit_train_batches": 2}, 2),
    "limit_train_batches, as a share": ({"limit_train_batches": 0.5, "limit_val_batches": 0.34}, 3),
    "limit_val_batches": ({"limit_val_batches": 1}, 6),
    "overfit_batches": ({"overfit_batches": 2, "max_epochs": 2}, 4),
    "fast_dev_run": ({"fast_dev_run": True}, 1),
    "fast_dev_run, several batches": ({"fast_dev_run": 3}, 3),
    "max_steps": ({"max_steps": 8, "max_epochs": None}, 8),
    "val_check_interval": ({"val_check_interval": 2}, 6),
    "check_val_every_n_epoch": ({"check_val_every_n_epoch": 2, "max_epochs": 4}, 24),
    "num_sanity_val_steps": ({"num_sanity_val_steps": 2}, 6),
    "detect_anomaly": ({"detect_anomaly": True}, 6),
    "accumulate_grad_batches": ({"accumulate_grad_batches": 4}, 2),
    "use_distributed_sampler": ({"use_distributed_sampler": True}, 3),
    "log_every_n_steps": ({"log_every_n_steps": 1}, 6),
}


def _fit_each(place: Place, runs: list[dict[str, Any]]) -> list[Result]:
    return [fit(place, _NotesBatches, options) for options in runs]


@feature(
    _GROUP,
    ", ".join(f"`{name}`" for name in dict.fromkeys(flag.split(",")[0] for flag in _FLAGS)),
    tried="each by itself, in training with validation",
    outcome="same bits, same batches",
)
def test_flags_of_the_trainer() -> None:
    ours, theirs = run_both(_fit_each, [options for options, _ in _FLAGS.values()])
    for index, (name, (_, steps)) in enumerate(_FLAGS.items()):
        of_ours, of_theirs = ([rank[index] for rank in ranks] for ranks in (ours, theirs))
        assert_same(of_ours, of_theirs)
        assert of_ours[0].global_step == steps, name
        assert [rank.records for rank in of_ours] == [rank.records for rank in of_theirs], name


class _Deterministic(_NotesBatches):
    def on_train_start(self) -> None:
        self.record("deterministic", torch.are_deterministic_algorithms_enabled())


@feature(_GROUP, "`deterministic`", tried="twice the same run", outcome="same bits, and again in the second run")
def test_deterministic_runs() -> None:
    (ours, theirs), (again, _) = (fit_both(_Deterministic, deterministic=True) for _ in range(2))
    assert_same(ours, theirs)
    assert_same(ours, again)
    assert [rank.records["deterministic"] for rank in ours] == [[True]] * 2


class _Silent(Regression):
    """Logs nothing: barebones forbids it."""


@feature(_GROUP, "`barebones`", tried="six steps", outcome="same bits")
def test_barebones() -> None:
    # Barebones is off by whatever else is given, also by the defaults of the tests.
    ours, theirs = run_both(_fit_barebones)
    assert_same(ours, theirs)


def _fit_barebones(place: Place) -> Result:
    module = _Silent(place.rank, normalised())
    unset = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary", "num_sanity_val_steps")
    )
    trainer = place.trainer(barebones=True, **unset)
    assert trainer.barebones
    trainer.fit(module, place.shard())
    return result_of(trainer, module)


class _ReadsItsStatistics(_NotesBatches):
    """Every other step reads buffers that an evaluation has used."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.net.get_submodule("3").train(batch_idx % 2 == 0)


@feature(
    _GROUP,
    "`inference_mode`",
    tried="on and off, validation between the steps, buffers read in training",
    outcome="same bits; on gloo Lightning takes `no_grad` either way",
)
@pytest.mark.parametrize("inference_mode", [True, False])
def test_inference_mode(inference_mode: bool) -> None:
    ours, theirs = fit_both(_ReadsItsStatistics, inference_mode=inference_mode, val_check_interval=2)
    assert_same(ours, theirs)
    assert [rank.records["inference mode"] for rank in ours] == [rank.records["inference mode"] for rank in theirs]
    assert not any(ours[0].records["inference mode"])


def _resume(place: Place, folder: Path) -> dict[str, Result]:
    """Two epochs in one go, and with a checkpoint of either strategy in between."""
    results = {}
    for saved_by in ("ring_ddp", "ddp"):
        first = Place(place.rank, place.world_size, saved_by)
        checkpoint = folder / f"{saved_by}-{place.strategy}.ckpt"
        trainer = first.trainer()
        trainer.fit(_NotesBatches(place.rank), place.shard(), place.shard())
        trainer.save_checkpoint(checkpoint)
        module = _NotesBatches(place.rank + 5)
        trainer = place.trainer(max_epochs=2)
        trainer.fit(module, place.shard(), place.shard(), ckpt_path=checkpoint)
        results[saved_by] = result_of(trainer, module)
    return results | {"unbroken": fit(place, _NotesBatches, {"max_epochs": 2})}


@feature(
    _GROUP,
    "`ckpt_path`",
    tried="an epoch, a checkpoint, another epoch, the second also with the other strategy",
    outcome="same bits as two epochs in one go",
)
def test_resuming(tmp_path: Path) -> None:
    ours, theirs = run_both(_resume, tmp_path)
    for saved_by in ("ring_ddp", "ddp"):
        assert_same([rank[saved_by] for rank in ours], [rank["unbroken"] for rank in ours])
        assert_same([rank[saved_by] for rank in ours], [rank[saved_by] for rank in theirs])
    assert ours[0]["unbroken"].global_step == 12


class _Writer(BasePredictionWriter):
    def __init__(self, folder: Path, rank: int) -> None:
        super().__init__("batch_and_epoch")
        self._folder, self._rank = folder, rank

    def write_on_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        prediction: Any,
        batch_indices: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        torch.save(prediction, self._folder / f"batch-{self._rank}-{batch_idx}.pt")

    def write_on_epoch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, predictions: Any, batch_indices: Any
    ) -> None:
        torch.save(predictions, self._folder / f"epoch-{self._rank}.pt")


def _fit_and_predict(place: Place, folder: Path) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    folder = folder / place.strategy
    folder.mkdir(exist_ok=True)
    module = _NotesBatches(place.rank)
    trainer = place.trainer(callbacks=[_Writer(folder, place.rank)])
    trainer.fit(module, place.shard())
    predictions: Any = trainer.predict(module, place.shard())
    by_batch = [torch.load(folder / f"batch-{place.rank}-{index}.pt") for index in range(len(predictions))]
    return predictions, by_batch, torch.load(folder / f"epoch-{place.rank}.pt")


@feature(
    _GROUP,
    "`predict`, `BasePredictionWriter`",
    tried="returned, and written per batch and epoch, after training with BatchNorm",
    outcome="same bits on each rank",
)
def test_predictions(tmp_path: Path) -> None:
    for ours, theirs in zip(*run_both(_fit_and_predict, tmp_path), strict=True):
        assert len(ours[0]) == 6
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
        torch.testing.assert_close(ours[1], ours[0], rtol=0, atol=0)
        torch.testing.assert_close(ours[2], ours[0], rtol=0, atol=0)


def _use_one_trainer_for_all(place: Place) -> dict[str, Any]:
    module = _NotesBatches(place.rank)
    trainer = place.trainer(max_epochs=1)
    untrained = trainer.validate(module, place.shard(), verbose=False)
    trainer.fit(module, place.shard(), place.shard())
    first = result_of(trainer, module)
    validated = trainer.validate(module, place.shard(), verbose=False)
    tested = trainer.test(module, place.shard(), verbose=False)
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module, place.shard(), place.shard())
    return {"first": first, "second": result_of(trainer, module), "metrics": [untrained, validated, tested]}


@feature(
    _GROUP,
    "`validate`, `fit`, `validate`, `test`, `fit` with one Trainer",
    tried="three epochs in two fits",
    outcome="same bits",
)
def test_one_trainer_for_several_stages() -> None:
    ours, theirs = run_both(_use_one_trainer_for_all)
    for name, steps in (("first", 6), ("second", 18)):
        assert_same([rank[name] for rank in ours], [rank[name] for rank in theirs])
        assert ours[0][name].global_step == steps
    assert ours[0]["metrics"] == theirs[0]["metrics"] == ours[1]["metrics"]
    untrained, validated, tested = ours[0]["metrics"]
    assert untrained[0]["val_loss"] != validated[0]["val_loss"] == tested[0]["test_loss"]
