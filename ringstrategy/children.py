"""The script launcher's other half: whoever starts processes watches them, and waits for them at the end."""

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
from collections.abc import Iterator, Sequence

import torch.distributed as dist

__all__ = ["Children", "end_with_parent"]

_TICK_SECONDS = 0.2
_PR_SET_PDEATHSIG = 1  # prctl(2)


class Children:
    """The ranks that rank 0 has started on its host.

    While a trainer function runs, a child that ends with an error brings the others down, should they not end by
    themselves. When this process exits it waits for its children, and its exit code is not 0 if one of theirs is not.

    Args:
        processes: the children, local ranks 1, 2, ...
        timeout: seconds that children may go on after this process is done.
        grace: seconds that everybody has to end after a failure.
    """

    def __init__(self, processes: Sequence[subprocess.Popen[bytes]], timeout: float, grace: float = 10.0) -> None:
        self._processes = processes
        self._timeout = timeout
        self._grace = grace
        self._active = threading.Event()
        self._failed = False
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
        except BaseException:
            self._failed = True
            raise
        finally:
            self._active.clear()

    def _failures(self) -> list[str]:
        return [
            f"rank {rank} (pid {process.pid}) ended with exit code {process.returncode}"
            for rank, process in enumerate(self._processes, start=1)
            if process.poll() not in (None, 0)
        ]

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()  # does nothing to one that has ended
        for process in self._processes:
            process.wait()

    def _watch(self) -> None:
        since = None
        while not self._done.wait(_TICK_SECONDS):
            failures = self._failures()
            if all(process.poll() == 0 for process in self._processes):
                return
            if not failures or not self._active.is_set():
                since = None
                continue
            since = since or time.monotonic()
            if time.monotonic() - since > self._grace:
                # The main thread waits for somebody who will not come, where no error reaches it.
                self._kill()
                sys.stderr.write(f"rank 0: {'; '.join(failures)}; this run cannot go on.\n")
                sys.stderr.flush()
                os._exit(1)

    def _wait_at_exit(self) -> None:
        failing = self._failed or getattr(sys, "last_value", None) is not None
        self._done.set()
        self._thread.join()
        if dist.is_initialized():
            # A child that still waits for this rank learns that it will not come.
            dist.destroy_process_group()
        deadline = time.monotonic() + (self._grace if failing else self._timeout)
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        self._kill()
        failures = self._failures()
        if failures and not failing:
            sys.stderr.write(f"rank 0 is done, but {'; '.join(failures)}.\n")
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)


def end_with_parent(enabled: bool) -> None:
    """Have the kernel kill this process when its parent ends: for as long as nothing else would notice."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL) if enabled else 0, 0, 0, 0)
