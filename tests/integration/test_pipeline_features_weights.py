"""Callbacks that average, freeze or prune weights, under a pipeline."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    Callback,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    ModelCheckpoint,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from tests.helpers.compare import Result, result_of
from tests.helpers.features import feature
from tests.helpers.pipelines import (
    Classification,
    Pipelined,
    assert_like_one_process,
    batches,
    fit_alone,
    fit_stages,
    layered,
    rows,
    run_alone,
    run_stages,
)
from tests.helpers.ranks import RanksFailedError

_GROUP = "Averaging, freezing, pruning"
pytestmark = pytest.mark.slow  # the whole table takes minutes

_LOAD = partial(batches, 12, 12, 12)


class _Normalised(Classification):
    """With a BatchNorm on the last stage; one micro-batch, as it normalises by the rows of a micro-batch."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(*layered(), nn.BatchNorm1d(4).double()))


class _NotesAbsent(Callback):
    """Notes what another callback's average lacks during training."""

    def __init__(self, averaging: Any) -> None:
        self._averaging = averaging
        self.absent: set[str] = set()

    def on_train_batch_end(self, *_: Any) -> None:
        average = self._averaging._average_model
        self.absent |= {name.removeprefix("module.") for name, p in average.named_parameters() if p.is_meta}


_EMA = get_ema_multi_avg_fn(0.8)  # type: ignore[no-untyped-call]

_AVERAGING: dict[str, Callable[[], Any]] = {
    "StochasticWeightAveraging": lambda: StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=2),
    "WeightAveraging": WeightAveraging,
    "WeightAveraging(use_buffers=False)": lambda: WeightAveraging(use_buffers=False),
    "WeightAveraging(multi_avg_fn)": lambda: WeightAveraging(multi_avg_fn=_EMA),
    "EMAWeightAveraging": lambda: EMAWeightAveraging(decay=0.8),
}


@dataclass(frozen=True)
class _Averaged:
    """A rank after training with averages, and after going on from one of its checkpoints."""

    results: list[Result]
    tested: Any
    average: dict[str, Tensor]
    absent: set[str]
    saved: list[dict[str, Any]]


def _average(place: Pipelined, name: str, folder: Path) -> _Averaged:
    folder = folder / str(place.world_size)
    averaging, module = _AVERAGING[name](), _Normalised()
    saving = ModelCheckpoint(folder, monitor="val_loss", save_top_k=-1, filename="{epoch}")
    absent = _NotesAbsent(averaging)
    trainer = place.trainer(max_epochs=5, callbacks=[averaging, absent, saving], enable_checkpointing=True)
    trainer.fit(module, _LOAD(), _LOAD())
    average = {name: tensor.clone() for name, tensor in averaging._average_model.state_dict().items()}
    tested = trainer.test(module, _LOAD(), verbose=False)
    resumed = _Normalised()
    again = place.trainer(max_epochs=5, callbacks=[_AVERAGING[name]()])
    again.fit(resumed, _LOAD(), _LOAD(), ckpt_path=folder / "epoch=3.ckpt")
    saved = [torch.load(path, weights_only=False) for path in sorted(folder.iterdir())]
    return _Averaged([result_of(trainer, module), result_of(again, resumed)], tested, average, absent.absent, saved)


@feature(
    _GROUP,
    ", ".join(f"`{name}`" for name in _AVERAGING),
    tried="from the third of five epochs (SWA), after every step (others), with BatchNorm; evaluated, saved in every "
    "epoch, tested, training on from the fourth epoch's checkpoint",
    outcome="averages are cut like the module, whole in checkpoints and after `fit`; like one process",
)
@pytest.mark.parametrize("name", [
    "StochasticWeightAveraging",
    "EMAWeightAveraging",
    *(pytest.param(name, marks=pytest.mark.slow) for name in _AVERAGING if name.startswith("WeightAveraging")),
])  # fmt: skip
def test_averages_of_weights(name: str, tmp_path: Path) -> None:
    ranks = run_stages(_average, 2, name, tmp_path, chunks=1, balance=[2, 4])
    alone = run_alone(_average, name, tmp_path)
    for expected, *of_ranks in zip(alone.results, *(rank.results for rank in ranks), strict=True):
        assert_like_one_process(of_ranks, expected)
    for rank in ranks:
        torch.testing.assert_close(rank.tested, alone.tested, rtol=0, atol=1e-9)
        torch.testing.assert_close(rank.average, alone.average, rtol=0, atol=1e-9)
    first = {"net.0.weight", "net.0.bias"}
    assert ranks[1].absent == first
    assert ranks[0].absent == {name for name, _ in _Normalised().named_parameters()} - first
    assert len(alone.saved) >= 5
    for ours, theirs in zip(ranks[0].saved, alone.saved, strict=True):
        assert list(ours) == list(theirs)
        for key in ("state_dict", "current_model_state", "averaging_state", "optimizer_states"):
            torch.testing.assert_close(ours.get(key), theirs.get(key), rtol=0, atol=1e-9, msg=key)


class _KeepsCopies(Callback):
    """A user's own average, and what is to be saved of it."""

    def __init__(self, late: bool) -> None:
        self._late = late
        self._average: Any = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if not self._late:
            self._average = copy.deepcopy(pl_module)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._late:
            self._average = copy.deepcopy(pl_module)

    @torch.no_grad()
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        for average, parameter in zip(self._average.parameters(), pl_module.parameters(), strict=True):
            average.lerp_(parameter, 0.5)

    def state_dict(self) -> dict[str, Any]:
        return dict(self._average.state_dict())


