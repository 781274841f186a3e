"""The launchers' other half: whoever starts processes watches them, and waits for them at the end."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch.distributed as dist

from ringstrategy.failure import is_stopped

__all__ = ["Children", "StoppedProcesses", "ending_stopped", "introduced_to_children", "tied_to_parent"]

_TICK_SECONDS = 0.2
_EXIT_SECONDS = 60.0  # an interpreter that is done takes seconds to end, more where cores are scarce
_PR_SET_PDEATHSIG = 1  # prctl(2)
_LAUNCHER = "RINGSTRATEGY_LAUNCHER_PID"


class Children:
    """The ranks that rank 0 has started on its host.

    While a trainer function runs, a child that ends with an error, or before the ranks have met, brings the others
    down, should they not end by themselves. When this process exits it waits for its children, and its exit code is not
    0 if one of theirs is not.

    Args:
        processes: the children, local ranks 1, 2, ...
        timeout: seconds that children may go on after this process is done.
        grace: seconds that everybody has to end after a failure.
    """

    def __init__(self, processes: Sequence[subprocess.Popen[bytes]], timeout: float, grace: float = 10.0) -> None:
        self._processes = processes
        self._timeout = timeout
        self._grace = grace
        self._stopped = StoppedProcesses(timeout)
        self._active = threading.Event()
        self._have_met = False
        self._error: BaseException | None = None
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="ringstrategy-children", daemon=True)
        self._thread.start()
        atexit.register(self._wait_at_exit)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Around the function that all ranks run together."""
        self._active.set()
        try:
            yield
        except BaseException as error:
            self._error = error
            if not self._have_met:
                self._kill()  # they wait to meet this rank, and nothing else tells them that it will not come
            raise
        finally:
            self._active.clear()

    def ranks_have_met(self) -> None:
        """From here on the ranks watch each other, too."""
        self._have_met = True

    def _running(self) -> list[int]:
        return [process.pid for process in self._processes if process.poll() is None]

    def _ended(self, *, sound: bool) -> list[str]:
        """Children that have ended, with those that did so with exit code 0 or without."""
        return [
            f"rank {rank} (pid {process.pid}) ended with exit code {process.returncode}"
            for rank, process in enumerate(self._processes, start=1)
            if process.poll() is not None and (sound or process.returncode != 0)
        ]

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()  # does nothing to one that has ended
        for process in self._processes:
            process.wait()

    def _watch(self) -> None:
        since = None
        while not self._done.wait(_TICK_SECONDS):
            self._stopped.end(self._running())
            failures = self._ended(sound=not self._have_met) if self._active.is_set() else []
            if not failures:
                since = None
                continue
            since = since or time.monotonic()
            # Ranks that have met hear of the failure and end by themselves. Those that have not wait to meet.
            if not self._have_met or time.monotonic() - since > self._grace:
                # The main thread waits for somebody who will not come, where no error reaches it.
                self._kill()
                sys.stderr.write(f"rank 0: {'; '.join(failures)}; this run cannot go on.\n")
                sys.stderr.flush()
                os._exit(1)

    def _wait_at_exit(self) -> None:
        uncaught = getattr(sys, "last_value", None) is not None
        self._done.set()
        self._thread.join()
        if dist.is_initialized():
            # A child that still waits for this rank learns that it will not come.
            dist.destroy_process_group()
        patience = self._grace if uncaught or self._error is not None else max(self._timeout, _EXIT_SECONDS)
        deadline = time.monotonic() + patience
        while (running := self._running()) and time.monotonic() < deadline:
            self._stopped.end(running)
            time.sleep(_TICK_SECONDS / 10)
        self._kill()
        failures = self._ended(sound=False)
        if failures and not uncaught and not isinstance(self._error, SystemExit):
            # Otherwise the exit code tells of a failure already, unless the program has caught the error.
            sys.stderr.write(f"rank 0 is done, but {'; '.join(failures)}.\n")
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)


class StoppedProcesses:
    """Ends processes that a signal has stopped, for they hear of no failure, and are waited for without end.

    Args:
        timeout: seconds that a process may be stopped.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._since: dict[int, float] = {}

    def end(self, pids: Iterable[int]) -> None:
        """Look at processes, to be called again and again, and kill those that have been stopped for too long.

        Args:
            pids: process ids of children that were not waited for yet, or of the parent.
        """
        now = time.monotonic()
        for pid in pids:
            if not is_stopped(pid):
                self._since.pop(pid, None)
            elif now - self._since.setdefault(pid, now) > self._timeout:
                sys.stderr.write(f"process {pid} is stopped for more than {self._timeout:g} s; it is ended.\n")
                sys.stderr.flush()
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def ending_stopped(pids: Callable[[], Iterable[int]], timeout: float) -> Iterator[None]:
    """Have a thread call :meth:`StoppedProcesses.end` as long as the block runs.

    Args:
        pids: tells at any time which processes to look at.
        timeout: seconds that a process may be stopped.
    """
    done, stopped = threading.Event(), StoppedProcesses(timeout)

    def watch() -> None:
        while not done.wait(_TICK_SECONDS):
            stopped.end(pids())

    thread = threading.Thread(target=watch, name="ringstrategy-stopped", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


@contextlib.contextmanager
def introduced_to_children() -> Iterator[None]:
    """Processes that are started meanwhile know who started them."""
    os.environ[_LAUNCHER] = str(os.getpid())
    try:
        yield
    finally:
        del os.environ[_LAUNCHER]


@contextlib.contextmanager
def tied_to_parent(timeout: float) -> Iterator[None]:
    """Meanwhile the kernel kills this process when its parent ends, and this process a parent that is stopped.

    Args:
        timeout: seconds that the parent may be stopped.

    Raises:
        RuntimeError: the process that started this one has ended already.
    """
    _set_parent_death_signal(signal.SIGKILL)
    if (launcher := os.environ.get(_LAUNCHER, str(os.getppid()))) != str(os.getppid()):
        raise RuntimeError(f"rank 0 (pid {launcher}), which started this process, ended before the ranks had met.")
    try:
        with ending_stopped(lambda: [os.getppid()], timeout):
            yield
    finally:
        _set_parent_death_signal(0)


def _set_parent_death_signal(signum: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signum), 0, 0, 0)
