"""The ring all-reduce between ranks of one host, over shared memory.

Each rank owns one piece of anonymous memory in which its buckets live, and maps that of its left neighbour:

        ┌────────┐  tokens   ┌────────┐  tokens   ┌────────┐
    ┌──▶│ rank 0 │──────────▶│ rank 1 │──────────▶│ rank 2 │───┐      socket to the right: "all-reduce 7 of 4 MiB
    │   │ memory │◀ ─ ─ ─ ─ ─│ memory │◀ ─ ─ ─ ─ ─│ memory │   │      begins", then one byte per completed step;
    │   └────────┘   reads   └────────┘   reads   └────────┘   │      back: one byte when done reading
    └──────────────────────────────────────────────────────────┘

Reduce-scatter adds the neighbour's chunk straight from its memory to one's own, all-gather copies it (`chunks.py`
has the order). Nothing is serialised and nothing passes through the kernel but the tokens, which also order the
memory accesses on every architecture. A neighbour that dies shows as end-of-file at once.

A worker thread takes the all-reduces in the order in which they were started, while backward goes on; a thread that
waits for one takes it itself if the worker has not begun, which saves waking two threads.
"""

from __future__ import annotations

import os
import queue
import signal
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ringstrategy.collectives import memory
from ringstrategy.collectives.chunks import ring_steps
from ringstrategy.collectives.links import close_in_forked_child, connect_ring
from ringstrategy.process_group import RankGroup

__all__ = ["SharedMemoryRing"]

# A step of this size keeps the pieces of two blocks in a core's own cache, and costs more than handing it over.
_CHUNK_BYTES = 256 * 1024
_ALIGNMENT = 64
_BEGIN = struct.Struct("=cQQQ")  # "b", how many all-reduces came before, offset and length in bytes
_STEP_DONE = b"s"
_READ_DONE = b"r"


class SharedMemoryWork:
    """An all-reduce that was started.

    Args:
        buffer: what to sum.
        take_over: runs the pending all-reduces up to this one in the calling thread, unless the worker is at them.
    """

    def __init__(self, buffer: Tensor, take_over: Callable[[SharedMemoryWork], None]) -> None:
        self.buffer = buffer
        self._take_over = take_over
        self._finished = threading.Event()
        self._error: BaseException | None = None

    def wait(self) -> None:
        """Block until the buffer holds the sum and may be written again."""
        if not self._finished.is_set():
            self._take_over(self)
            self._finished.wait()
        if self._error is not None:
            raise self._error

    def finish(self, error: BaseException | None = None) -> None:
        """Let the waiting thread go on, with ``error`` if there is one."""
        self._error = error
        self._finished.set()


@dataclass(frozen=True, slots=True)
class _BoundStep:
    """A step with its tensors cut out, so that the worker only adds or copies."""

    own: Tensor
    left: Tensor
    reduce: bool
    after: int
    announce: bool


@dataclass(frozen=True, slots=True)
class _Plan:
    """All steps of one buffer, and what they move."""

    offset: int
    nbytes: int
    steps: tuple[_BoundStep, ...]
    bytes_sent: int


