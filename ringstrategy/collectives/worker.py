"""A thread that takes all-reduces in the order in which they were started, while backward goes on.

.. code-block:: text

    backward     start(A) ── start(B) ─────────────── A.wait() ─────────── B.wait()
                     │           │                       ▲                    ▲
    worker           └▶ sums A ──┴──────────▶ sums B ────┴────────────────────┘

A thread that waits for an all-reduce which the worker has not begun may sum it itself: that saves waking two threads.
It may do so only where a failure can interrupt the sum, else it would sit in it for as long as the transport waits.
"""

from __future__ import annotations

import queue
import signal
import threading
import time
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from ringstrategy.collectives.base import Watch

__all__ = ["StartedWork", "Worker"]


class StartedWork:
    """An all-reduce that was started.

    Args:
        buffer: what to sum.
        wait_for: returns when this all-reduce is finished.

    Attributes:
        finished: whether it is over.
    """

    def __init__(self, buffer: Tensor, wait_for: Callable[[StartedWork], None]) -> None:
        self.buffer = buffer
        self._wait_for = wait_for
        self.finished = False
        self._error: BaseException | None = None

    def wait(self) -> None:
        """Block until the buffer holds the sum and may be written again."""
        if not self.finished:
            self._wait_for(self)
        if self._error is not None:
            raise self._error

    def finish(self, error: BaseException | None = None) -> None:
        """Say that it is over, with ``error`` if there is one."""
        self._error = error
        self.finished = True


class Worker:
    """Runs all-reduces one after the other, in a thread of its own.

    Args:
        name: of the thread.
        reduce: sums a buffer over the ranks, in place.
        interrupt: makes a ``reduce`` that is under way raise, from any thread. None if nothing can: then only the
            worker calls ``reduce``, and a failure wakes those who wait for it.

    Attributes:
        watch: is told of each; None while nobody asks.
    """

    def __init__(
        self, name: str, reduce: Callable[[Tensor], None], interrupt: Callable[[], None] | None = None
    ) -> None:
        self._reduce = reduce
        self._interrupt = interrupt
        self._aborted: BaseException | None = None
        self._pending: deque[StartedWork] = deque()
        self._turn = threading.Lock()  # whoever holds it takes from the left end of `_pending`
        self.watch: Watch | None = None
        self._news = threading.Condition()  # something finished, or all is over
        self._wake: queue.SimpleQueue[bool] = queue.SimpleQueue()
        started = threading.Event()
        # A daemon: one that sits in a sum which nothing interrupts must not keep the process.
        self._thread = threading.Thread(target=self._run, args=(started,), name=f"ringstrategy-{name}", daemon=True)
        threads = torch.get_num_threads()
        self._thread.start()
        started.wait()
        # torch hands the worker's setting to threads made later (autograd's); say again what holds for those.
        torch.set_num_threads(threads)

    def start(self, buffer: Tensor, background: bool = True) -> StartedWork:
        """Queue an all-reduce of ``buffer``.

        Args:
            buffer: as in the contract of collectives.
            background: False leaves it to the thread that waits, where it may sum.
        """
        self.raise_if_aborted()
        work = StartedWork(buffer, self._wait_for_worker if self._interrupt is None else self._take_over)
        self._pending.append(work)
        if background or self._interrupt is None:
            self._wake.put(True)
        return work

    def raise_if_aborted(self) -> None:
        """Raise the error of :meth:`abort`, if there is one."""
        if self._aborted is not None:
            raise self._aborted

    def abort(self, error: BaseException) -> None:
        """Make pending and later work raise ``error``, or what came first. Safe from any thread."""
        if self._aborted is None:
            self._aborted = error
        if self._interrupt is not None:
            self._interrupt()
        else:
            with self._news:
                self._news.notify_all()

    def close(self) -> None:
        """Finish what is queued, and end the thread. Idempotent.

        After an abort, a sum that nothing can interrupt stays behind and ends with its transport.
        """
        if not self._thread.is_alive():
            return
        self._wake.put(False)
        if self._aborted is not None:
            self.abort(self._aborted)
            if self._interrupt is None:
                return
        self._thread.join()

    def _run(self, started: threading.Event) -> None:
        # Signals belong to the main thread. One thread suffices: the work is bound by memory, and cores are taken.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        torch.set_num_threads(1)
        torch.set_grad_enabled(False)
        started.set()
        while self._wake.get():
            with self._turn:
                self._run_pending(None)

    def _run_one(self, buffer: Tensor) -> None:
        if (watch := self.watch) is None:
            self._reduce(buffer)
            return
        begun = time.perf_counter()
        self._reduce(buffer)
        watch.all_reduced(buffer.nbytes, begun, time.perf_counter())

    def _take_over(self, work: StartedWork) -> None:
        with self._turn:
            if not work.finished:
                self._run_pending(work)

    def _wait_for_worker(self, work: StartedWork) -> None:
        with self._news:
            self._news.wait_for(lambda: work.finished or self._aborted is not None)
        if not work.finished:
            self.raise_if_aborted()

    def _run_pending(self, last: StartedWork | None) -> None:
        while self._pending:
            work = self._pending.popleft()
            try:
                self.raise_if_aborted()
                self._run_one(work.buffer)
            except BaseException as error:  # goes to whoever waits, and to all who wait later
                self.abort(error)
                work.finish(self._aborted)
            else:
                work.finish()
            if self._interrupt is None:
                with self._news:
                    self._news.notify_all()
            if work is last:
                return
