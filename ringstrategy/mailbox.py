"""Short messages between the ranks of one host that outlive their sender and need no server."""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import struct
from collections.abc import Iterator
from typing import Any

from ringstrategy.process_group import Rank, RankGroup

__all__ = ["Mailbox"]

_MOST_BYTES = 16 * 1024  # of a message; a datagram must fit the socket's buffer
_LONGEST_TEXT = 1000  # to which the texts of a longer message are cut
_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid; see unix(7)


class Mailbox:
    """A datagram socket with an address that the other ranks know.

    The kernel keeps what has arrived, also for a stopped process and from one that has ended since. It names the sender
    too, so that other processes of the host, which can reach the address, are not heard.

    Args:
        group: the ranks.
        peers: those of this host, except this one. Without any there is no socket.

    Attributes:
        address: of the socket, in the abstract namespace.
    """

    def __init__(self, group: RankGroup, peers: tuple[Rank, ...]) -> None:
        self._ranks = {(peer.pid, peer.uid): peer.rank for peer in peers}
        self._socket: socket.socket | None = None
        self.address = f"\0ringstrategy-mailbox-{secrets.token_hex(16)}"
        if peers:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            self._socket.bind(self.address)
        addresses = group.exchange(self.address)
        self._addresses = [addresses[peer.rank] for peer in peers]

    @property
    def descriptors(self) -> tuple[int, ...]:
        """What to poll for messages."""
        return () if self._socket is None else (self._socket.fileno(),)

    def send(self, message: dict[str, Any]) -> None:
        """Send to all peers; values must be JSON. Never blocks."""
        data = json.dumps(message).encode()
        if len(data) > _MOST_BYTES:
            short = {key: value[:_LONGEST_TEXT] if isinstance(value, str) else value for key, value in message.items()}
            data = json.dumps(short).encode()
        for address in self._addresses:
            assert self._socket is not None
            # A rank that is gone hears nothing; one whose buffer is full has heard.
            with contextlib.suppress(OSError):
                self._socket.sendto(data, address)

    def receive(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """The messages that have arrived: sender's rank and message."""
        while self._socket is not None:
            try:
                data, ancillary, _, _ = self._socket.recvmsg(_MOST_BYTES, socket.CMSG_SPACE(_CREDENTIALS.size))
            except BlockingIOError:
                return
            sender = self._sender(ancillary)
            if sender is not None:
                yield sender, json.loads(data)

    def _sender(self, ancillary: list[tuple[int, int, bytes]]) -> int | None:
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS:
                pid, uid, _ = _CREDENTIALS.unpack(data[: _CREDENTIALS.size])
                return self._ranks.get((pid, uid))
        return None

    def close(self) -> None:
        """Close the socket."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
