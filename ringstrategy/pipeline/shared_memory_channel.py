"""Messages between two ranks of one host, through shared memory.

The sender copies a message into a ring of its own anonymous memory, which the receiver maps too. Neither passes through
the kernel but two bells: "there is a message" and "I have taken it".

.. code-block:: text

             ┌────────────── an arena: one piece of shared memory ───────────────────────────┐
             │ index (where each message lies)  │ free │ message 7 │ message 8 │     free    │
             └───────────────────────────────────────────────────────────────────────────────┘
                                                       ▲                       ▲
                                  the receiver takes this one next       the sender goes on here

Messages are taken in the order in which they were sent, so the oldest is freed first. When the ring is full, the sender
does not wait: it opens a larger arena, goes on there, and lets go of the old one once that is empty. So after a few
messages there is one arena that holds all that is ever under way at once. It starts again at its beginning whenever it
is empty, where the memory is in the cache.
"""

from __future__ import annotations

import os
import struct
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ringstrategy.collectives import memory
from ringstrategy.collectives.links import Bell, Link, LinkLost, close_in_forked_child, connect_all
from ringstrategy.pipeline.messages import aligned, pack, unpack
from ringstrategy.pipeline.ring_space import RingSpace
from ringstrategy.process_group import RankGroup

__all__ = ["SharedMemoryChannel", "connect_channels"]

_SMALLEST_ARENA = 256 * 1024
_GROWTH = 1.5
_ENTRIES = 512  # of an index: messages under way in one arena
_ENTRY = struct.Struct("=QQQ")  # where a message lies, bytes of its payload, bytes of its header
_INDEX_BYTES = aligned(_ENTRIES * _ENTRY.size)
_MOVED = (0, 0, 0)  # the entry that says: go on in the next arena


