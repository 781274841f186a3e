"""How a segment of a buffer gets from one host to the others and back: in full, or in 16 bits.

A segment is carried in three steps, between which messages are under way:

1. add up what the ranks of this host have, and send every other host the piece that it owns;
2. add up all hosts' copies of the piece that this host owns, and send the sum to every other host;
3. take the other hosts' sums, and hand out the whole segment on this host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ringstrategy.collectives.half_precision import Message, MessageLayout, add_into, decode, encode
from ringstrategy.collectives.links import naming
from ringstrategy.process_group import Rank, RankGroup

__all__ = ["HalfSegment", "HostMessages", "Peer", "PlainSegment", "Segment"]

_PIECES_TAG, _SUMS_TAG = 0x9300, 0x9301  # unlike those that others use in the group
_Wait = Callable[[], None]


class Peer(NamedTuple):
    """The rank of this lane on another host.

    Attributes:
        place: in the group.
        piece: the part of the segment that its host owns, in this rank's memory.
    """

    place: int
    piece: Tensor


class HostMessages:
    """Starts messages to ranks of other hosts; between two ranks they arrive in the order in which they were sent.

    Args:
        group: the ranks.

    Attributes:
        bytes_sent: bytes of messages so far.
    """

    def __init__(self, group: RankGroup) -> None:
        self.bytes_sent = 0
        self._ranks = group.ranks
        self._control = group.control  # gloo's, which carries any bytes

    def send(self, data: Tensor, place: int, tag: int) -> _Wait:
        """Start sending; what is returned waits for the end."""
        if not data.numel():
            return _nothing
        with naming(self._ranks[place]):
            work = dist.isend(data, group=self._control, group_dst=place, tag=tag)
        self.bytes_sent += data.nbytes
        return partial(_wait, work, self._ranks[place])

    def receive(self, data: Tensor, place: int, tag: int) -> _Wait:
        """Let data be received; what is returned waits for it.

        The wait raises :class:`~ringstrategy.collectives.links.LinkLost` if the other rank is gone, or silent for
        longer than the timeout.
        """
        if not data.numel():
            return _nothing
        with naming(self._ranks[place]):
            work = dist.irecv(data, group=self._control, group_src=place, tag=tag)
        return partial(_wait, work, self._ranks[place])


class Segment(Protocol):
    """A segment of a buffer, which is carried again and again."""

    def carry(self, messages: HostMessages) -> Iterator[None]:
        """Go through the three steps, and pause where messages are under way."""


class PlainSegment:
    """A segment that travels as it is.

    Args:
        own: the segment in this rank's memory.
        others: the same place in the memory of the other ranks of the host.
        mine: the part of ``own`` that this host owns.
        peers: the ranks of the lane on the other hosts, in their order.
        rooms: for the copies of ``mine`` that they send.
    """

    def __init__(
        self, own: Tensor, others: Sequence[Tensor], mine: Tensor, peers: Sequence[Peer], rooms: Sequence[Tensor]
    ) -> None:
        self._own, self._others, self._mine, self._peers, self._rooms = own, others, mine, peers, rooms

    def carry(self, messages: HostMessages) -> Iterator[None]:
        """Go through the three steps."""
        own, mine, peers = self._own, self._mine, self._peers
        for other in self._others:
            own.add_(other)
        copies = [
            messages.receive(room, peer.place, _PIECES_TAG) for peer, room in zip(peers, self._rooms, strict=True)
        ]
        sends = [messages.send(peer.piece, peer.place, _PIECES_TAG) for peer in peers]
        yield
        for wait, room in zip(copies, self._rooms, strict=True):
            wait()
            mine.add_(room)
        # No sum arrives before its host has received this rank's piece: nothing is overwritten that is still to go.
        sums = [messages.receive(peer.piece, peer.place, _SUMS_TAG) for peer in peers]
        sends += [messages.send(mine, peer.place, _SUMS_TAG) for peer in peers]
        yield
        for wait in (*sums, *sends):
            wait()
        for other in self._others:
            other.copy_(own)


class HalfSegment:
    """A segment of float32 numbers that travels in 16 bits, and is added in 32.

    Sums are rounded once, and the host that made them takes the rounded ones as well.

    Args:
        own: the segment in this rank's memory, float32.
        others: the same place in the memory of the other ranks of the host.
        mine: the part of ``own`` that this host owns.
        peers: the ranks of the lane on the other hosts, in their order.
        dtype: in which numbers travel.
    """

    def __init__(
        self, own: Tensor, others: Sequence[Tensor], mine: Tensor, peers: Sequence[Peer], dtype: torch.dtype
    ) -> None:
        self._own, self._others, self._mine, self._peers, self._dtype = own, others, mine, peers, dtype
        # By peer: this rank's copy of its piece, later the sum of it that comes back; its copy of this host's piece.
        self._pieces = [_room(peer.piece, dtype) for peer in peers]
        self._copies = [_room(mine, dtype) for _ in peers]
        self._sum = _room(mine, dtype)

    def carry(self, messages: HostMessages) -> Iterator[None]:
        """Go through the three steps."""
        own, mine, peers = self._own, self._mine, self._peers
        for other in self._others:
            own.add_(other)
        copies = [
            messages.receive(room, peer.place, _PIECES_TAG) for peer, room in zip(peers, self._copies, strict=True)
        ]
        sends = []
        for peer, room in zip(peers, self._pieces, strict=True):
            encode(peer.piece, _message(room, peer.piece, self._dtype))
            sends.append(messages.send(room, peer.place, _PIECES_TAG))
        yield
        for wait, room in zip(copies, self._copies, strict=True):
            wait()
            add_into(mine, _message(room, mine, self._dtype))
        encode(mine, _message(self._sum, mine, self._dtype))
        decode(_message(self._sum, mine, self._dtype), mine)
        sums = [messages.receive(room, peer.place, _SUMS_TAG) for peer, room in zip(peers, self._pieces, strict=True)]
        sends += [messages.send(self._sum, peer.place, _SUMS_TAG) for peer in peers]
        yield
        for wait, peer, room in zip(sums, peers, self._pieces, strict=True):
            wait()
            decode(_message(room, peer.piece, self._dtype), peer.piece)
        for wait in sends:
            wait()
        for other in self._others:
            other.copy_(own)


def _room(piece: Tensor, dtype: torch.dtype) -> Tensor:
    """Memory for the message that carries a piece; none for one without elements."""
    nbytes = MessageLayout(piece.numel(), 0, 1, dtype).nbytes(counts=False) if piece.numel() else 0
    return torch.empty(nbytes, dtype=torch.uint8)


def _message(room: Tensor, piece: Tensor, dtype: torch.dtype) -> Message:
    (message,) = MessageLayout(piece.numel(), 0, 1, dtype).messages(room, counts=False)
    return message


def _nothing() -> None:
    """Wait for a message that is not sent, because it would be empty."""


def _wait(work: dist.Work | None, peer: Rank) -> None:
    assert work is not None
    with naming(peer):
        work.wait()
