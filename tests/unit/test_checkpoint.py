"""Checkpoints are the files that Lightning writes, in every way it asks for them."""

from __future__ import annotations

import errno
import os
import pickle
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]
import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins import AsyncCheckpointIO, TorchCheckpointIO

from ringstrategy.checkpoint import AtomicCheckpointIO
from tests.helpers.assertions import assert_ranks_identical
from tests.helpers.checkpoints import checkpoint_of, unfinished_in, version_at
from tests.helpers.models import Regression, parameters_of, shard


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A file that holds checkpoint 1."""
    path = tmp_path / "model.ckpt"
    AtomicCheckpointIO().save_checkpoint(checkpoint_of(1), path)
    return path


def test_a_save_makes_the_folder_replaces_the_file_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "model.ckpt"
    checkpoint_io = AtomicCheckpointIO()
    for version in (1, 2):
        checkpoint_io.save_checkpoint(checkpoint_of(version), path)
        assert version_at(path) == version
        assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("form", [str, Path, "file://{}".format, os.path.relpath])
def test_every_form_of_a_local_path_is_written_atomically(
    form: Callable[[Path], str | Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(TorchCheckpointIO, "save_checkpoint", _must_not_be_called)
    AtomicCheckpointIO().save_checkpoint(checkpoint_of(1), form(tmp_path / "model.ckpt"))
    assert version_at(tmp_path / "model.ckpt") == 1


def _must_not_be_called(*args: Any, **kwargs: Any) -> None:
    raise AssertionError("delegated")


def test_a_remote_url_is_left_to_lightning() -> None:
    AtomicCheckpointIO().save_checkpoint(checkpoint_of(3), "memory://bucket/model.ckpt")
    memory = fsspec.filesystem("memory")
    try:
        with memory.open("/bucket/model.ckpt") as file:
            assert torch.load(file, weights_only=True)["version"] == 3
        assert AtomicCheckpointIO().load_checkpoint("memory://bucket/model.ckpt")["version"] == 3
    finally:
        memory.rm("/bucket", recursive=True)


def test_storage_options_are_refused_as_lightning_does(old: Path) -> None:
    with pytest.raises(TypeError, match="not supported for `AtomicCheckpointIO`"):
        AtomicCheckpointIO().save_checkpoint(checkpoint_of(2), old, storage_options={})
    assert version_at(old) == 1


@pytest.mark.parametrize("mask", [0o022, 0o027])
def test_the_mode_follows_the_umask(tmp_path: Path, mask: int) -> None:
    previous = os.umask(mask)
    try:
        AtomicCheckpointIO().save_checkpoint(checkpoint_of(1), tmp_path / "model.ckpt")
    finally:
        os.umask(previous)
    assert stat.S_IMODE((tmp_path / "model.ckpt").stat().st_mode) == 0o666 & ~mask


def test_a_link_is_replaced_and_what_it_points_to_is_kept(old: Path) -> None:
    last = old.with_name("last.ckpt")
    last.symlink_to(old.name)
    AtomicCheckpointIO().save_checkpoint(checkpoint_of(2), last)
    assert version_at(last) == 2
    assert version_at(old) == 1


def test_the_longest_file_name_is_accepted(tmp_path: Path) -> None:
    path = tmp_path / ("ü" * 125 + ".ckpt")
    AtomicCheckpointIO().save_checkpoint(checkpoint_of(1), path)
    assert version_at(path) == 1


def test_the_file_is_flushed_before_it_is_moved_and_its_folder_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    fsync, replace = os.fsync, os.replace

    def noted_fsync(descriptor: int) -> None:
        steps.append("flush folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "flush file")
        if steps[-1] == "flush file":
            assert os.fstat(descriptor).st_size > 16_000  # nothing is left in a buffer of ours
        fsync(descriptor)

    def noted_replace(source: Any, target: Any) -> None:
        steps.append("move")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "replace", noted_replace)
    AtomicCheckpointIO().save_checkpoint(checkpoint_of(1), tmp_path / "model.ckpt")
    assert steps == ["flush file", "move", "flush folder"]


def test_what_cannot_be_pickled_raises_what_lightning_raises(old: Path) -> None:
    unpicklable = {"hyper_parameters": {"activation": lambda x: x}}
    with pytest.raises(Exception, match="pickle") as theirs:
        TorchCheckpointIO().save_checkpoint(unpicklable, old.with_name("theirs.ckpt"))
    # Even where the trouble of a caller that saves in an exception handler is of the system.
    try:
        raise OSError(errno.EIO, "the caller's trouble")
    except OSError:
        with pytest.raises(theirs.type, match="pickle") as ours:
            AtomicCheckpointIO().save_checkpoint(unpicklable, old)
    assert ours.value.__notes__ == [f"while saving the checkpoint {old}"]
    assert version_at(old) == 1
    assert unfinished_in(old.parent) == []


def test_it_can_save_in_the_background(old: Path) -> None:
    background = AsyncCheckpointIO(AtomicCheckpointIO())
    background.save_checkpoint(checkpoint_of(2), old)
    background.teardown()
    assert version_at(old) == 2
    assert background.load_checkpoint(old)["version"] == 2
    background.remove_checkpoint(old)
    assert not old.exists()


def test_it_survives_pickling_for_spawned_workers(old: Path) -> None:
    copy = pickle.loads(pickle.dumps(AtomicCheckpointIO()))
    copy.save_checkpoint(checkpoint_of(2), old)
    assert version_at(old) == 2


def test_plain_lightning_resumes_from_its_file(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    path = tmp_path / "model.ckpt"
    model, loader = Regression(), shard(0, 1, rows=16, batch_size=4)
    trainer = pl.Trainer(max_epochs=1, plugins=[AtomicCheckpointIO()], **options)
    trainer.fit(model, loader)
    trainer.save_checkpoint(path)
    resumed = pl.Trainer(max_epochs=2, **options)
    resumed.fit(Regression(), loader, ckpt_path=path)
    assert resumed.global_step == 8
    assert_ranks_identical([parameters_of(model), parameters_of(Regression.load_from_checkpoint(path))])
