"""Which processes are alive, read from ``/proc``."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Family", "LiveProcess", "children_of", "live_processes"]


@dataclass(frozen=True)
class LiveProcess:
    """One line of the process table."""

    pid: int
    parent: int
    session: int
    command: str


def live_processes() -> Iterator[LiveProcess]:
    """Every process that still runs; zombies are dead and do not count."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            # "pid (name) state parent group session ...": the name may hold spaces and parentheses.
            state, parent, _, session, *_ = (entry / "stat").read_text().rpartition(")")[2].split()
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended while we looked
        if state not in "ZX":
            yield LiveProcess(int(entry.name), int(parent), int(session), command)


def children_of(parent: int) -> list[LiveProcess]:
    """The live direct children of a process."""
    return [process for process in live_processes() if process.parent == parent]


@dataclass(frozen=True)
class Family:
    """A process that the caller started in a session of its own, with all its descendants.

    Attributes:
        leader: process id of the first, and so the id of its session.
        mark: ``NAME=value`` in its environment, by which a descendant is known that opened another session.
    """

    leader: int
    mark: str | None = None

    def alive(self) -> list[LiveProcess]:
        """Its members that live, whether or not the first still does."""
        return [process for process in live_processes() if process.session == self.leader or self._is_marked(process)]

    def wait_until_gone(self, seconds: float) -> list[LiveProcess]:
        """Wait up to ``seconds`` for all to end; returns those that did not."""
        deadline = time.monotonic() + seconds
        while (left := self.alive()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return left

    def send(self, signum: signal.Signals) -> None:
        """Send a signal to each."""
        for process in self.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signum)

    def _is_marked(self, process: LiveProcess) -> bool:
        if self.mark is None:
            return False
        try:
            return self.mark.encode() in Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
        except (FileNotFoundError, PermissionError, ProcessLookupError):
            return False
