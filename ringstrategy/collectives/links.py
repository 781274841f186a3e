"""Unix sockets between neighbours on the ring: they carry file descriptors once, then one-byte tokens."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable

from ringstrategy.process_group import Rank, RankGroup

__all__ = ["Link", "LinkLost", "close_in_forked_child", "connect_ring"]

# How often a waiting thread looks up to see whether it should still wait.
_TICK_SECONDS = 0.5
# Before it sleeps, a waiting thread asks this often, giving way to others in between: waking a sleeper takes longer
# (about 40 us on a virtual machine) than most tokens do.
_POLLS = 50
# All ranks listen before anyone connects; one that takes longer than this cannot.
_CONNECT_SECONDS = 60.0
_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid; see unix(7)


class LinkLost(RuntimeError):
    """The neighbour closed the socket, or stayed silent for longer than the timeout."""


class Link:
    """A connected socket to one neighbour.

    Args:
        sock: the connected socket.
        peer: who is at the other end.
        timeout: seconds of silence after which :meth:`take` gives up.
    """

    def __init__(self, sock: socket.socket, peer: Rank, timeout: float) -> None:
        self.peer = peer
        self._socket = sock
        self._timeout = timeout
        self._received = bytearray()
        # A receive timeout of the kernel's costs nothing; Python's own would poll() before every recv().
        seconds, fraction = divmod(_TICK_SECONDS, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(seconds), int(fraction * 1e6)))

    def send(self, data: bytes) -> None:
        """Send all of ``data``; tokens are so few that the socket's buffer always takes them."""
        try:
            self._socket.sendall(data)
        except OSError as error:
            raise LinkLost(f"{self.peer} left the ring") from error

    def take(self, count: int) -> bytes:
        """Wait for the next ``count`` bytes from the neighbour.

        Raises:
            LinkLost: it left, or sent nothing for longer than the timeout.
        """
        received = self._received
        deadline = 0.0
        polls = _POLLS
        while len(received) < count:
            try:
                data = self._socket.recv(4096, socket.MSG_DONTWAIT if polls else 0)
            except BlockingIOError:
                if polls:
                    polls -= 1
                    os.sched_yield()
                    continue
                now = time.monotonic()
                deadline = deadline or now - _TICK_SECONDS + self._timeout
                if now >= deadline:
                    raise LinkLost(f"{self.peer} did not answer within {self._timeout:g} s") from None
                continue
            except OSError as error:
                raise LinkLost(f"{self.peer} left the ring") from error
            if not data:
                raise LinkLost(f"{self.peer} left the ring")
            received += data
        taken = bytes(received[:count])
        del received[:count]
        return taken

    def send_descriptor(self, fd: int, nbytes: int) -> None:
        """Hand over a file descriptor and the size of what is behind it."""
        socket.send_fds(self._socket, [struct.pack("q", nbytes)], [fd])

    def take_descriptor(self) -> tuple[int, int]:
        """Wait for a file descriptor (close-on-exec) and its size in bytes."""
        deadline = time.monotonic() + self._timeout
        while True:
            try:
                data, fds, _, _ = socket.recv_fds(self._socket, 8, 1, socket.MSG_CMSG_CLOEXEC)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise LinkLost(f"{self.peer} sent no memory within {self._timeout:g} s") from None
        if len(data) != 8 or len(fds) != 1:
            raise LinkLost(f"{self.peer} left the ring while memory was handed over")
        return fds[0], struct.unpack("q", data)[0]

    def hang_up(self) -> None:
        """Wake whoever waits on this link, here and at the other end. Safe from any thread."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket of this process."""
        self._socket.close()


def connect_ring(group: RankGroup, name: str) -> tuple[Link, Link]:
    """Connect every rank of one host with its neighbours. Collective.

    The address lies in the abstract namespace: no file to leave behind, but other users of the host can reach it. So
    nothing is handed over before the kernel has named the process at the other end.

    Args:
        group: at least two ranks, all on one host.
        name: what this ring is for; part of the address.

    Returns:
        The links to the left neighbour (rank - 1) and to the right one (rank + 1).

    Raises:
        OSError: the sockets cannot be made or reached.
        PermissionError: a stranger answered.
    """
    timeout = group.timeout.total_seconds()
    token = secrets.token_hex(16)
    problem: str | None = None
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        try:
            listener.bind(f"\0ringstrategy-{name}-{token}")
            listener.listen(1)
        except OSError as error:
            problem = str(error)
        # All ranks listen, or all know why not, before anyone connects.
        offers = group.exchange((token, problem))
        for rank, (_, why) in enumerate(offers):
            if why is not None:
                raise OSError(f"rank {rank} cannot listen on a Unix socket: {why}")

        right = group.ranks[(group.rank + 1) % group.world_size]
        left = group.ranks[(group.rank - 1) % group.world_size]
        to_right = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            to_right.connect(f"\0ringstrategy-{name}-{offers[right.rank][0]}")
            _verify(to_right, right)
            listener.settimeout(min(timeout, _CONNECT_SECONDS))
            to_left = _accept(listener, left)
        except BaseException:
            to_right.close()
            raise
    return Link(to_left, left, timeout), Link(to_right, right, timeout)


def _accept(listener: socket.socket, expected: Rank) -> socket.socket:
    """Accept the neighbour; strangers are turned away, and do not keep it out."""
    while True:
        candidate, _ = listener.accept()
        try:
            _verify(candidate, expected)
        except PermissionError:
            candidate.close()
            continue
        candidate.setblocking(True)
        return candidate


def _verify(sock: socket.socket, expected: Rank) -> None:
    pid, uid, _ = _CREDENTIALS.unpack(
        sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size),
    )
    if (pid, uid) != (expected.pid, expected.uid):
        raise PermissionError(f"process {pid} of user {uid} answered in place of {expected}")


def close_in_forked_child(close: Callable[[], None]) -> None:
    """Call ``close`` in every process forked from this one, e.g. DataLoader workers.

    An open copy of a socket in a child would hide its owner's death from the neighbours.
    """
    os.register_at_fork(after_in_child=close)
