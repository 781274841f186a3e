"""Memory that the ranks of one host share: each owns one piece, and has those of all others mapped.

Two hand-overs frame what they do with it: "what I bring is in place" and "I have taken and given everything". They also
order the memory accesses, on every architecture.
"""

from __future__ import annotations

import os
import struct
import weakref
from typing import NamedTuple

import torch
from torch import Tensor

from ringstrategy.collectives import memory
from ringstrategy.collectives.base import Watch
from ringstrategy.collectives.links import Link, close_in_forked_child, connect_all
from ringstrategy.process_group import Members

__all__ = ["HostMemory", "Views"]

_BEGIN = struct.Struct("=QQQ")  # how many came before, offset and length in bytes
_DONE = b"d"


class Views(NamedTuple):
    """A buffer, as all ranks of the host have it.

    Attributes:
        offset: of its first byte in each rank's memory.
        nbytes: its length.
        own: this rank's, one-dimensional; complex numbers as pairs of real ones, since sums of both are the same.
        others: those of the other ranks, in the order of the members.
    """

    offset: int
    nbytes: int
    own: Tensor
    others: tuple[Tensor, ...]


class HostMemory:
    """The memory of this rank, and the others'.

    Args:
        members: ranks of one host. Their timeout bounds the silence of a peer.
        name: what it is for; part of the addresses of its sockets.

    Attributes:
        watch: is told of hand-overs; None while nobody asks.

    Raises:
        OSError: sockets cannot be had here.
    """

    def __init__(self, members: Members, name: str) -> None:
        self._me = members.ranks[members.rank]
        self._own: Tensor | None = None
        self._others: list[Tensor] = []
        self._count = 0
        self.watch: Watch | None = None
        self._links = connect_all(members, name)
        close_links = weakref.WeakMethod(self._close_links)
        close_in_forked_child(lambda: (close := close_links()) and close())

    def allocate(self, nbytes: int) -> Tensor:
        """Make the memory, and exchange it with the other ranks. Collective.

        Args:
            nbytes: size in bytes, the same on all ranks.

        Returns:
            A zeroed ``uint8`` tensor of ``nbytes`` elements in shared memory.

        Raises:
            OSError: the memory is not there, or another rank allocated another size.
            LinkLost: a rank left.
        """
        size = max(nbytes, 1)
        fd = memory.create(size)
        try:
            own = memory.map_whole(fd, size)
            for link in self._links:
                link.send_descriptor(fd, size)
        finally:
            os.close(fd)
        self._others = [self._take_memory(link, size) for link in self._links]
        self._own = own
        return own[:nbytes]

    def _take_memory(self, link: Link, size: int) -> Tensor:
        fd, theirs = link.take_descriptor()
        try:
            if theirs != size:
                raise OSError(f"{link.peer} allocated {theirs} bytes for its buckets, this rank {size}")
            return memory.map_whole(fd, size)
        finally:
            os.close(fd)

    def offset(self, buffer: Tensor) -> int:
        """Where ``buffer`` begins in this rank's memory, in bytes; 0 if it is empty."""
        assert self._own is not None
        return buffer.data_ptr() - self._own.data_ptr() if buffer.numel() else 0

    def views(self, buffer: Tensor) -> Views:
        """The same stretch of every rank's memory.

        Args:
            buffer: a contiguous view into the memory of the last :meth:`allocate`.

        Raises:
            ValueError: it is none.
        """
        assert self._own is not None
        offset = self.offset(buffer)
        end = offset + buffer.nbytes
        if not 0 <= offset <= end <= self._own.numel() or not buffer.is_contiguous():
            raise ValueError("An all-reduced buffer must be a contiguous view into the memory of the last allocate().")
        # Tensors of the caller's own: a version counter shared with gradients would make autograd see writes.
        own = _reinterpret(self._own.detach()[offset:end], buffer.dtype)
        others = tuple(_reinterpret(other[offset:end], buffer.dtype) for other in self._others)
        return Views(offset, buffer.nbytes, own, others)

    def begin(self, offset: int, nbytes: int) -> None:
        """Say that this rank's part of a buffer is in place, and wait until all say so.

        Raises:
            LinkLost: a rank left, or stayed silent for too long.
            RuntimeError: another rank is at another buffer.
        """
        count = self._count
        self._count += 1
        begin = _BEGIN.pack(count, offset, nbytes)
        for link in self._links:
            link.send(begin)
        for link in self._links:
            if (theirs := link.take(_BEGIN.size)) != begin:
                number, _, other_nbytes = _BEGIN.unpack(theirs)
                raise RuntimeError(
                    f"The ranks went different ways: {self._me} is in all-reduce {count} of {nbytes} bytes, "
                    f"{link.peer} in all-reduce {number} of {other_nbytes} bytes."
                )
            if self.watch is not None:
                self.watch.arrived(link.peer.rank)

    def end(self) -> None:
        """Say that this rank has taken and given everything, and wait until all say so.

        Raises:
            LinkLost: a rank left, or stayed silent for too long.
        """
        if self.watch is not None:
            self.watch.summed()
        for link in self._links:
            link.send(_DONE)
        for link in self._links:
            link.take(len(_DONE))

    def hang_up(self) -> None:
        """Make every wait for another rank end, here and there. Safe from any thread."""
        for link in self._links:
            link.hang_up()

    def close(self) -> None:
        """Close the sockets, and let go of the memory. Views of it stay readable."""
        self._close_links()
        self._own = None
        self._others = []

    def _close_links(self) -> None:
        for link in self._links:
            link.close()


def _reinterpret(raw: Tensor, dtype: torch.dtype) -> Tensor:
    return raw.view(dtype.to_real() if dtype.is_complex else dtype)
