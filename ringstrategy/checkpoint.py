"""Checkpoints that are there whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch
from fsspec.core import url_to_fs  # type: ignore[import-untyped]
from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]
from lightning.fabric.plugins import TorchCheckpointIO
from typing_extensions import override

__all__ = ["AtomicCheckpointIO"]

# A file that is still being written: hidden, and marked with the process that writes it.
_UNFINISHED = re.compile(r"\..*\.\d+-[0-9a-f]{8}\.tmp")


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes checkpoints so that a crash at any moment leaves the old one or the new one.

    A checkpoint is written beside its target, flushed to the disk, and moved over the target. What a killed process
    left unfinished is removed by the first save into the same folder. The files are those of
    ``TorchCheckpointIO``: any Lightning installation and :func:`torch.load` read them.

    A target that is a symbolic link is replaced and not followed: ``ModelCheckpoint(save_last="link")`` links
    ``last.ckpt`` to the best checkpoint, which a save through the link would overwrite.

    Remote URLs are left to ``TorchCheckpointIO``, whose filesystems bring transactions of their own. To save in the
    background, wrap it: ``AsyncCheckpointIO(AtomicCheckpointIO())``.
    """

    def __init__(self) -> None:
        super().__init__()
        self._tidy_folders: set[Path] = set()

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        """Write a checkpoint.

        Args:
            checkpoint: what to save; anything :func:`torch.save` accepts.
            path: target; missing folders are made.
            storage_options: must be ``None``, as in ``TorchCheckpointIO``.

        Raises:
            TypeError: ``storage_options`` was given.
            OSError: the file could not be written; it says why, which file, and what to do. A file that was at the
                path before is still there.
        """
        filesystem, local_path = url_to_fs(str(path))
        if storage_options is not None or not isinstance(filesystem, LocalFileSystem):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        target = Path(local_path)
        handled_by_caller = sys.exception()  # e.g. what made OnExceptionCheckpoint save
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            self._tidy(target.parent)
            with _replacement_of(target) as file:
                torch.save(checkpoint, file)
            _flush_folder(target.parent)
        except Exception as error:
            reason = _os_error_behind(error, handled_by_caller)
            if reason is None:
                error.add_note(f"while saving the checkpoint {target}")
                raise
            raise _explained(reason, target) from error

    def _tidy(self, folder: Path) -> None:
        """Remove what killed processes left in a folder, once per folder."""
        if folder in self._tidy_folders:
            return
        with contextlib.suppress(PermissionError):  # a folder may be writable and yet not readable
            for entry in folder.iterdir():
                if _UNFINISHED.fullmatch(entry.name):
                    _remove_if_abandoned(entry)
        self._tidy_folders.add(folder)


@contextlib.contextmanager
def _replacement_of(target: Path) -> Iterator[BinaryIO]:
    """A new file that takes the place of ``target`` when the block ends, and vanishes when it fails."""
    # The name is cut so that it stays below the filesystem's limit of 255 bytes.
    unfinished = target.with_name(f".{target.name[:50]}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    with _locked(unfinished) as file:
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())
            unfinished.replace(target)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[BinaryIO]:
    """Create a file and hold its lock, by which others see that its writer lives.

    The lock goes with the process, however that ends. It says more than a process id, which may be another process by
    now, or one in another container.
    """
    while True:
        with path.open("xb") as file:
            with contextlib.suppress(OSError):  # a filesystem without locks; there nothing is ever tidied up
                fcntl.flock(file, fcntl.LOCK_EX)
            if not _is_still_at(path, file):
                continue  # tidied away by another process before it was locked
            yield file
            return


def _remove_if_abandoned(path: Path) -> None:
    """Remove an unfinished file unless a live process holds its lock, or it cannot be told."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_still_at(path, file):
            path.unlink()


def _is_still_at(path: Path, file: BinaryIO) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def _flush_folder(folder: Path) -> None:
    """Make the move itself survive a power failure, where the folder can be opened and flushed."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except PermissionError:
        return
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a network filesystem that flushes files only
            raise
    finally:
        os.close(descriptor)


def _os_error_behind(error: BaseException, older: BaseException | None) -> OSError | None:
    """The system's error, which torch's writer buries under a RuntimeError about the position in the file.

    Args:
        error: what was raised.
        older: where the chain of causes leaves this save.
    """
    link: BaseException | None = error
    while link is not None and link is not older:
        if isinstance(link, OSError):
            return link
        link = link.__context__
    return None


def _explained(error: OSError, target: Path) -> OSError:
    """The same error with the file it is about and what to do."""
    what = error.strerror or str(error)
    folder = target.parent
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        free = shutil.disk_usage(folder).free / 2**20
        what += f" for this checkpoint: {free:.0f} MiB are free in {folder}; make room there, or save elsewhere"
    elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        what += f": user {os.geteuid()} cannot write in {folder}; change its permissions, or save elsewhere"
    elif error.errno in (errno.ENOTDIR, errno.EEXIST):
        what += f": something that is no folder is in the way of {folder}; move it, or save elsewhere"
    else:
        what += " while saving this checkpoint"
    return OSError(error.errno, what, str(target))