def _keep_copies(place: Pipelined, late: bool, folder: Path) -> Any:
    trainer = place.trainer(callbacks=[_KeepsCopies(late)])
    trainer.fit(Classification(), _LOAD())
    path = folder / f"{place.world_size}.ckpt"
    trainer.save_checkpoint(path)
    # After `fit` nobody waits for the rank that writes.
    return torch.load(path, weights_only=True)["callbacks"] if place.rank == 0 else None


class _SavesEveryStep(_KeepsCopies):
    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        trainer.save_checkpoint(Path(trainer.default_root_dir) / "step.ckpt")


def _save_late_copies(place: Pipelined, folder: Path) -> None:
    trainer = place.trainer(callbacks=[_SavesEveryStep(late=True)], default_root_dir=folder)
    trainer.fit(Classification(), _LOAD())


@feature(
    _GROUP,
    "Averages in callbacks of one's own",
    tried="`copy.deepcopy` of the module in `setup`, its `state_dict()` in the checkpoint",
    outcome="cut like the module, whole in checkpoints and after `fit`; like one process",
)
def test_copies_that_a_callback_makes_in_setup(tmp_path: Path) -> None:
    ranks = run_stages(_keep_copies, 2, False, tmp_path, chunks=2)
    alone = run_alone(_keep_copies, False, tmp_path)
    torch.testing.assert_close(ranks[0], alone, rtol=0, atol=1e-9)


@feature(
    _GROUP,
    "Copies that a callback makes after set-up",
    tried="`copy.deepcopy` of the module in `on_fit_start`, its `state_dict()` in the checkpoint",
    outcome="a copy holds what its stage holds; saving it is refused, with its place in the checkpoint",
)
def test_later_copies_are_not_saved_in_part(tmp_path: Path) -> None:
    with pytest.raises(RanksFailedError, match="belongs to another stage and has no values here") as raised:
        run_stages(_save_late_copies, 2, tmp_path, chunks=2)
    outcomes = raised.value.outcomes
    assert [outcome.error_type for outcome in outcomes] == ["RuntimeError", "RankFailure"]
    assert "checkpoint['callbacks']['_SavesEveryStep']['net." in str(outcomes[0].error)
    assert not (tmp_path / "step.ckpt").exists()


class _Backbone(Classification):
    """Its backbone, on both stages, is frozen at first."""

    def __init__(self) -> None:
        backbone = nn.Sequential(*list(layered())[:4], nn.BatchNorm1d(8).double())
        super().__init__(nn.Sequential(backbone, layered()[4]))

    @property
    def backbone(self) -> nn.Module:
        return self.net.get_submodule("0")

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.record("trainable", self.net.get_parameter("0.0.weight").requires_grad)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


def _finetune(place: Pipelined, folder: Path) -> list[Result]:
    """Three epochs, and the last of them from a checkpoint."""
    results = []
    path = folder / f"{place.world_size}.ckpt"
    for epochs, resume in ((2, None), (3, path), (3, None)):
        module = _Backbone()
        finetuning = BackboneFinetuning(unfreeze_backbone_at_epoch=1, backbone_initial_lr=0.05)
        trainer = place.trainer(max_epochs=epochs, callbacks=[finetuning])
        trainer.fit(module, _LOAD(), _LOAD(), ckpt_path=resume)
        if epochs == 2:
            trainer.save_checkpoint(path)
        results.append(result_of(trainer, module))
    return results


@feature(
    _GROUP,
    "`BackboneFinetuning`",
    tried="backbone with BatchNorm on two stages, frozen for an epoch, then trained for two; a checkpoint in between",
    outcome="like one process",
)
@pytest.mark.parametrize("schedule", ["gpipe", pytest.param("1f1b", marks=pytest.mark.slow)])
def test_a_backbone_that_is_unfrozen(schedule: str, tmp_path: Path) -> None:
    ranks = run_stages(_finetune, 2, tmp_path, chunks=1, balance=[3, 3], schedule=schedule)
    alone = run_alone(_finetune, tmp_path)
    for expected, *of_ranks in zip(alone, *ranks, strict=True):
        assert_like_one_process(of_ranks, expected)
    assert alone[2].records["trainable"] == [False] * 3 + [True] * 6


@feature(
    _GROUP,
    "`GradientAccumulationScheduler`",
    tried="windows of one, two and four batches in three epochs, both schedules",
    outcome="like one process",
)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_gradient_accumulation_scheduler(schedule: str) -> None:
    options = {"max_epochs": 3, "callbacks": [GradientAccumulationScheduler({0: 1, 1: 2, 2: 4})]}
    ranks = fit_stages(2, Classification, rows, options=options, chunks=2, schedule=schedule)
    assert_like_one_process(ranks, fit_alone(Classification, rows, options=options))
    assert ranks[0].global_step == 6 + 3 + 2


@feature(
    _GROUP,
    "`ModelPruning`",
    tried="training",
    outcome="refused: it replaces parameters that a stage holds; prune after `fit`",
)
def test_pruning_is_refused() -> None:
    options = {"callbacks": [ModelPruning("l1_unstructured", amount=0.3)]}
    with pytest.raises(RanksFailedError, match="ValueError: ModelPruning replaces parameters") as raised:
        fit_stages(2, options=options, chunks=2)
    assert all(outcome.error_type in ("ValueError", "RankFailure") for outcome in raised.value.outcomes)
