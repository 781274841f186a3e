"""Unix sockets between the ranks of one host, which carry file descriptors and tokens; and bells without a socket."""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator

from ringstrategy.process_group import Members, Rank

__all__ = ["Bell", "Link", "LinkLost", "close_in_forked_child", "connect_all", "naming"]

# How often a waiting thread looks up to see whether it should still wait.
_TICK_SECONDS = 0.5
# Before it sleeps, a waiting thread asks this often, giving way to others in between: waking a sleeper takes longer
# (about 40 us on a virtual machine) than most tokens do.
_POLLS = 50
# All ranks listen before anyone connects; one that takes longer than this cannot.
_CONNECT_SECONDS = 60.0
_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid; see unix(7)


class LinkLost(RuntimeError):
    """The peer closed the socket, or stayed silent for longer than the timeout."""

    @classmethod
    def told(cls, peer: object, error: BaseException) -> LinkLost:
        """What the process group's error of a message with ``peer`` means, with its name."""
        return cls(f"{peer} is gone, or did not answer in time: {error}")


@contextlib.contextmanager
def naming(peer: object) -> Iterator[None]:
    """Around messages of the process group with ``peer``: their errors become a :class:`LinkLost` that names it.

    Not only waiting for a message fails: once the backend knows that the peer is gone, starting one does.
    """
    try:
        yield
    except RuntimeError as error:
        raise LinkLost.told(peer, error) from error


class Bell:
    """One process rings it, another counts the rings.

    Behind it is an eventfd(2). Unlike a token in a socket, a ring never finds the buffer full, so that it never waits
    for the other side; like a token, it orders the memory accesses before it and after it.

    Args:
        fd: a peer's bell, by its descriptor; a new one by default.
    """

    def __init__(self, fd: int | None = None) -> None:
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK) if fd is None else fd

    def ring(self) -> None:
        """Ring once."""
        os.eventfd_write(self.fd, 1)

    def heard(self) -> int:
        """How often it has rung since the last call."""
        try:
            return os.eventfd_read(self.fd)
        except BlockingIOError:
            return 0

    def close(self) -> None:
        """Close the descriptor of this process. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1


class Link:
    """A connected socket to one other rank.

    Args:
        sock: the connected socket.
        peer: who is at the other end.
        timeout: seconds of silence after which :meth:`take` gives up.
    """

    def __init__(self, sock: socket.socket, peer: Rank, timeout: float) -> None:
        self.peer = peer
        self._socket = sock
        self._timeout = timeout
        # A receive timeout of the kernel's costs nothing; Python's own would poll() before every recv().
        seconds, fraction = divmod(_TICK_SECONDS, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(seconds), int(fraction * 1e6)))

    def send(self, data: bytes) -> None:
        """Send all of ``data``; tokens are so few that the socket's buffer always takes them."""
        try:
            self._socket.sendall(data)
        except OSError as error:
            raise LinkLost(f"{self.peer} is gone") from error

    def take(self, count: int) -> bytes:
        """Wait for the next ``count`` bytes from the peer.

        Raises:
            LinkLost: it left, or sent nothing for longer than the timeout.
        """
        received = b""
        deadline = 0.0
        polls = _POLLS
        while len(received) < count:
            try:
                # Not a byte more than asked for: a descriptor may follow, and would be lost.
                data = self._socket.recv(count - len(received), socket.MSG_DONTWAIT if polls else 0)
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
                raise LinkLost(f"{self.peer} is gone") from error
            if not data:
                raise LinkLost(f"{self.peer} is gone")
            received += data
        return received

    def send_descriptor(self, fd: int, nbytes: int) -> None:
        """Hand over a file descriptor and the size of what is behind it."""
        try:
            socket.send_fds(self._socket, [struct.pack("q", nbytes)], [fd])
        except OSError as error:
            raise LinkLost(f"{self.peer} is gone") from error

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
            except OSError as error:
                raise LinkLost(f"{self.peer} is gone") from error
        if len(data) != 8 or len(fds) != 1:
            raise LinkLost(f"{self.peer} left while memory was handed over")
        return fds[0], struct.unpack("q", data)[0]

    def listen(self, bell: Bell) -> int:
        """Wait until the peer rings ``bell``.

        Returns:
            How often it has rung since it was last heard.

        Raises:
            LinkLost: the peer left without having rung, or did not ring within the timeout.
        """
        if rings := bell.heard():
            return rings
        # Sleeps at once: a bell announces what took the peer longer to make than it takes to wake up.
        poll = select.poll()
        poll.register(bell.fd, select.POLLIN)
        poll.register(self._socket, 0)  # an end of the socket shows all the same
        deadline = time.monotonic() + self._timeout
        while True:
            events = poll.poll(max(deadline - time.monotonic(), 0.0) * 1000)
            # What was rung before the end counts.
            if rings := bell.heard():
                return rings
            if events:
                raise LinkLost(f"{self.peer} is gone")
            if time.monotonic() >= deadline:
                raise LinkLost(f"{self.peer} did not answer within {self._timeout:g} s")

    def hang_up(self) -> None:
        """Wake whoever waits on this link, here and at the other end. Safe from any thread."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket of this process."""
        self._socket.close()


