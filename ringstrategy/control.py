"""Small collectives of the strategy itself: barriers, objects, logged values. None outlasts a failure."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ringstrategy.failure import FailureMonitor
from ringstrategy.process_group import RankGroup

__all__ = ["Control", "is_mean"]

T = TypeVar("T")

_OPERATIONS = {
    "mean": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.SUM,
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}


class Control:
    """Collectives that a failure of any rank interrupts.

    Args:
        group: the ranks.
        monitor: knows of failures.
    """

    def __init__(self, group: RankGroup, monitor: FailureMonitor) -> None:
        self._group = group
        self._monitor = monitor
        self._refusal = ""

    @contextlib.contextmanager
    def refusing(self, why: str) -> Iterator[None]:
        """Within, not all ranks are here: whatever needs them raises rather than hangs.

        Args:
            why: for the error.
        """
        self._refusal = why
        try:
            yield
        finally:
            self._refusal = ""

    def check_allowed(self) -> None:
        """Raise if this is no place for what needs all ranks.

        Raises:
            RuntimeError: see :meth:`refusing`.
        """
        if self._refusal:
            raise RuntimeError(self._refusal)

    def barrier(self, name: str | None = None) -> None:
        """Wait until every rank is here.

        Args:
            name: for the error if one never comes.
        """
        self.check_allowed()
        with self._monitor.waiting(f"barrier '{name}'" if name else "a barrier"):
            if self._group.device.type == "cuda":
                dist.barrier(device_ids=[self._group.device.index])
            else:
                self._monitor.join(dist.barrier(async_op=True))

    def broadcast(self, value: T, src: int = 0) -> T:
        """Give rank ``src``'s object to all.

        Args:
            value: any object that pickles; ignored on the other ranks.
            src: the rank that has it.
        """
        self.check_allowed()
        with self._monitor.waiting(f"an object from rank {src}"):
            data = torch.empty(0, dtype=torch.uint8)
            if self._group.rank == src:
                data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
            size = torch.tensor([data.numel()])
            self._monitor.join(dist.broadcast(size, src, group=self._group.control, async_op=True))
            if self._group.rank != src:
                data = torch.empty(int(size), dtype=torch.uint8)
            self._monitor.join(dist.broadcast(data, src, group=self._group.control, async_op=True))
        if self._group.rank == src:
            return value
        received: T = pickle.loads(data.numpy().tobytes())
        return received

    def check_alike(self, tensor: Tensor) -> None:
        """Compare the tensors that all ranks are about to gather; unequal ones would crash the backend. Collective.

        Args:
            tensor: this rank's.

        Raises:
            ValueError: on every rank, with the first rank whose tensor differs from rank 0's.
        """
        self.check_allowed()
        with self._monitor.waiting("the shapes of gathered tensors"):
            everyone = self._group.exchange((tuple(tensor.shape), tensor.dtype))
        for rank, theirs in enumerate(everyone):
            if theirs != everyone[0]:
                raise ValueError(
                    f"Only tensors alike can be gathered, but rank 0 has {_describe(everyone[0])} and rank {rank} has "
                    f"{_describe(theirs)}. Pad them to one shape, and gather their sizes as well."
                )

    def reduce(self, tensor: Tensor, group: Any = None, operation: Any = "mean") -> Tensor:
        """Combine a tensor of all ranks without changing it.

        Args:
            tensor: any shape and dtype, on any device; the same on all ranks.
            group: a process group, all ranks by default.
            operation: a name or a ``ReduceOp``. The mean of integers and bools is their true mean, in
                the default dtype.

        Returns:
            A new tensor, equal on all ranks.

        Raises:
            ValueError: an unknown operation.
        """
        mean = is_mean(operation)
        if mean:
            reduce_op = dist.ReduceOp.SUM
        elif isinstance(operation, str):
            if operation.lower() not in _OPERATIONS:
                raise ValueError(f"reduce_op={operation!r} is unknown; choose one of {', '.join(sorted(_OPERATIONS))}.")
            reduce_op = _OPERATIONS[operation.lower()]
        else:
            reduce_op = operation
        self.check_allowed()
        # The backends know no bool; counts of bools need more than their own byte.
        result = tensor.detach().to(torch.int64) if tensor.dtype == torch.bool else tensor.detach().clone()
        with self._monitor.waiting("a reduced value"):
            on_device = result.to(self._group.device).contiguous()
            work = dist.all_reduce(on_device, op=reduce_op, group=group, async_op=True)
            if on_device.is_cuda:
                work.wait()  # the stream does, not the host
            else:
                self._monitor.join(work)
        result = on_device.to(tensor.device)
        if mean:
            return result / dist.get_world_size(group)
        if tensor.dtype == torch.bool and reduce_op in (dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT):
            return result.bool()
        return result


def is_mean(operation: Any) -> bool:
    """Whether a reduction is the mean; see :meth:`Control.reduce`."""
    return operation in ("mean", "avg", dist.ReduceOp.AVG, None) or str(operation).lower() in ("mean", "avg")


def _describe(kind: tuple[tuple[int, ...], torch.dtype]) -> str:
    return f"one of shape {kind[0]} and {kind[1]}"
