"""The process group's own all-reduce: NCCL's on GPUs, gloo's on CPUs."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch import Tensor

from ringstrategy.collectives.base import Watch, Work
from ringstrategy.process_group import RankGroup

__all__ = ["BackendCollective"]


class _BackendWork:
    """The backend's work, without the value that its ``wait`` returns."""

    def __init__(self, work: dist.Work | None) -> None:
        assert work is not None
        self._work = work

    def wait(self) -> None:
        """Wait as the backend does: the host for gloo, the stream for NCCL."""
        self._work.wait()


class _WatchedWork(_BackendWork):
    """Work that tells how long it took, to whoever waits for it."""

    def __init__(self, work: dist.Work | None, nbytes: int, begun: float, watch: Watch) -> None:
        super().__init__(work)
        self._nbytes = nbytes
        self._begun = begun
        self._watch = watch
        self._ended: float | None = None
        self._work.get_future().add_done_callback(self._note_end)

    def wait(self) -> None:
        super().wait()
        self._watch.all_reduced(self._nbytes, self._begun, self._ended or time.perf_counter())

    def _note_end(self, _: object) -> None:
        self._ended = time.perf_counter()


class BackendCollective:
    """All-reduce by the process group.

    NCCL runs on a stream of its own, which waits for the stream that filled the buffer; `Work.wait` makes the current
    stream wait in turn. So the sum overlaps with backward and never blocks the host. gloo has threads of its own.

    Args:
        group: the ranks.
    """

    name = "backend"

    def __init__(self, group: RankGroup) -> None:
        self.rank = group.rank
        self.world_size = group.world_size
        self.bytes_sent = 0
        self.busy_seconds = 0.0
        self._device = group.device
        self._process_group = group.process_group
        self._aborted: BaseException | None = None
        self._watch: Watch | None = None

    def allocate(self, nbytes: int) -> Tensor:
        """Zeroed ``uint8`` memory of ``nbytes`` elements on the group's device."""
        return torch.zeros(nbytes, dtype=torch.uint8, device=self._device)

    def all_reduce(self, buffer: Tensor, background: bool = True, exact: int = 0) -> Work:
        """Start summing ``buffer`` over all ranks, always in the background."""
        if self._aborted is not None:
            raise self._aborted
        real = torch.view_as_real(buffer) if buffer.is_complex() else buffer
        # What a ring moves; the backend may have chosen another algorithm.
        self.bytes_sent += 2 * (self.world_size - 1) * buffer.nbytes // self.world_size
        watch = None if buffer.is_cuda else self._watch
        begun = 0.0 if watch is None else time.perf_counter()
        work = dist.all_reduce(real, group=self._process_group, async_op=True)
        return _BackendWork(work) if watch is None else _WatchedWork(work, buffer.nbytes, begun, watch)

    def watch(self, watch: Watch | None) -> None:
        """Tell ``watch`` of all-reduces; see the contract. Of those on a GPU the host knows nothing."""
        self._watch = watch

    def abort(self, error: BaseException) -> None:
        """Refuse later calls. A pending one ends with the backend's own error or timeout."""
        self._aborted = self._aborted or error

    def close(self) -> None:
        """Nothing to release: the process group belongs to whoever made it."""
