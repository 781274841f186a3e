"""One ordinary checkpoint, written once, from which every rank goes on exactly."""

from __future__ import annotations

import os
import sys
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import AsyncCheckpointIO, TorchCheckpointIO
from torch import Tensor, nn

from ringstrategy import AtomicCheckpointIO
from tests.helpers.assertions import assert_ranks_identical
from tests.helpers.models import Batch, Regression, network, parameters_of, shard, state_of
from tests.helpers.ranks import run_ranks
from tests.helpers.trainers import trainer_on_rank


def _with_batch_norm(seed: int = 1) -> nn.Sequential:
    return nn.Sequential(*network(seed), nn.BatchNorm1d(3))


@dataclass(frozen=True)
class _Saved:
    """What a rank saw of a save: files it opened for writing, the type of the trainer's model, and its state."""

    opened: list[str]
    model_is_the_module: bool
    state: dict[str, Tensor]


def _fit_and_save(rank: int, world_size: int, path: Path, batch_norm: bool) -> _Saved:
    opened: list[str] = []

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and str(arguments[0]).startswith(str(path.parent)):
            name, _, flags = arguments
            if flags & (os.O_WRONLY | os.O_RDWR):
                opened.append(str(name))

    sys.addaudithook(note)
    module = Regression(rank, _with_batch_norm() if batch_norm else None)
    trainer = trainer_on_rank(rank, world_size)
    trainer.fit(module, shard(rank, world_size, rows=24, batch_size=4))
    trainer.save_checkpoint(path)
    return _Saved(opened, trainer.model is module, state_of(module))


def test_a_checkpoint_has_the_plain_keys_and_is_written_once(tmp_path: Path) -> None:
    """Symptom: keys carry a wrapper's prefix and do not load elsewhere."""
    path = tmp_path / "model.ckpt"
    ranks = run_ranks(_fit_and_save, 2, path, batch_norm=False)
    assert all(rank.model_is_the_module for rank in ranks)
    assert [len(rank.opened) for rank in ranks] == [1, 0]
    assert list(tmp_path.iterdir()) == [path]

    checkpoint = torch.load(path, weights_only=True)
    assert list(checkpoint["state_dict"]) == ["net.0.weight", "net.0.bias", "net.2.weight", "net.2.bias"]
    net = network(seed=2)
    net.load_state_dict({name.removeprefix("net."): tensor for name, tensor in checkpoint["state_dict"].items()})
    assert_ranks_identical([ranks[0].state, ranks[1].state, state_of(Regression.load_from_checkpoint(path))])
    assert_ranks_identical([ranks[0].state, parameters_of(net, prefix="net.")])
    with zipfile.ZipFile(path) as archive:
        (pickled,) = (archive.read(name) for name in archive.namelist() if name.endswith("data.pkl"))
    assert b"ringstrategy" not in pickled, "it must load where this package is not installed"


def test_a_checkpoint_holds_the_buffers_of_rank_0(tmp_path: Path) -> None:
    """Symptom: ranks go on with running statistics that none of them has seen."""
    ranks = run_ranks(_fit_and_save, 2, tmp_path / "model.ckpt", batch_norm=True)
    saved = torch.load(tmp_path / "model.ckpt", weights_only=True)["state_dict"]
    assert_ranks_identical([saved, *(rank.state for rank in ranks)])
    assert not torch.equal(saved["net.3.running_mean"], torch.zeros(3))


class _Adam(Regression):
    """Notes moments at the start, and the learning rate of every step."""

    def __init__(self, rank: int, seed: int) -> None:
        super().__init__(rank, network(seed))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.05)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)]

    def on_train_start(self) -> None:
        if self.trainer.optimizers[0].state:
            self.record("moments at start", self.moments())

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.record("lr", optimizer.param_groups[0]["lr"])

    def moments(self) -> dict[str, Tensor]:
        state = self.trainer.optimizers[0].state
        return {name: state[parameter]["exp_avg"].clone() for name, parameter in self.named_parameters()}


@dataclass(frozen=True)
class _Trained:
    global_step: int
    parameters: dict[str, Tensor]
    moments: dict[str, Tensor]
    records: dict[str, list[Any]]


def _train(
    rank: int, world_size: int, epochs: int, seed: int = 1, save: Path | None = None, resume: Path | None = None
) -> _Trained:
    module = _Adam(rank, seed)
    trainer = trainer_on_rank(rank, world_size, max_epochs=epochs)
    trainer.fit(module, shard(rank, world_size, rows=16 * world_size, batch_size=4), ckpt_path=resume)
    if save is not None:
        trainer.save_checkpoint(save)
    return _Trained(trainer.global_step, parameters_of(module), module.moments(), module.records)


