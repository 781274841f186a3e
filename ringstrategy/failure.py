"""One rank fails: every rank knows which and why, and ends.

A run hangs when one rank is gone and the others wait for it inside a collective. So each rank has a monitor thread
that watches the other ranks:

- a rank that raises tells the others before its exception travels on (`FailureMonitor.report`);
- a rank that is killed shows through its pidfd, whatever children of it still live, and on other hosts through the end
  of its connection;
- a rank that is stopped, or stays away, is named after a minute, and given up after the timeout;
- so is a host that gives no more sign of life, or earlier if the transport, too, has lost it.

The first word is final. The monitor logs it once, makes every collective of this package raise it (now and later),
and if the main thread sits in a collective of somebody else's, which nothing can wake, ends the process after a grace
period.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import itertools
import logging
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ringstrategy.host_links import HostLinks
from ringstrategy.mailbox import Mailbox
from ringstrategy.process_group import Rank, RankGroup
from ringstrategy.waits import Waiting, late

__all__ = ["FailureMonitor", "FailureNote", "RankFailure", "is_stopped"]

_log = logging.getLogger(__name__)

_TICK_SECONDS = 0.25
_EXIT_SECONDS = 20.0  # long enough for a launching process to see its children end


@dataclass(frozen=True)
class FailureNote:
    """What the failing rank leaves behind, or a survivor writes for it.

    Attributes:
        rank: the rank that failed first.
        pid: its process.
        host: its host's name.
        where: what it was doing, e.g. ``"train, epoch 0, step 17"``, or what the survivor was doing that writes.
        reason: what happened to it.
    """

    rank: int
    pid: int
    host: str
    where: str
    reason: str

    def __str__(self) -> str:
        where = f", {self.where}" if self.where else ""
        return f"rank {self.rank} failed first (pid {self.pid} on {self.host}{where}): {self.reason}"


class RankFailure(RuntimeError):
    """Another rank failed, left, or did not answer within the timeout.

    Args:
        note: which rank, and why.
        waiting_for: what this rank was waiting for when it learned of it.

    Attributes:
        note: about the rank that failed first.
    """

    def __init__(self, note: FailureNote, waiting_for: str = "") -> None:
        super().__init__(f"{note}{f' [this rank waited for {waiting_for}]' if waiting_for else ''}")
        self.note = note


class FailureMonitor:
    """Watches the other ranks, and is watched.

    Args:
        group: the ranks of the run.
        where: tells what this rank is doing, for the note of a failure.
        warn_after: seconds after which a missing rank is named in the log, and again.
        grace: seconds that the main thread has, once a failure is known, before the process is ended.
    """

    def __init__(
        self,
        group: RankGroup,
        where: Callable[[], str] = lambda: "",
        *,
        warn_after: float = 60.0,
        grace: float = 5.0,
    ) -> None:
        self._ranks = group.ranks
        self._me = group.ranks[group.rank]
        self._world_size = group.world_size
        # Elsewhere than on Linux nobody is watched; a lost peer still shows as the transport's error.
        self._neighbours = {rank.rank: rank for rank in group.neighbours} if hasattr(os, "pidfd_open") else {}
        self._where = where
        self._timeout = group.timeout.total_seconds()
        self._warn_after = warn_after
        self._grace = grace
        self._failed = threading.Event()
        self._note: FailureNote | None = None
        self._own_error: BaseException | None = None
        self._known_since = 0.0
        self._leaving = False
        self._waiting: Waiting | None = None
        self._announced: int | None = None  # the wait that the others know of
        self._sequence = 0
        self._others: dict[int, Waiting] = {}
        self._stopped_since: dict[int, float] = {}
        self._warned_at = time.monotonic()
        self._callbacks: list[Callable[[BaseException], None]] = []
        self._interrupt: threading.Event | None = None
        self._wake, self._alarm = os.pipe()
        self._closing = False
        self._mailbox = Mailbox(group, tuple(self._neighbours.values()))
        self._host_links = HostLinks(group)
        self._pidfds = {rank: os.pidfd_open(neighbour.pid) for rank, neighbour in self._neighbours.items()}
        self._dead: set[int] = set()
        self._abandoned: list[dist.Work] = []
        self._thread = threading.Thread(target=self._run, name="ringstrategy-failure-monitor", daemon=True)
        self._thread.start()

    # -- for the main thread -----------------------------------------------------------------------------------------

    @property
    def failed(self) -> bool:
        """Whether some rank, perhaps this one, has failed."""
        return self._failed.is_set()

    @property
    def leaving(self) -> bool:
        """Whether the main thread has left what the ranks do together."""
        return self._leaving

    def on_failure(self, callback: Callable[[BaseException], None]) -> None:
        """Call ``callback`` with the error, from the monitor's thread, as soon as a failure is known."""
        self._callbacks.append(callback)

    def check(self) -> None:
        """Raise if a rank has failed.

        Raises:
            RankFailure: with the first failure.
        """
        if self._note is not None:
            raise self._error(self._note)

    @contextlib.contextmanager
    def waiting(self, label: str, on: int | None = None) -> Iterator[None]:
        """Around every wait for other ranks.

        Args:
            label: what is waited for, as the error shall name it.
            on: the rank that is waited for; None in a collective.

        Raises:
            RankFailure: a rank failed before or meanwhile; an error of the transport is only its consequence.
        """
        self.check()
        self._sequence += 1
        self._waiting = Waiting(self._sequence, label, on, time.monotonic())
        try:
            yield
        except RankFailure:
            raise
        except (RuntimeError, OSError) as error:
            # The transport notices a lost peer at once; who was lost, and why, is known a moment later.
            if self._failed.wait(2 * _TICK_SECONDS) or self._blame_the_dead() or self._wait_for_quiet():
                assert self._note is not None
                raise self._error(self._note) from error
            raise
        finally:
            self._waiting = None

    def join(self, work: dist.Work | None) -> None:
        """Wait for a CPU operation of the process group, but not beyond a failure. Inside :meth:`waiting`.

        Raises:
            RankFailure: a rank failed; the operation stays behind in the backend's threads.
        """
        assert work is not None  # as the types have it; only a rank outside the group gets none
        done = threading.Event()
        self._interrupt = done
        try:
            work.get_future().add_done_callback(lambda _: done.set())
            if not self.failed:
                done.wait()
        finally:
            self._interrupt = None
        if self._note is not None and not work.is_completed():
            self._abandoned.append(work)
            self.check()
        work.wait()

    def report(self, error: BaseException) -> None:
        """Tell the other ranks that this one fails with ``error``; its consequences elsewhere are not reported."""
        self.announce(error)
        self.leave()

    def announce(self, error: BaseException) -> None:
        """The same for an error that may be caught here, although the others cannot go on: every later wait raises."""
        if isinstance(error, RankFailure) or self._note is not None:
            return
        self._own_error = error
        text = "".join(traceback.format_exception_only(error)).strip()
        self._publish(FailureNote(self._me.rank, self._me.pid, self._me.host.name, self._where(), text))

    def leave(self) -> None:
        """From here on the end of another rank is no failure of its own."""
        self._leaving = True

    def close(self) -> None:
        """Stop watching. Idempotent."""
        if self._closing:
            return
        self._closing = True
        os.write(self._alarm, b"x")
        self._thread.join()
        self._mailbox.close()
        if self._note is not None and self._host_links.connected:
            atexit.register(_bound_exit)
        self._host_links.close()
        for fd in (self._wake, self._alarm, *self._pidfds.values()):
            os.close(fd)

    # -- the monitor's thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        poll = select.poll()
        ranks = {pidfd: rank for rank, pidfd in self._pidfds.items()}
        for fd in (self._wake, *self._mailbox.descriptors, *self._host_links.descriptors, *ranks):
            poll.register(fd, select.POLLIN)
        while not self._closing:
            ended = [fd for fd, _ in poll.poll(_TICK_SECONDS * 1000) if fd in ranks]
            if self._note is None and not self._leaving:
                self._blame_the_dead()  # of the last round: by now their own last word has come
            self._host_links.beat()
            self._read_messages()
            for fd in ended:
                poll.unregister(fd)
                self._dead.add(ranks[fd])
                if not self._leaving:
                    self._blame_the_dead()
            self._dead |= self._host_links.lost
            self._look_for_silent_ranks()
            self._look_for_stopped_ranks()
            self._look_at_own_wait()
            self._end_after_grace()
        if self._note is not None:
            self._look_for_stopped_ranks()  # the last look may have come just before the note

    def _read_messages(self) -> None:
        messages = itertools.chain((message for _, message in self._mailbox.receive()), self._host_links.receive())
        for message in messages:
            if "reason" in message:
                self._take(FailureNote(**message))
            else:
                rank = message.pop("rank")
                self._others[rank] = Waiting(**message)

    def _blame_the_dead(self) -> bool:
        if not self._dead:
            return False
        rank = self._ranks[min(self._dead)]
        reason = "the process is gone: it was killed, or exited on its own"
        self._give_up(rank, reason)
        return True

    def _wait_for_quiet(self) -> bool:
        """The transport has lost somebody. Who on another host that is shows within seconds, if it does."""
        deadline = time.monotonic() + self._host_links.quiet_seconds + 2 * _TICK_SECONDS
        while self._host_links.connected and time.monotonic() < deadline:
            if self._failed.wait(_TICK_SECONDS) or self._blame_the_quiet():
                return True
        return False

    def _blame_the_quiet(self, seconds: float | None = None) -> bool:
        quiet = self._host_links.quiet(seconds)
        if not quiet:
            return False
        rank, since = self._ranks[quiet[0]], self._host_links.quiet_seconds if seconds is None else seconds
        host, here = rank.host.name, self._me.host.name
        reason = f"no sign of life from it for more than {since:g} s"
        if rank.host != self._me.host:
            reason = f"no sign of life from {host} for more than {since:g} s: the process or its host is down, or the "
            reason += f"link between {host} and {here} is cut"
        self._give_up(rank, reason)
        return True

    def _look_for_silent_ranks(self) -> None:
        if self._note is None and not self._leaving:
            self._blame_the_quiet(self._timeout)

    def _look_for_stopped_ranks(self) -> None:
        now = time.monotonic()
        for rank, pidfd in self._pidfds.items():
            if not is_stopped(self._neighbours[rank].pid):
                self._stopped_since.pop(rank, None)
                continue
            since = self._stopped_since.setdefault(rank, now)
            if self._note is not None:
                # It cannot hear that the run is over, and must not wake up into it later.
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            elif now - since > self._timeout and not self._leaving:
                self._give_up(self._neighbours[rank], f"the process is stopped for more than {self._timeout:g} s")
            elif now - since > self._warn_after:
                self._warn(f"{self._neighbours[rank]} is stopped")

    def _look_at_own_wait(self) -> None:
        waiting = self._waiting
        if self._announced is not None and (waiting is None or waiting.sequence != self._announced):
            self._tell({"rank": self._me.rank, "sequence": self._sequence})
            self._announced = None
        if waiting is None or self._note is not None:
            return
        age = time.monotonic() - waiting.since
        if age > min(1.0, self._timeout / 4) and self._announced is None:
            self._announced = waiting.sequence
            where = {"sequence": waiting.sequence, "label": waiting.label, "on": waiting.on}
            self._tell({"rank": self._me.rank, **where})
        if age > self._timeout and not self._blame_the_quiet():
            rank = self._late(waiting)
            self._give_up(rank, f"did not reach {waiting.label} within {self._timeout:g} s{self._elsewhere(rank)}")
        elif age > self._warn_after:
            rank = self._late(waiting)
            self._warn(f"waiting for {rank} to reach {waiting.label}{self._elsewhere(rank)}")

    def _late(self, waiting: Waiting) -> Rank:
        heard = {rank.rank for rank in self._ranks} if self._host_links.connected else set(self._neighbours)
        return self._ranks[late(self._me.rank, waiting, self._others, sorted(heard - {self._me.rank}))]

    def _elsewhere(self, rank: Rank) -> str:
        theirs = self._others.get(rank.rank)
        return f" (it waits for {theirs.label})" if theirs and theirs.label else ""

    def _give_up(self, rank: Rank, reason: str) -> None:
        seen = f"as seen by rank {self._me.rank}"
        where = self._where()
        self._publish(FailureNote(rank.rank, rank.pid, rank.host.name, f"{seen} in {where}" if where else seen, reason))

    def _warn(self, what: str) -> None:
        now = time.monotonic()
        if now - self._warned_at >= self._warn_after:
            self._warned_at = now
            _log.warning("rank %d: %s", self._me.rank, what)

    def _publish(self, note: FailureNote) -> None:
        if self._note is None:
            self._tell(asdict(note))
        self._take(note)

    def _tell(self, message: dict[str, Any]) -> None:
        # Other hosts first: a neighbour that ends because of this must not look to them like the first.
        self._host_links.send(message)
        self._mailbox.send(message)

    def _take(self, note: FailureNote) -> None:
        if self._note is not None:
            return
        self._note = note
        self._known_since = time.monotonic()
        error = self._error(note)
        if note.rank != self._me.rank:
            _log.error("rank %d: %s", self._me.rank, error)
        self._failed.set()
        if (interrupt := self._interrupt) is not None:
            interrupt.set()
        for callback in self._callbacks:
            callback(error)

    def _error(self, note: FailureNote) -> RankFailure:
        waiting = self._waiting
        failure = RankFailure(note, waiting.label if waiting else "")
        failure.__cause__ = self._own_error
        return failure

    def _end_after_grace(self) -> None:
        if self._note is None or self._leaving or time.monotonic() - self._known_since < self._grace:
            return
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        stack = "".join(traceback.format_stack(frame)[-3:]) if frame else ""
        # Nothing wakes a thread inside a foreign collective or a system call, so the process ends here.
        sys.stderr.write(
            f"rank {self._me.rank}: {self._note}; this rank did not return within {self._grace:g} s:\n{stack}"
        )
        sys.stderr.flush()
        os._exit(1)


def _bound_exit() -> None:
    """Do not wait at exit for the backend's threads.

    They may sit in operations with a host that is cut off: destroying the process group would last until these time
    out, without giving any Python thread a chance.
    """
    faulthandler.dump_traceback_later(_EXIT_SECONDS, exit=True, file=open(os.devnull, "w"))  # noqa: SIM115


def is_stopped(pid: int) -> bool:
    """Whether a signal (not a debugger) has stopped the process; see proc_pid_stat(5)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False