class _Arena:
    """A piece of shared memory with an index and messages, as one side maps it.

    Args:
        fd: the memory.
        nbytes: its size.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        # It is kept: a tensor made in inference mode could not be written to in training.
        with torch.inference_mode(False):
            self._memory = memory.map_whole(fd, nbytes)
        self._bytes = self._memory.numpy().data
        self._count = 0
        self.nbytes = nbytes
        self.space = RingSpace(_INDEX_BYTES, nbytes)

    @property
    def index_is_full(self) -> bool:
        """Whether there is an entry left for "moved", but for no further message."""
        return len(self.space) == _ENTRIES - 1

    def write_entry(self, *entry: int) -> None:
        _ENTRY.pack_into(self._bytes, self._count % _ENTRIES * _ENTRY.size, *entry)
        self._count += 1

    def read_entry(self) -> tuple[int, ...]:
        entry = _ENTRY.unpack_from(self._bytes, self._count % _ENTRIES * _ENTRY.size)
        self._count += 1
        return entry

    def payload(self, start: int, nbytes: int) -> Tensor:
        return self._memory[start : start + nbytes]

    def header(self, start: int, nbytes: int) -> memoryview:
        return self._bytes[start : start + nbytes]


def connect_channels(group: RankGroup) -> dict[int, SharedMemoryChannel]:
    """Connect every rank of a group, all of them on one host, with every other. Collective.

    Args:
        group: ranks of one host.

    Returns:
        The channels to the other ranks, by their place in the group.

    Raises:
        OSError: the sockets cannot be made or reached.
        LinkLost: another rank could not.
    """
    links = connect_all(group, "channels")
    others = [place for place in range(group.world_size) if place != group.rank]
    channels: dict[int, SharedMemoryChannel] = {}
    try:
        for place, link in zip(others, links, strict=True):
            channels[place] = SharedMemoryChannel(link, group.device)
    except BaseException:
        for channel in channels.values():
            channel.close()
        for link in links:
            link.close()
        raise
    return channels


class SharedMemoryChannel:
    """Messages to and from another rank of this host; see :class:`~ringstrategy.pipeline.channels.Channel`.

    Args:
        link: to that rank; from now on it belongs to the channel. The other rank makes its channel at the same time.
        device: where received tensors go that were on the sender's device.

    Raises:
        LinkLost: the other rank left meanwhile.
        OSError: no more descriptors.
    """

    def __init__(self, link: Link, device: torch.device) -> None:
        self.bytes_sent = 0
        self._link = link
        self._device = device
        self._aborted: BaseException | None = None
        self._arenas: deque[_Arena] = deque()  # this rank's; messages go to the last one
        self._theirs: _Arena | None = None  # the one that is read
        self._arrived = 0  # messages that the peer has announced, less those that were received
        self._sent, self._taken = Bell(), Bell()
        link.send_descriptor(self._sent.fd, 0)
        link.send_descriptor(self._taken.fd, 0)
        self._sent_by_peer = Bell(link.take_descriptor()[0])
        self._taken_by_peer = Bell(link.take_descriptor()[0])
        close = weakref.WeakMethod(self.close)
        close_in_forked_child(lambda: (method := close()) and method())

    def send(self, values: Sequence[Any], tag: str) -> None:
        """Copy the values into shared memory, and ring.

        Raises:
            LinkLost: more memory is needed, and the peer is not there to take it.
            OSError: there is no more memory.
        """
        self._raise_if_aborted()
        message = pack(values, tag)
        nbytes = message.payload_bytes + aligned(len(message.header))
        self._free_what_was_taken()
        arena, start = self._find_room(nbytes)
        message.write(arena.payload(start, message.payload_bytes))
        arena.header(start + message.payload_bytes, len(message.header))[:] = message.header
        arena.space.take(start, nbytes)
        arena.write_entry(start, message.payload_bytes, len(message.header))
        self._sent.ring()
        self.bytes_sent += message.tensor_bytes

    def receive(self, tag: str) -> list[Any]:
        """Wait for a ring, and copy the values out of the peer's memory."""
        self._raise_if_aborted()
        try:
            if not self._arrived:
                self._arrived = self._link.listen(self._sent_by_peer)
            arena, (start, payload_bytes, header_bytes) = self._next_entry()
        except LinkLost:
            self._raise_if_aborted()
            raise
        self._arrived -= 1
        try:
            header = arena.header(start + payload_bytes, header_bytes)
            return unpack(header, arena.payload(start, payload_bytes), tag, str(self._link.peer), self._device)
        finally:
            self._taken.ring()

    def expect(self, count: int) -> None:
        """Nothing to prepare."""

    def abort(self, error: BaseException) -> None:
        """Make pending and later calls raise ``error``; the peer finds this rank gone. Safe from any thread."""
        self._aborted = self._aborted or error
        self._link.hang_up()

    def close(self) -> None:
        """Close the socket and the bells, and let go of the memory. What was sent can still be received."""
        self._link.close()
        for bell in (self._sent, self._taken, self._sent_by_peer, self._taken_by_peer):
            bell.close()
        self._arenas.clear()
        self._theirs = None

    def _find_room(self, nbytes: int) -> tuple[_Arena, int]:
        last = self._arenas[-1] if self._arenas else None
        if last is not None and not last.index_is_full and (start := last.space.find(nbytes)) is not None:
            return last, start
        size = max(_SMALLEST_ARENA, _INDEX_BYTES + nbytes)
        if last is not None:
            size = max(size, last.nbytes if last.index_is_full else int(last.nbytes * _GROWTH))
        fd = memory.create(size)
        try:
            arena = _Arena(fd, size)
            self._link.send_descriptor(fd, size)
        finally:
            os.close(fd)
        if last is not None:
            last.write_entry(*_MOVED)
        self._arenas.append(arena)
        return arena, _INDEX_BYTES

    def _next_entry(self) -> tuple[_Arena, tuple[int, ...]]:
        if self._theirs is not None and (entry := self._theirs.read_entry()) != _MOVED:
            return self._theirs, entry
        fd, size = self._link.take_descriptor()
        try:
            self._theirs = _Arena(fd, size)
        finally:
            os.close(fd)
        return self._theirs, self._theirs.read_entry()

    def _free_what_was_taken(self) -> None:
        for _ in range(self._taken_by_peer.heard()):
            while not self._arenas[0].space:
                self._arenas.popleft()  # the peer has moved on
            self._arenas[0].space.free_oldest()

    def _raise_if_aborted(self) -> None:
        if self._aborted is not None:
            raise self._aborted