def test_a_resumed_run_equals_an_unbroken_one(tmp_path: Path) -> None:
    """Symptom: only rank 0 has the restored moments or learning rate; counters are off by one."""
    straight = run_ranks(_train, 2, epochs=4)
    first = run_ranks(_train, 2, epochs=2, save=tmp_path / "model.ckpt")
    resumed = run_ranks(_train, 2, epochs=4, seed=7, resume=tmp_path / "model.ckpt")
    assert [rank.global_step for rank in straight + resumed] == [16] * 4
    assert_ranks_identical([rank.parameters for rank in straight + resumed])
    assert_ranks_identical([rank.moments for rank in straight + resumed])
    assert_ranks_identical([rank.records["moments at start"][0] for rank in resumed] + [first[0].moments])
    for before, after, unbroken in zip(first, resumed, straight, strict=True):
        assert before.records["lr"] + after.records["lr"] == unbroken.records["lr"]
        assert len(set(unbroken.records["lr"])) == 4


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_checkpoint_of_three_ranks_resumes_on_any_number(tmp_path: Path, world_size: int) -> None:
    """Symptom: a checkpoint asks for the number of processes that wrote it."""
    saved = run_ranks(_train, 3, epochs=2, save=tmp_path / "model.ckpt")
    resumed = run_ranks(_train, world_size, epochs=3, seed=7, resume=tmp_path / "model.ckpt")
    assert_ranks_identical([saved[0].moments, *(rank.records["moments at start"][0] for rank in resumed)])
    assert_ranks_identical([rank.parameters for rank in resumed])
    assert {rank.global_step for rank in resumed} == {12}


class _SlowCheckpointIO(AtomicCheckpointIO):
    """A disk that takes its time."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        time.sleep(self.seconds)
        super().save_checkpoint(checkpoint, path, storage_options)


class _OwnCheckpointIO(TorchCheckpointIO):
    """A user's own."""


def _fit_with(rank: int, world_size: int, path: Path, checkpoint_io: CheckpointIO | None) -> tuple[list[str], Any]:
    trainer = trainer_on_rank(rank, world_size, plugins=[] if checkpoint_io is None else [checkpoint_io])
    module = Regression(rank)
    trainer.fit(module, shard(rank, world_size, rows=16, batch_size=4))
    trainer.save_checkpoint(path)
    used, names = trainer.strategy.checkpoint_io, []
    if isinstance(used, AsyncCheckpointIO):
        used.teardown()  # as the strategy does at the end; this save came after it
        names.append(type(used).__name__)
        assert used.checkpoint_io is not None
        used = used.checkpoint_io
    return [*names, type(used).__name__], state_of(module)


@pytest.mark.parametrize(("checkpoint_io", "used"), [
    (None, ["AtomicCheckpointIO"]),
    (AsyncCheckpointIO(), ["AsyncCheckpointIO", "AtomicCheckpointIO"]),
    (_OwnCheckpointIO(), ["_OwnCheckpointIO"]),
    (AsyncCheckpointIO(_OwnCheckpointIO()), ["AsyncCheckpointIO", "_OwnCheckpointIO"]),
])  # fmt: skip
def test_saves_are_atomic_unless_the_user_says_otherwise(
    tmp_path: Path, checkpoint_io: CheckpointIO | None, used: list[str]
) -> None:
    """Symptom: saving in the background brings back the writer that may leave half a file."""
    ranks = run_ranks(_fit_with, 2, tmp_path / "model.ckpt", checkpoint_io)
    assert [names for names, _ in ranks] == [used] * 2
    saved = torch.load(tmp_path / "model.ckpt", weights_only=True)["state_dict"]
    assert_ranks_identical([saved, *(state for _, state in ranks)])
    assert [path.name for path in tmp_path.iterdir()] == ["model.ckpt"]


class _DisagreesOnBest(Regression):
    """Gets worse on rank 0 and better on rank 1."""

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("v", float(self.current_epoch if self.rank == 0 else -self.current_epoch))


def _fit_and_open_the_best(rank: int, world_size: int, folder: Path, seconds: float, save_last: Any) -> tuple[str, int]:
    keeper = ModelCheckpoint(dirpath=folder, monitor="v", save_top_k=1, save_last=save_last)
    trainer = trainer_on_rank(
        rank,
        world_size,
        max_epochs=3,
        enable_checkpointing=True,
        callbacks=[keeper],
        plugins=[_SlowCheckpointIO(seconds)],
    )
    loader = shard(rank, world_size, rows=16, batch_size=4)
    trainer.fit(_DisagreesOnBest(rank), loader, loader)
    return keeper.best_model_path, torch.load(keeper.best_model_path, weights_only=True)["epoch"]


@pytest.mark.parametrize(("seconds", "save_last", "names"), [
    (0.0, None, {"epoch=0-step=2.ckpt"}),
    (1.0, None, {"epoch=0-step=2.ckpt"}),
    (0.0, True, {"epoch=0-step=2.ckpt", "last.ckpt"}),
    (0.0, "link", {"epoch=0-step=2.ckpt", "last.ckpt"}),
])  # fmt: skip
def test_ranks_agree_on_the_best_checkpoint_and_find_it(
    tmp_path: Path, seconds: float, save_last: Any, names: set[str]
) -> None:
    """Symptom: rank 1 opens the best checkpoint before rank 0 has written it, or looks for another name, or hangs."""
    first, second = run_ranks(_fit_and_open_the_best, 2, tmp_path, seconds, save_last)
    assert first == second == (str(tmp_path / "epoch=0-step=2.ckpt"), 0)
    assert {path.name for path in tmp_path.iterdir()} == names
