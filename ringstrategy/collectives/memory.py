"""Memory that has no name: sealed ``memfd`` files that the ranks of a host share."""

from __future__ import annotations

import fcntl
import mmap
import os

import torch
from torch import Tensor

__all__ = ["create", "map_whole"]

# A peer's file that could shrink under the mapping would turn a read into SIGBUS.
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def create(nbytes: int) -> int:
    """Create anonymous shared memory of fixed size, with every page in place.

    Nothing appears in ``/dev/shm``, a container's limit on it does not apply, and the kernel frees the memory with its
    last user, however that one ends.

    Args:
        nbytes: size in bytes, at least 1.

    Returns:
        A close-on-exec file descriptor.

    Raises:
        OSError: the memory is not there; said here and not as SIGBUS in the middle of a training step.
    """
    fd = os.memfd_create("ringstrategy", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(fd, 0, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except OSError as error:
        os.close(fd)
        raise OSError(error.errno, f"no shared memory of {nbytes} bytes: {error.strerror}") from error
    return fd


def map_whole(fd: int, nbytes: int) -> Tensor:
    """Map shared memory, one's own or a peer's, as a ``uint8`` tensor; it stays mapped while the tensor lives.

    Args:
        fd: from :func:`create`.
        nbytes: its size.

    Raises:
        OSError: the file does not have that size, or could still change it.
    """
    size, seals = os.fstat(fd).st_size, fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    if size != nbytes or seals & _SEALS != _SEALS:
        raise OSError(f"shared memory has {size} bytes and seals {seals:#x}; expected {nbytes}, {_SEALS:#x}")
    return torch.frombuffer(mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE), dtype=torch.uint8)
