"""The all-reduce that sends 16 bits per number, as a collective: in the background on CPU, on a stream on CUDA."""

from __future__ import annotations

import threading
import time
from collections import deque

import torch
import torch.distributed as dist
from torch import Tensor

from ringstrategy.collectives.base import Watch, Work
from ringstrategy.collectives.direct_exchange import DirectExchange
from ringstrategy.collectives.half_precision import Compression
from ringstrategy.collectives.worker import Worker
from ringstrategy.process_group import RankGroup

__all__ = ["CompressedCollective"]

# Long enough that starting an operation costs little, short enough that a bucket has several.
_SEGMENT_BYTES = 2 * 1024 * 1024


class _StreamWork:
    """An all-reduce that a stream of a GPU carries out."""

    def __init__(self, done: torch.cuda.Event) -> None:
        self._done = done

    def wait(self) -> None:
        self._done.wait()  # the current stream does, not the host


class Interrupted(RuntimeError):
    """An operation was given up because of a failure elsewhere."""


class InterruptibleJoin:
    """Waits for operations of a process group, until somebody has it stop."""

    def __init__(self) -> None:
        self._stopped = False
        self._waiting: threading.Event | None = None
        self.abandoned: list[dist.Work] = []  # with their memory, in the backend's threads

    def __call__(self, work: dist.Work) -> None:
        """Wait for one operation.

        Raises:
            Interrupted: :meth:`stop` was called, in any thread, before it was over.
        """
        self._waiting = done = threading.Event()
        work.get_future().add_done_callback(lambda _: done.set())
        if not self._stopped:
            done.wait()
        self._waiting = None
        if self._stopped and not work.is_completed():
            self.abandoned.append(work)
            raise Interrupted("an operation of the process group was given up")
        work.wait()

    def stop(self) -> None:
        """Have pending and later waits raise. Safe from any thread."""
        self._stopped = True
        if (waiting := self._waiting) is not None:
            waiting.set()


class CompressedCollective:
    """All-reduce with numbers of 16 bits on the wire; see :mod:`ringstrategy.collectives.direct_exchange`.

    On CPU a worker thread carries the all-reduces out in the order in which they were started, over a process group of
    its own: its messages must not meet those of the thread that trains. On CUDA everything is put on a stream of its
    own, and the host waits for nothing.

    Args:
        group: the ranks.
        compression: the type in which float32 travels.
        segment_bytes: most bytes of a buffer that are rounded in one go, on CPU.

    Raises:
        RuntimeError: the group's backend cannot do this on the ranks' device.
    """

    name = "compressed"

    def __init__(self, group: RankGroup, compression: Compression, segment_bytes: int = _SEGMENT_BYTES) -> None:
        self.rank = group.rank
        self.world_size = group.world_size
        self.busy_seconds = 0.0
        self._device = group.device
        self._aborted: BaseException | None = None
        self._exact: deque[int] = deque()  # of what is queued in the worker
        self._join = InterruptibleJoin()
        self._worker: Worker | None = None
        self._stream: torch.cuda.Stream | None = None
        self._own_group: dist.ProcessGroup | None = None
        if self._device.type == "cpu":
            members = [rank.rank for rank in group.ranks]
            self._own_group = dist.new_group(  # type: ignore[assignment]  # this rank is a member
                members, timeout=group.timeout, backend="gloo", use_local_synchronization=True
            )
            self._exchange = DirectExchange(self._own_group, self._device, compression, self._join, segment_bytes)
            self._worker = Worker(self.name, self._reduce, self._join.stop)
        elif (backend := dist.get_backend(group.process_group)) == "nccl":
            self._exchange = DirectExchange(group.process_group, self._device, compression)
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        else:
            raise RuntimeError(
                f"compression={compression!r} works on CPU and over NCCL, not on {self._device.type} over {backend}. "
                "Use process_group_backend='nccl' on CUDA, or compression=None."
            )

    @property
    def bytes_sent(self) -> int:
        """Bytes of messages handed to other ranks so far."""
        return self._exchange.bytes_sent

    @bytes_sent.setter
    def bytes_sent(self, count: int) -> None:
        self._exchange.bytes_sent = count

    def allocate(self, nbytes: int) -> Tensor:
        """Zeroed ``uint8`` memory of ``nbytes`` elements on the group's device."""
        return torch.zeros(nbytes, dtype=torch.uint8, device=self._device)

    def all_reduce(self, buffer: Tensor, background: bool = True, exact: int = 0) -> Work:
        """Start summing ``buffer`` over all ranks; see the contract.

        Raises:
            TypeError: it holds whole numbers, which 16 bits of floating point would spoil.
        """
        if self._aborted is not None:
            raise self._aborted
        self._exchange.check(buffer.dtype)
        if self._worker is not None:
            self._exact.append(exact)
            return self._worker.start(buffer, background)
        assert self._stream is not None
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            self._exchange.all_reduce(buffer, exact)
            return _StreamWork(self._stream.record_event())

    def watch(self, watch: Watch | None) -> None:
        """Tell ``watch`` of all-reduces; see the contract. Of those on a stream the host knows nothing."""
        if self._worker is not None:
            self._worker.watch = watch

    def abort(self, error: BaseException) -> None:
        """Make pending and later calls raise ``error``. On CUDA a pending one ends with NCCL's own error."""
        self._aborted = self._aborted or error
        if self._worker is not None:
            self._worker.abort(error)

    def close(self) -> None:
        """Stop the worker and leave its process group. Idempotent."""
        if self._worker is not None:
            self._worker.close()
        # What was given up still runs in the group's threads, and ends with the process.
        if self._own_group is not None and not self._join.abandoned and dist.is_initialized():
            dist.destroy_process_group(self._own_group)
        self._own_group = None

    def _reduce(self, buffer: Tensor) -> None:
        begun = time.perf_counter()
        self._exchange.all_reduce(buffer, self._exact.popleft())
        self.busy_seconds += time.perf_counter() - begun
