"""All-reduce by messages between two ranks: what the ring, the tree and the naive algorithm have in common.

An algorithm is a function that sums a buffer with a few sends and receives. Here is what it sends and receives with,
and what makes a collective of it: a worker that runs it in the background on CPU, a stream that does on CUDA.

Messages are the process group's ``isend`` and ``irecv``, under a tag of the algorithm's own: gloo keeps them apart from
its collectives and from messages under other tags. (NCCL knows no tags. It pairs what ranks call in the same order,
which the contract of collectives asks for.)
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from ringstrategy.collectives.base import Watch, Work
from ringstrategy.collectives.links import naming
from ringstrategy.collectives.worker import Worker
from ringstrategy.process_group import RankGroup

__all__ = ["Algorithm", "Messages", "PointToPoint", "Receipt"]

# Large enough that a message costs more than the calls for it, small enough that adding overlaps with sending.
_SEGMENT_BYTES = 1024 * 1024
_FIRST_TAG = 0x9200  # unlike 0, which others may use in the group


class Receipt:
    """A message on its way to this rank."""

    def __init__(self, work: dist.Work | None, source: object) -> None:
        assert work is not None
        self._work = work
        self._source = source

    def wait(self) -> None:
        """Wait until it is there; on CUDA the current stream does, not the host.

        Raises:
            LinkLost: the sender left, or sent nothing within the timeout.
        """
        with naming(self._source):
            self._work.wait()


class Messages:
    """What one algorithm sends and receives. Between two ranks, messages arrive in the order in which they were sent.

    Args:
        group: the ranks.
        tag: of the algorithm.
        segment_bytes: most bytes of a message, where the algorithm cuts buffers into segments.

    Attributes:
        rank: this process's place in the group.
        world_size: number of ranks.
        sent: messages sent so far.
        bytes_sent: bytes in them.
    """

    def __init__(self, group: RankGroup, tag: int, segment_bytes: int) -> None:
        self.rank = group.rank
        self.world_size = group.world_size
        self.sent = 0
        self.bytes_sent = 0
        self._group = group.process_group
        self._ranks = group.ranks
        self._tag = tag
        self._segment_bytes = segment_bytes
        self._sending: list[tuple[dist.Work | None, Tensor, int]] = []
        self._scratch: dict[tuple[int, int, torch.dtype], list[Tensor]] = {}

    def segment(self, dtype: torch.dtype) -> int:
        """Most elements of a message."""
        return max(self._segment_bytes // dtype.itemsize, 1)

    def send(self, data: Tensor, to: int) -> None:
        """Start sending. ``data`` must stay as it is until :meth:`finish`, or until the receiver has answered to it."""
        with naming(self._ranks[to]):
            work = dist.isend(data, group=self._group, group_dst=to, tag=self._tag)
        self._sending.append((work, data, to))
        self.sent += 1
        self.bytes_sent += data.nbytes

    def receive(self, into: Tensor, source: int) -> Receipt:
        """Say where the next message from rank ``source`` goes; it must be as long as ``into``."""
        with naming(self._ranks[source]):
            work = dist.irecv(into, group=self._group, group_src=source, tag=self._tag)
        return Receipt(work, self._ranks[source])

    def scratch(self, count: int, like: Tensor) -> list[Tensor]:
        """``count`` tensors of the length and type of ``like``, for messages that are to be added.

        The same again for every call with the same arguments.
        """
        key = (count, like.numel(), like.dtype)
        if key not in self._scratch:
            self._scratch[key] = [torch.empty_like(like) for _ in range(count)]
        return self._scratch[key]

    def finish(self) -> None:
        """Wait until all that was sent has left."""
        for work, _, to in self._sending:
            Receipt(work, self._ranks[to]).wait()
        self._sending.clear()

    def free(self) -> None:
        """Let go of the scratch memory."""
        self._scratch.clear()


Algorithm = Callable[[Tensor, Messages], None]


class PointToPoint:
    """An all-reduce over the process group's ``isend`` and ``irecv``.

    Args:
        group: the ranks.
        name: of the algorithm.
        algorithm: sums a buffer of real numbers over the ranks, in place.
        tag: tells the messages of this algorithm from those of others.
        segment_bytes: most bytes of a message, where the algorithm cuts buffers into segments.
    """

    def __init__(
        self, group: RankGroup, name: str, algorithm: Algorithm, tag: int = 0, segment_bytes: int = _SEGMENT_BYTES
    ) -> None:
        self.name = name
        self.rank = group.rank
        self.world_size = group.world_size
        self.bytes_sent = 0
        self.busy_seconds = 0.0
        self._device = group.device
        self._algorithm = algorithm
        self._messages = Messages(group, _FIRST_TAG + tag, segment_bytes)
        self._queue: Worker | _Stream
        # Nothing wakes a thread inside gloo, so only the worker ever sits there.
        self._queue = Worker(name, self._reduce) if group.device.type == "cpu" else _Stream(self._reduce, group.device)

    def allocate(self, nbytes: int) -> Tensor:
        """Zeroed ``uint8`` memory of ``nbytes`` elements on the group's device."""
        self._queue.raise_if_aborted()
        self._messages.free()
        return torch.zeros(nbytes, dtype=torch.uint8, device=self._device)

    def all_reduce(self, buffer: Tensor, background: bool = True, exact: int = 0) -> Work:
        """Start summing ``buffer`` over all ranks, always in the background."""
        real = torch.view_as_real(buffer).view(-1) if buffer.is_complex() else buffer
        return self._queue.start(real.detach())

    def watch(self, watch: Watch | None) -> None:
        """Tell ``watch`` of all-reduces; see the contract. Of those on a stream the host knows nothing."""
        if isinstance(self._queue, Worker):
            self._queue.watch = watch

    def abort(self, error: BaseException) -> None:
        """Make pending and later calls raise ``error``. What the backend is at stays behind. Safe from any thread."""
        self._queue.abort(error)

    def close(self) -> None:
        """Stop the worker. The process group belongs to whoever made it."""
        self._queue.close()
        self._messages.free()

    def _reduce(self, buffer: Tensor) -> None:
        begun, before = time.perf_counter(), self._messages.bytes_sent
        self._algorithm(buffer, self._messages)
        self._messages.finish()
        self.bytes_sent += self._messages.bytes_sent - before
        if self._device.type == "cpu":  # elsewhere the host only starts it
            self.busy_seconds += time.perf_counter() - begun


class _OnStream:
    """An all-reduce that a CUDA stream works on."""

    def __init__(self, done: torch.cuda.Event) -> None:
        self._done = done

    def wait(self) -> None:
        """Let the current stream wait."""
        self._done.wait()


class _Stream:
    """A CUDA stream in place of a worker: it runs behind what fills a buffer, and beside what comes after.

    Args:
        reduce: starts what sums a buffer, on the current stream.
        device: of the buffers.
    """

    def __init__(self, reduce: Callable[[Tensor], None], device: torch.device) -> None:
        self._reduce = reduce
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._aborted: BaseException | None = None

    def start(self, buffer: Tensor) -> _OnStream:
        self.raise_if_aborted()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream), torch.no_grad():
            self._reduce(buffer)
            return _OnStream(self._stream.record_event())

    def raise_if_aborted(self) -> None:
        if self._aborted is not None:
            raise self._aborted

    def abort(self, error: BaseException) -> None:
        self._aborted = self._aborted or error

    def close(self) -> None:
        """Nothing to release."""