class SharedMemoryRing:
    """All-reduce between the ranks of one host; see the module for how it works.

    Args:
        group: at least two ranks, all on one host. Its timeout bounds the silence of a neighbour.
        chunk_bytes: most bytes of one step.

    Raises:
        OSError: sockets or memory cannot be had here.
    """

    name = "shared_memory"

    def __init__(self, group: RankGroup, chunk_bytes: int = _CHUNK_BYTES) -> None:
        self.rank = group.rank
        self.world_size = group.world_size
        self.bytes_sent = 0
        self.busy_seconds = 0.0
        self._chunk_bytes = chunk_bytes
        self._own: Tensor | None = None
        self._left_memory: Tensor | None = None
        self._plans: dict[tuple[int, int, torch.dtype], _Plan] = {}
        self._count = 0
        self._aborted: BaseException | None = None
        self._pending: deque[SharedMemoryWork] = deque()
        self._turn = threading.Lock()  # whoever holds it takes from the left end of `_pending`
        self._wake: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._left, self._right = connect_ring(group, self.name)
        close_links = weakref.WeakMethod(self._close_links)
        close_in_forked_child(lambda: (close := close_links()) and close())
        self._worker = self._start_worker()

    # -- the contract ------------------------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> Tensor:
        """Make the memory in which buffers live, and exchange it with the neighbours. Collective.

        Args:
            nbytes: size in bytes, the same on all ranks.

        Returns:
            A zeroed ``uint8`` tensor of ``nbytes`` elements in shared memory.

        Raises:
            OSError: the memory is not there, or the left neighbour allocated another size.
            LinkLost: a neighbour left.
        """
        self._raise_if_aborted()
        size = max(nbytes, 1)
        fd = memory.create(size)
        try:
            self._right.send_descriptor(fd, size)
            own = memory.map_for_writing(fd, size)
        finally:
            os.close(fd)
        left_fd, left_size = self._left.take_descriptor()
        try:
            if left_size != size:
                raise OSError(f"{self._left.peer} allocated {left_size} bytes for its buckets, this rank {size}")
            self._left_memory = memory.map_for_reading(left_fd, size)
        finally:
            os.close(left_fd)
        self._own = own
        self._plans.clear()
        return own[:nbytes]

    def all_reduce(self, buffer: Tensor) -> SharedMemoryWork:
        """Start summing ``buffer``, a view into the memory of :meth:`allocate`; the worker thread does it."""
        self._raise_if_aborted()
        work = SharedMemoryWork(buffer, self._take_over)
        self._pending.append(work)
        self._wake.put(True)
        return work

    def abort(self, error: BaseException) -> None:
        """Make pending and later calls raise ``error``. Safe from any thread."""
        if self._aborted is None:
            self._aborted = error
        self._left.hang_up()
        self._right.hang_up()

    def close(self) -> None:
        """Stop the worker, close the sockets, and let go of the memory. Views of it stay readable."""
        if self._worker.is_alive():
            self._wake.put(False)
            if self._aborted is not None:
                self.abort(self._aborted)
            self._worker.join()
        self._close_links()
        self._plans.clear()
        self._own = self._left_memory = None

    # -- the worker --------------------------------------------------------------------------------------------------

    def _start_worker(self) -> threading.Thread:
        started = threading.Event()
        worker = threading.Thread(target=self._run, args=(started,), name="ringstrategy-shared-memory", daemon=True)
        threads = torch.get_num_threads()
        worker.start()
        started.wait()
        # torch hands the worker's setting to threads made later (autograd's); say again what holds for those.
        torch.set_num_threads(threads)
        return worker

    def _run(self, started: threading.Event) -> None:
        # Signals belong to the main thread. One thread suffices: the work is bound by memory, and cores are taken.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        torch.set_num_threads(1)
        torch.set_grad_enabled(False)
        started.set()
        while self._wake.get():
            with self._turn:
                self._run_pending(None)

    def _take_over(self, work: SharedMemoryWork) -> None:
        if self._turn.acquire(blocking=False):
            try:
                self._run_pending(work)
            finally:
                self._turn.release()

    def _run_pending(self, last: SharedMemoryWork | None) -> None:
        while self._pending:
            work = self._pending.popleft()
            try:
                self._raise_if_aborted()
                self._reduce(work.buffer)
            except BaseException as error:  # goes to whoever waits, and to all who wait later
                self.abort(error)
                work.finish(self._aborted)
            else:
                work.finish()
            if work is last:
                return

    def _reduce(self, buffer: Tensor) -> None:
        begun = time.perf_counter()
        plan, count = self._plan(buffer), self._count
        self._count += 1
        left, right = self._left, self._right
        right.send(_BEGIN.pack(b"b", count, plan.offset, plan.nbytes))
        _, theirs, offset, nbytes = _BEGIN.unpack(left.take(_BEGIN.size))
        if (theirs, offset, nbytes) != (count, plan.offset, plan.nbytes):
            raise RuntimeError(
                f"The ranks went different ways: rank {self.rank} is in all-reduce {count} of {plan.nbytes} bytes, "
                f"{left.peer} in all-reduce {theirs} of {nbytes} bytes."
            )
        seen = 0
        for step in plan.steps:
            if step.after > seen:
                left.take(step.after - seen)
                seen = step.after
            if step.reduce:
                step.own.add_(step.left)
            else:
                step.own.copy_(step.left)
            if step.announce:
                right.send(_STEP_DONE)
        left.send(_READ_DONE)
        right.take(len(_READ_DONE))
        self.bytes_sent += plan.bytes_sent
        self.busy_seconds += time.perf_counter() - begun

    def _plan(self, buffer: Tensor) -> _Plan:
        assert self._own is not None
        assert self._left_memory is not None
        offset = buffer.data_ptr() - self._own.data_ptr() if buffer.numel() else 0
        key = (offset, buffer.numel(), buffer.dtype)
        if key in self._plans:
            return self._plans[key]
        nbytes = buffer.nbytes
        if not 0 <= offset <= offset + nbytes <= self._own.numel() or not buffer.is_contiguous():
            raise ValueError("An all-reduced buffer must be a contiguous view into the memory of the last allocate().")
        # Tensors of the worker's own: a version counter shared with gradients would make autograd see writes.
        own = _reinterpret(self._own[offset : offset + nbytes].detach(), buffer.dtype)
        left = _reinterpret(self._left_memory[offset : offset + nbytes], buffer.dtype)
        chunk = max(self._chunk_bytes // buffer.element_size(), _ALIGNMENT)
        steps = tuple(
            _BoundStep(own[s.start : s.stop], left[s.start : s.stop], s.reduce, s.after, s.announce)
            for s in ring_steps(self.rank, self.world_size, own.numel(), chunk)
        )
        to_right = ring_steps((self.rank + 1) % self.world_size, self.world_size, own.numel(), chunk)
        sent = sum(step.stop - step.start for step in to_right) * own.element_size()
        return self._plans.setdefault(key, _Plan(offset, nbytes, steps, sent))

    def _raise_if_aborted(self) -> None:
        if self._aborted is not None:
            raise self._aborted

    def _close_links(self) -> None:
        self._left.close()
        self._right.close()


def _reinterpret(raw: Tensor, dtype: torch.dtype) -> Tensor:
    """See bytes as ``dtype``; complex numbers as pairs, since sums of both are the same."""
    if dtype.is_complex:
        dtype = dtype.to_real()
    return raw.view(dtype)
