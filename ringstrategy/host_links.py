"""Connections between the hosts of a run, which carry word of failures and signs of life.

The process group's messages tell that somebody is gone, at times minutes later, and seldom who. So the failure monitors
of all ranks are connected by TCP, in a star around rank 0, whose address all hosts know and reach:

    host a          host b          host c
    rank 0 ◀────────── 2
      ▲ ▲ ▲ ◀───────── 3
      │ │ └──────────────────────────── 4
      1 └────────────────────────────── 5

Rank 0 passes on what a rank has to say to all others. An empty line is a sign of life; whoever gives none for a while
is quiet, of which rank 0 tells everybody. A rank that cannot hear rank 0 knows that much itself. The end of a process
ends its connection; a cut link or a host without power does not, and shows only as quiet.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import select
import socket
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ringstrategy.process_group import RankGroup

__all__ = ["HostLinks"]

_log = logging.getLogger(__name__)

_QUIET_SECONDS = 3.0  # without a sign of life, of which there are three in this time: a busy machine may delay some
_CONNECT_SECONDS = 10.0
_MOST_BYTES = 1 << 20  # that wait to be sent to a rank which does not read


@dataclass
class _Peer:
    """A connection to another rank."""

    socket: socket.socket
    heard: float
    incoming: bytearray = field(default_factory=bytearray)
    outgoing: bytearray = field(default_factory=bytearray)


class HostLinks:
    """This rank's connections: rank 0's to all others, another rank's to rank 0; none on a single host.

    Collective: all ranks make theirs at once. Strangers who reach the port do not know the secret that the ranks share,
    and are not heard.

    Args:
        group: the ranks of the run.

    Attributes:
        connected: whether there are several hosts, and all ranks have reached rank 0.
        lost: ranks whose connection has ended.
        quiet_seconds: after which a rank without a sign of life is quiet.
    """

    def __init__(self, group: RankGroup) -> None:
        self.connected = False
        self.lost: set[int] = set()
        self.quiet_seconds = min(_QUIET_SECONDS, group.timeout.total_seconds() / 2)
        self._hub = group.rank == 0
        self._peers: dict[int, _Peer] = {}
        self._quiet: set[int] = set()  # at rank 0 what it sees, elsewhere what it says
        self._lock = threading.Lock()  # of what is to be sent
        self._beaten = 0.0
        self._poll: select.epoll | None = None
        if not group.one_host:
            self._connect(group)
            close = weakref.WeakMethod(self._close_sockets)
            # A copy in a child, e.g. a DataLoader worker, would hide the end of its parent.
            os.register_at_fork(after_in_child=lambda: (close_now := close()) and close_now())

    @property
    def descriptors(self) -> tuple[int, ...]:
        """What to poll for messages."""
        return () if self._poll is None else (self._poll.fileno(),)

    def send(self, message: dict[str, Any]) -> None:
        """Send to all other ranks; values must be JSON. Never blocks, and may be called by any thread."""
        self._send(json.dumps(message).encode() + b"\n", list(self._peers))

    def beat(self) -> None:
        """Give a sign of life if it is time for one."""
        now = time.monotonic()
        due = now - self._beaten >= self.quiet_seconds / 3
        if due:
            self._beaten = now
        self._send(b"\n" if due else b"", list(self._peers))  # also what could not be sent before
        if self._hub:
            quiet = {rank for rank, peer in self._peers.items() if now - peer.heard > self.quiet_seconds}
            if quiet != self._quiet:
                self._quiet = quiet
                self.send({"quiet": sorted(quiet)})

    def receive(self) -> Iterator[dict[str, Any]]:
        """The messages that have arrived."""
        for fd, _ in self._poll.poll(0) if self._poll is not None else ():
            for rank, peer in list(self._peers.items()):
                if peer.socket.fileno() == fd:
                    for line in self._read(rank, peer):
                        if self._hub:
                            self._send(line + b"\n", [other for other in self._peers if other != rank])
                        message = json.loads(line)
                        if "quiet" in message:
                            self._quiet = set(message["quiet"])
                        else:
                            yield message

    def quiet(self, seconds: float | None = None) -> list[int]:
        """Ranks that have given no sign of life, as far as this rank knows.

        Args:
            seconds: for at least as long; only of ranks to which this one is connected. None is a short while.
        """
        now, longest = time.monotonic(), self.quiet_seconds if seconds is None else seconds
        seen = {rank for rank, peer in list(self._peers.items()) if now - peer.heard > longest}
        # What a quiet rank 0 has said of others is out of date.
        return sorted(seen if seen or seconds is not None else self._quiet)

    def close(self) -> None:
        """Close the connections. What was sent arrives all the same."""
        for peer in self._peers.values():
            with contextlib.suppress(OSError):
                peer.socket.shutdown(socket.SHUT_WR)
                while peer.socket.recv(1 << 16):
                    pass  # unread data would make the kernel drop what is on its way
        self._close_sockets()
        self._peers.clear()

    def _close_sockets(self) -> None:
        for peer in self._peers.values():
            peer.socket.close()
        if self._poll is not None:
            self._poll.close()
            self._poll = None

    # -- sockets -----------------------------------------------------------------------------------------------------

    def _send(self, data: bytes, ranks: list[int]) -> None:
        with self._lock:
            for rank in ranks:
                if (peer := self._peers.get(rank)) is None:
                    continue
                if data != b"\n" or not peer.outgoing:  # old signs of life say as much as a new one
                    peer.outgoing += data
                # A connection that has ended shows where it is read; one that takes nothing, as quiet.
                with contextlib.suppress(OSError):
                    while peer.outgoing:
                        del peer.outgoing[: peer.socket.send(peer.outgoing)]
                del peer.outgoing[_MOST_BYTES:]

    def _read(self, rank: int, peer: _Peer) -> list[bytes]:
        """The whole lines that have come from a peer; of one that has left, the last."""
        ended = False
        try:
            while data := peer.socket.recv(1 << 16):
                peer.incoming += data
                peer.heard = time.monotonic()
            ended = True
        except BlockingIOError:
            pass
        except OSError:
            ended = True
        if ended:
            self.lost.add(rank)
            with self._lock:
                del self._peers[rank]
            peer.socket.close()  # which also ends its polling
        *lines, rest = bytes(peer.incoming).split(b"\n")
        peer.incoming = bytearray(rest)
        return [line for line in lines if line]

    def _connect(self, group: RankGroup) -> None:
        problem: str | None = None
        listener: socket.socket | None = None
        offer: tuple[list[str], int, str] = ([], 0, "")
        if self._hub:
            try:
                listener = socket.create_server(("", 0), backlog=group.world_size)
                listener.settimeout(_CONNECT_SECONDS)
                offer = (_addresses(), listener.getsockname()[1], secrets.token_hex(16))
            except OSError as error:
                problem = f"rank 0 cannot listen: {error}"
        (addresses, port, token), *_ = group.exchange(offer)
        if not self._hub and port:
            on_its_host = group.me.host == group.ranks[0].host
            try:
                reached = _reach(["127.0.0.1"] if on_its_host else addresses, port)
                reached.sendall(f"{token} {group.rank}\n".encode())
                self._peers[0] = _Peer(reached, time.monotonic())
            except OSError as error:
                problem = f"{group.me} cannot reach rank 0 at {' or '.join(addresses)}, port {port}: {error}"
        # The kernel has accepted whoever has connected, so that nobody needs to wait for rank 0 meanwhile.
        problem = next((theirs for theirs in group.exchange(problem) if theirs), None)
        if listener is not None:
            if problem is None:
                self._accept(listener, token, group.world_size - 1)
            listener.close()
        if problem is not None:
            self._close_sockets()
            self._peers.clear()
            if self._hub:
                _log.warning("A failure on one host will show on the others only by its consequences: %s.", problem)
            return
        self._poll = select.epoll()
        now = time.monotonic()
        for peer in self._peers.values():
            peer.socket.setblocking(False)
            peer.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            peer.heard = now
            self._poll.register(peer.socket, select.EPOLLIN)
        self.connected = True

    def _accept(self, listener: socket.socket, token: str, count: int) -> None:
        while len(self._peers) < count:
            sock, _ = listener.accept()
            sock.settimeout(_CONNECT_SECONDS)
            said = b""
            with contextlib.suppress(OSError):
                while not said.endswith(b"\n") and len(said) < 100 and (byte := sock.recv(1)):
                    said += byte
            theirs, _, rank = said.decode(errors="replace").strip().partition(" ")
            if secrets.compare_digest(theirs.encode(), token.encode()) and rank.isdecimal():
                self._peers[int(rank)] = _Peer(sock, time.monotonic())
            else:
                sock.close()  # a stranger


def _addresses() -> list[str]:
    """Where the ranks of other hosts may find this one: where they have met, or by its name."""
    return list(dict.fromkeys(filter(None, (os.environ.get("MASTER_ADDR"), socket.gethostname()))))


def _reach(addresses: list[str], port: int) -> socket.socket:
    """Connect to the first address that answers."""
    problems = []
    for address in addresses:
        try:
            return socket.create_connection((address, port), timeout=_CONNECT_SECONDS)
        except OSError as error:
            problems.append(str(error))
    raise OSError("; ".join(problems))
