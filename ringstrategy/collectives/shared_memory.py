"""All-reduce between ranks of one host, over shared memory.

Each rank owns one piece of anonymous memory in which its buckets live, and maps those of all others. A ring all-reduce
(Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009) moves every shard
round the ring twice: once to be summed, once to be handed out. In shared memory every rank is every other's neighbour,
so a rank takes all the steps of its own shard in one go:

                  memory of rank 0      memory of rank 1      memory of rank 2
                 ┌──────┬──────┬──────┐┌──────┬──────┬──────┐┌──────┬──────┬──────┐
    shards       │  A0  │  B0  │  C0  ││  A1  │  B1  │  C1  ││  A2  │  B2  │  C2  │
                 └──────┴──────┴──────┘└──────┴──────┴──────┘└──────┴──────┴──────┘
    rank 0         A0 + A1 + A2 ──────────▶  A  ──────────────▶  A
    rank 1           B  ◀──────────────── B0 + B1 + B2 ────────────▶  B
    rank 2                  C  ◀──────────────── C  ◀────────────── C0 + C1 + C2

It moves the same bytes as a ring, 2(N - 1)/N of the buffer per rank, and needs two hand-overs where a ring needs
2(N - 1): "my gradients are in place" before, "I have taken and given everything" after. Each sum is made once, in one
order, by one rank: all ranks end with the same bits. A piece is summed and written through while it is in cache.

Nothing is serialised and nothing passes through the kernel but those tokens, which also order the memory accesses on
every architecture. A peer that dies shows as end-of-file at once.

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
from ringstrategy.collectives.chunks import segments
from ringstrategy.collectives.links import Link, close_in_forked_child, connect_all
from ringstrategy.process_group import RankGroup

__all__ = ["SharedMemoryRing"]

# A piece of this size is still in the core's own cache when it is written through, and costs more than the call.
_SEGMENT_BYTES = 256 * 1024
_BEGIN = struct.Struct("=QQQ")  # how many all-reduces came before, offset and length in bytes
_DONE = b"d"


class SharedMemoryWork:
    """An all-reduce that was started.

    Args:
        buffer: what to sum.
        take_over: returns when this all-reduce is done; runs what is pending in the calling thread, unless the worker
            is at it.

    Attributes:
        finished: whether it is over.
    """

    def __init__(self, buffer: Tensor, take_over: Callable[[SharedMemoryWork], None]) -> None:
        self.buffer = buffer
        self._take_over = take_over
        self.finished = False
        self._error: BaseException | None = None

    def wait(self) -> None:
        """Block until the buffer holds the sum and may be written again."""
        if not self.finished:
            self._take_over(self)
        if self._error is not None:
            raise self._error

    def finish(self, error: BaseException | None = None) -> None:
        """Say that it is over, with ``error`` if there is one."""
        self._error = error
        self.finished = True


@dataclass(frozen=True, slots=True)
class _Plan:
    """What this rank does for one buffer.

    Attributes:
        offset: first byte of the buffer in each rank's memory.
        nbytes: its length.
        pieces: of this rank's shard: its own memory, and the same place in the others'.
        bytes_sent: what it reads from the others and writes to them.
    """

    offset: int
    nbytes: int
    pieces: tuple[tuple[Tensor, tuple[Tensor, ...]], ...]
    bytes_sent: int


class SharedMemoryRing:
    """All-reduce between the ranks of one host; see the module for how it works.

    Args:
        group: ranks of one host. Its timeout bounds the silence of a peer.
        segment_bytes: most bytes that are summed in one go.

    Raises:
        OSError: sockets or memory cannot be had here.
    """

    name = "shared_memory"

    def __init__(self, group: RankGroup, segment_bytes: int = _SEGMENT_BYTES) -> None:
        self.rank = group.rank
        self._me = group.me
        self.world_size = group.world_size
        self.bytes_sent = 0
        self.busy_seconds = 0.0
        self._segment_bytes = segment_bytes
        self._own: Tensor | None = None
        self._others: list[Tensor] = []
        self._plans: dict[tuple[int, int, torch.dtype], _Plan] = {}
        self._count = 0
        self._aborted: BaseException | None = None
        self._pending: deque[SharedMemoryWork] = deque()
        self._turn = threading.Lock()  # whoever holds it takes from the left end of `_pending`
        self._wake: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._links = connect_all(group, self.name)
        close_links = weakref.WeakMethod(self._close_links)
        close_in_forked_child(lambda: (close := close_links()) and close())
        self._worker = self._start_worker()

    # -- the contract ------------------------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> Tensor:
        """Make the memory in which buffers live, and exchange it with the other ranks. Collective.

        Args:
            nbytes: size in bytes, the same on all ranks.

        Returns:
            A zeroed ``uint8`` tensor of ``nbytes`` elements in shared memory.

        Raises:
            OSError: the memory is not there, or another rank allocated another size.
            LinkLost: a rank left.
        """
        self._raise_if_aborted()
        size = max(nbytes, 1)
        fd = memory.create(size)
        try:
            own = memory.map_whole(fd, size)
            for link in self._links:
                link.send_descriptor(fd, size)
        finally:
            os.close(fd)
        self._others = [self._take_memory(link, size) for link in self._links]
        self._own = own
        self._plans.clear()
        return own[:nbytes]

    def _take_memory(self, link: Link, size: int) -> Tensor:
        fd, theirs = link.take_descriptor()
        try:
            if theirs != size:
                raise OSError(f"{link.peer} allocated {theirs} bytes for its buckets, this rank {size}")
            return memory.map_whole(fd, size)
        finally:
            os.close(fd)

    def all_reduce(self, buffer: Tensor, background: bool = True) -> SharedMemoryWork:
        """Start summing ``buffer``, a view into the memory of :meth:`allocate`; see the contract."""
        self._raise_if_aborted()
        work = SharedMemoryWork(buffer, self._take_over)
        self._pending.append(work)
        if background:
            self._wake.put(True)
        return work

    def abort(self, error: BaseException) -> None:
        """Make pending and later calls raise ``error``. Safe from any thread."""
        if self._aborted is None:
            self._aborted = error
        for link in self._links:
            link.hang_up()

    def close(self) -> None:
        """Stop the worker, close the sockets, and let go of the memory. Views of it stay readable."""
        if self._worker.is_alive():
            self._wake.put(False)
            if self._aborted is not None:
                self.abort(self._aborted)
            self._worker.join()
        self._close_links()
        self._plans.clear()
        self._own = None
        self._others = []

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
        with self._turn:
            if not work.finished:
                self._run_pending(work)

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
        begin = _BEGIN.pack(count, plan.offset, plan.nbytes)
        for link in self._links:
            link.send(begin)
        for link in self._links:
            if (theirs := link.take(_BEGIN.size)) != begin:
                number, _, nbytes = _BEGIN.unpack(theirs)
                raise RuntimeError(
                    f"The ranks went different ways: {self._me} is in all-reduce {count} of {plan.nbytes} bytes, "
                    f"{link.peer} in all-reduce {number} of {nbytes} bytes."
                )
        for own, others in plan.pieces:
            for other in others:
                own.add_(other)
            for other in others:
                other.copy_(own)
        for link in self._links:
            link.send(_DONE)
        for link in self._links:
            link.take(len(_DONE))
        self.bytes_sent += plan.bytes_sent
        self.busy_seconds += time.perf_counter() - begun

    def _plan(self, buffer: Tensor) -> _Plan:
        assert self._own is not None
        offset = buffer.data_ptr() - self._own.data_ptr() if buffer.numel() else 0
        key = (offset, buffer.numel(), buffer.dtype)
        if key in self._plans:
            return self._plans[key]
        end = offset + buffer.nbytes
        if not 0 <= offset <= end <= self._own.numel() or not buffer.is_contiguous():
            raise ValueError("An all-reduced buffer must be a contiguous view into the memory of the last allocate().")
        # Tensors of the worker's own: a version counter shared with gradients would make autograd see writes.
        own = _reinterpret(self._own.detach()[offset:end], buffer.dtype)
        others = [_reinterpret(other[offset:end], buffer.dtype) for other in self._others]
        shard = segments(self.rank, self.world_size, own.numel(), self._segment_bytes // own.element_size())
        pieces = tuple((own[start:stop], tuple(other[start:stop] for other in others)) for start, stop in shard)
        sent = 2 * sum(other.nbytes for _, parts in pieces for other in parts)
        return self._plans.setdefault(key, _Plan(offset, buffer.nbytes, pieces, sent))

    def _raise_if_aborted(self) -> None:
        if self._aborted is not None:
            raise self._aborted

    def _close_links(self) -> None:
        for link in self._links:
            link.close()


def _reinterpret(raw: Tensor, dtype: torch.dtype) -> Tensor:
    """See bytes as ``dtype``; complex numbers as pairs, since sums of both are the same."""
    if dtype.is_complex:
        dtype = dtype.to_real()
    return raw.view(dtype)
