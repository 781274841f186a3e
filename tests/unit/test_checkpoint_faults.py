"""A save that is killed, crowded or refused harms nothing and says why."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import resource
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ringstrategy.checkpoint import AtomicCheckpointIO
from tests.helpers.checkpoints import checkpoint_of, unfinished_in, version_at
from tests.helpers.ranks import RanksFailedError, run_ranks


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A file that holds checkpoint 1."""
    path = tmp_path / "model.ckpt"
    AtomicCheckpointIO().save_checkpoint(checkpoint_of(1), path)
    return path


def _save_and_die(rank: int, world_size: int, path: Path, function: str, call: int) -> None:
    """Save checkpoint 2 over checkpoint 1 and be killed where a function of ``os`` is called."""
    original = getattr(os, function)
    calls = 0

    def deadly(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args)

    setattr(os, function, deadly)
    AtomicCheckpointIO().save_checkpoint(checkpoint_of(2), path)


@pytest.mark.parametrize(
    ("function", "call", "version", "leftovers"),
    [("fsync", 1, 1, 1), ("replace", 1, 1, 1), ("fsync", 2, 2, 0)],
    ids=["before the flush", "before the move", "after the move"],
)
def test_a_kill_at_a_turning_point_leaves_the_old_or_the_new(
    old: Path, function: str, call: int, version: int, leftovers: int
) -> None:
    with pytest.raises(RanksFailedError, match="killed by SIGKILL"):
        run_ranks(_save_and_die, 1, old, function, call, init=False)
    assert version_at(old) == version
    assert len(unfinished_in(old.parent)) == leftovers
    AtomicCheckpointIO().save_checkpoint(checkpoint_of(3), old)
    assert list(old.parent.iterdir()) == [old]
    assert version_at(old) == 3


def _save_until_killed(rank: int, world_size: int, path: Path, seconds: float) -> None:
    checkpoint_io = AtomicCheckpointIO()
    checkpoint_io.save_checkpoint(checkpoint_of(0, 250_000), path)
    threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
    for version in range(1, 100_000):
        checkpoint_io.save_checkpoint(checkpoint_of(version, 250_000), path)


def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    """Symptom: a job that is killed during a save has no checkpoint to resume from."""
    path = tmp_path / "model.ckpt"
    interrupted = 0
    for moment in range(16):
        with pytest.raises(RanksFailedError, match="killed by SIGKILL"):
            run_ranks(_save_until_killed, 1, path, 0.005 + 0.0037 * moment, init=False)
        assert version_at(path) >= 0
        interrupted += bool(unfinished_in(tmp_path))
        assert len(unfinished_in(tmp_path)) <= 1, "the next start removes what the last kill left"
    assert interrupted > 0, "no kill fell into a save"


def test_the_unfinished_file_of_a_live_process_is_not_touched(tmp_path: Path, old: Path) -> None:
    live, dead, foreign = (tmp_path / name for name in (".a.ckpt.1-0123abcd.tmp", ".b.ckpt.1-0123abcd.tmp", ".c.tmp"))
    for path in (live, dead, foreign):
        path.touch()
    with live.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        AtomicCheckpointIO().save_checkpoint(checkpoint_of(2), old)
        assert set(tmp_path.iterdir()) == {old, live, foreign}
    AtomicCheckpointIO().save_checkpoint(checkpoint_of(2), old)
    assert set(tmp_path.iterdir()) == {old, foreign}


def _save_many(rank: int, world_size: int, path: Path) -> None:
    for _ in range(50):
        # A new instance each time, so that each save looks for what others left.
        AtomicCheckpointIO().save_checkpoint(checkpoint_of(rank), path)


def test_processes_that_save_to_one_path_at_once_do_not_hurt_each_other(tmp_path: Path) -> None:
    run_ranks(_save_many, 3, tmp_path / "model.ckpt", init=False)
    assert version_at(tmp_path / "model.ckpt") in range(3)
    assert unfinished_in(tmp_path) == []


@pytest.fixture
def full_disk() -> Iterator[Path]:
    """A folder on a filesystem of one megabyte."""
    with tempfile.TemporaryDirectory() as folder:
        mount = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True, text=True
        )
        if mount.returncode != 0:
            pytest.skip(f"a small filesystem could not be mounted: {mount.stderr.strip()}")
        try:
            yield Path(folder)
        finally:
            subprocess.run(["umount", folder], check=True)


def test_a_full_disk_is_named_and_the_old_checkpoint_stays(full_disk: Path) -> None:
    path = full_disk / "model.ckpt"
    AtomicCheckpointIO().save_checkpoint(checkpoint_of(1), path)
    with pytest.raises(OSError, match=rf"No space left .* 1 MiB are free in {full_disk}; make room there") as failure:
        AtomicCheckpointIO().save_checkpoint(checkpoint_of(2, elements=250_000), path)
    assert failure.value.errno == errno.ENOSPC
    assert failure.value.filename == str(path)
    assert version_at(path) == 1
    assert list(full_disk.iterdir()) == [path]


def test_space_that_runs_out_at_the_flush_is_the_same_error(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(OSError, match="No space left") as failure:
        AtomicCheckpointIO().save_checkpoint(checkpoint_of(2), old)
    assert failure.value.errno == errno.ENOSPC
    assert version_at(old) == 1
    assert list(old.parent.iterdir()) == [old]


def test_an_error_in_the_middle_of_the_file_leaves_the_old_one(old: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with pytest.raises(OSError, match="File too large while saving this checkpoint") as failure:
            AtomicCheckpointIO().save_checkpoint(checkpoint_of(2), old)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert failure.value.errno == errno.EFBIG
    assert version_at(old) == 1
    assert list(old.parent.iterdir()) == [old]


def _save_as_another_user(rank: int, world_size: int, path: Path) -> str:
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)  # root may write anywhere
    with pytest.raises(PermissionError) as failure:
        AtomicCheckpointIO().save_checkpoint(checkpoint_of(1), path)
    os.seteuid(user)
    return str(failure.value)


def test_an_unwritable_folder_is_named() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        folder = Path(name)
        folder.chmod(0o555)
        for path in (folder / "model.ckpt", folder / "new" / "model.ckpt"):
            (message,) = run_ranks(_save_as_another_user, 1, path, init=False)
            assert re.search(rf"Permission denied: user \d+ cannot write in {path.parent}; change its perm", message)


@pytest.mark.parametrize("below", ["model.ckpt", "deeper/model.ckpt"])
def test_a_file_in_place_of_the_folder_is_named(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / "file" / below
    with pytest.raises(OSError, match=f"something that is no folder is in the way of {path.parent}") as failure:
        AtomicCheckpointIO().save_checkpoint(checkpoint_of(1), path)
    assert failure.value.filename == str(path)
