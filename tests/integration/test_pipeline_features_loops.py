"""What the Trainer's loops can be told, under a pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import Tensor

from tests.helpers.compare import Result, result_of
from tests.helpers.features import feature
from tests.helpers.pipelines import (
    Batch,
    Classification,
    Pipelined,
    assert_like_one_process,
    batches,
    layered,
    rows,
    run_alone,
    run_stages,
)

pytestmark = pytest.mark.slow  # the whole table takes minutes

_GROUP = "Loops"


class _NotesBatches(Classification):
    """Notes which batches it sees."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        self.record("seen in training", batch[0][0, 0].item())
        return super().training_step(batch, batch_idx)

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
    "use_distributed_sampler": ({"use_distributed_sampler": True}, 6),
    "log_every_n_steps": ({"log_every_n_steps": 1}, 6),
    "inference_mode": ({"inference_mode": False, "val_check_interval": 2}, 6),
    "deterministic": ({"deterministic": True}, 6),
}


def _fit(place: Pipelined, options: dict[str, Any]) -> Result:
    module = _NotesBatches()
    trainer = place.trainer(**options)
    trainer.fit(module, rows(), rows())
    return result_of(trainer, module)


def _fit_each(place: Pipelined, runs: list[dict[str, Any]]) -> list[Result]:
    return [_fit(place, options) for options in runs]


@feature(
    _GROUP,
    ", ".join(f"`{name}`" for name in dict.fromkeys(flag.split(",")[0] for flag in _FLAGS)),
    tried="each by itself, in training with validation, both schedules",
    outcome="like one process, same batches",
)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_flags_of_the_trainer(schedule: str) -> None:
    runs = [options for options, _ in _FLAGS.values()]
    ranks = run_stages(_fit_each, 2, runs, chunks=2, schedule=schedule, timeout=110.0)
    alone = run_alone(_fit_each, runs)
    for index, (name, (_, steps)) in enumerate(_FLAGS.items()):
        of_ranks, expected = [rank[index] for rank in ranks], alone[index]
        assert_like_one_process(of_ranks, expected)
        assert expected.global_step == steps, name
        if schedule == "gpipe":
            assert all(rank.records["seen in training"] == expected.records["seen in training"] for rank in of_ranks)
        # On gloo Lightning takes no_grad either way.
        assert not any(of_ranks[0].records["inference mode"])


class _Silent(pl.LightningModule):
    """Logs nothing: barebones forbids it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = layered()

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _fit_barebones(place: Pipelined) -> Result:
    module = _Silent()
    # Barebones is off by whatever else is given, also by the defaults of the tests.
    unset = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary", "num_sanity_val_steps")
    )
    trainer = place.trainer(barebones=True, **unset)
    assert trainer.barebones
    trainer.fit(module, rows())
    return result_of(trainer, module)


@feature(_GROUP, "`barebones`", tried="six steps", outcome="like one process")
def test_barebones() -> None:
    assert_like_one_process(run_stages(_fit_barebones, 2, chunks=2), run_alone(_fit_barebones))


def _resume(place: Pipelined, path: Path) -> tuple[Result, Result]:
    """Two epochs with a checkpoint in between, and in one go."""
    first = place.trainer()
    first.fit(_NotesBatches(), rows(), rows())
    first.save_checkpoint(path)
    module = _NotesBatches(layered(seed=5))
    trainer = place.trainer(max_epochs=2)
    trainer.fit(module, rows(), rows(), ckpt_path=path)
    return result_of(trainer, module), _fit(place, {"max_epochs": 2})


@feature(
    _GROUP,
    "`ckpt_path`",
    tried="an epoch, a checkpoint, another epoch (test_pipeline_checkpoints.py: between pipelines, one process, `ddp`)",
    outcome="like two epochs in one go",
)
def test_resuming(tmp_path: Path) -> None:
    ranks = run_stages(_resume, 3, tmp_path / "stages.ckpt", chunks=2)
    alone, _ = run_alone(_resume, tmp_path / "alone.ckpt")
    for each in zip(*ranks, strict=True):
        assert_like_one_process(each, alone)


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


def _fit_and_predict(place: Pipelined, folder: Path) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    folder = folder / str(place.world_size)
    folder.mkdir(exist_ok=True)
    module = Classification()
    trainer = place.trainer(callbacks=[_Writer(folder, place.rank)])
    trainer.fit(module, rows())
    predictions: Any = trainer.predict(module, batches(5, 12, 1))
    by_batch = [torch.load(folder / f"batch-{place.rank}-{index}.pt") for index in range(len(predictions))]
    return predictions, by_batch, torch.load(folder / f"epoch-{place.rank}.pt")


@feature(
    _GROUP,
    "`predict`, `BasePredictionWriter`",
    tried="returned, and written per batch and epoch, of batches of 5, 12 and 1 rows",
    outcome="like one process, all rows in order on every rank",
)
def test_predictions(tmp_path: Path) -> None:
    alone = run_alone(_fit_and_predict, tmp_path)
    assert [len(prediction) for prediction in alone[0]] == [5, 12, 1]
    for rank in run_stages(_fit_and_predict, 2, tmp_path, chunks=4):
        torch.testing.assert_close(rank, alone, rtol=0, atol=1e-9)


def _use_one_trainer_for_all(place: Pipelined) -> tuple[list[Result], list[Any]]:
    module = _NotesBatches()
    trainer = place.trainer()
    untrained = trainer.validate(module, rows(), verbose=False)
    trainer.fit(module, rows(), rows())
    first = result_of(trainer, module)
    validated = trainer.validate(module, rows(), verbose=False)
    tested = trainer.test(module, rows(), verbose=False)
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module, rows(), rows())
    return [first, result_of(trainer, module)], [untrained, validated, tested]


@feature(
    _GROUP,
    "`validate`, `fit`, `validate`, `test`, `fit` with one Trainer",
    tried="three epochs in two fits",
    outcome="like one process",
)
@pytest.mark.parametrize("schedule", ["gpipe", pytest.param("1f1b", marks=pytest.mark.slow)])
def test_one_trainer_for_several_stages(schedule: str) -> None:
    ranks = run_stages(_use_one_trainer_for_all, 2, chunks=2, schedule=schedule)
    alone = run_alone(_use_one_trainer_for_all)
    for expected, *of_ranks in zip(alone[0], *(results for results, _ in ranks), strict=True):
        assert_like_one_process(of_ranks, expected)
    for _, metrics in ranks:
        torch.testing.assert_close(metrics, alone[1], rtol=0, atol=1e-9)