def connect_all(group: Members, name: str) -> list[Link]:
    """Connect every rank of a group, all of them on one host, with every other. Collective.

    The addresses lie in the abstract namespace: no file to leave behind, but other users of the host can reach them. So
    nothing is handed over before the kernel has named the process at the other end.

    Args:
        group: ranks of one host.
        name: what the links are for; part of the address.

    Returns:
        The links to the other ranks, in the order of the group.

    Raises:
        OSError: the sockets cannot be made or reached.
        PermissionError: a stranger answered.
    """
    token = secrets.token_hex(16)
    problem: str | None = None
    sockets: dict[int, socket.socket] = {}  # by place in the group
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        try:
            listener.bind(f"\0ringstrategy-{name}-{token}")
            listener.listen(group.world_size)
        except OSError as error:
            problem = str(error)
        # All ranks listen, or all know why not, before anyone connects.
        offers = group.exchange((token, problem))
        for peer, (_, why) in zip(group.ranks, offers, strict=True):
            if why is not None:
                raise OSError(f"rank {peer.rank} cannot listen on a Unix socket: {why}")
        try:
            for place, peer in enumerate(group.ranks[: group.rank]):
                sockets[place] = sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                sock.connect(f"\0ringstrategy-{name}-{offers[place][0]}")
                if _peer(sock) != (peer.pid, peer.uid):
                    raise PermissionError(f"process {_peer(sock)[0]} answered in place of {peer}")
            later = range(group.rank + 1, group.world_size)
            expected = {(group.ranks[place].pid, group.ranks[place].uid): place for place in later}
            listener.settimeout(min(group.timeout.total_seconds(), _CONNECT_SECONDS))
            while expected:
                sock, _ = listener.accept()
                if _peer(sock) not in expected:
                    sock.close()  # a stranger; it does not keep the others out
                    continue
                sock.setblocking(True)
                sockets[expected.pop(_peer(sock))] = sock
        except BaseException:
            for sock in sockets.values():
                sock.close()
            raise
    return [Link(sockets[place], group.ranks[place], group.timeout.total_seconds()) for place in sorted(sockets)]


def _peer(sock: socket.socket) -> tuple[int, int]:
    """Process and user at the other end, as the kernel knows them."""
    pid, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, uid


def close_in_forked_child(close: Callable[[], None]) -> None:
    """Call ``close`` in every process forked from this one, e.g. DataLoader workers.

    An open copy of a socket in a child would hide its owner's death from the neighbours.
    """
    os.register_at_fork(after_in_child=close)
