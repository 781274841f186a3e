"""Stages of a pipeline as threads that can reduce tensors among themselves."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, TypeVar

import torch
from torch import Tensor

from ringstrategy.pipeline.clipping import Combine

__all__ = ["run_stage_threads"]

T = TypeVar("T")


class _Meeting:
    """An all-reduce between threads."""

    def __init__(self, stages: int) -> None:
        self._brought: list[tuple[Tensor, str] | None] = [None] * stages
        self._barrier = threading.Barrier(stages, timeout=20)

    def combine(self, stage: int, tensor: Tensor, how: Literal["sum", "max"]) -> Tensor:
        """Reduce over the stages, which must agree on what and how."""
        self._brought[stage] = (tensor.clone(), how)
        self._barrier.wait()
        everyone = [brought for brought in self._brought if brought is not None]
        self._barrier.wait()
        assert {(other.shape, other.dtype, way) for other, way in everyone} == {(tensor.shape, tensor.dtype, how)}
        together = torch.stack([other for other, _ in everyone])
        if how == "sum":
            return together.sum(0)
        # As gloo does it, which loses a NaN unless rank 0 brings it.
        others = together.nan_to_num(-math.inf, posinf=math.inf, neginf=-math.inf).amax(0)
        return torch.maximum(together[0], others)

    def leave(self) -> None:
        self._barrier.abort()


def run_stage_threads(stages: int, work: Callable[[int, Combine], T]) -> list[T]:
    """Run ``work(stage, combine)`` on all stages at once.

    Args:
        stages: how many.
        work: given its stage and a reduction that all stages must call alike; a stage that fails wakes the others.

    Returns:
        What each stage returned.
    """
    meeting = _Meeting(stages)

    def run(stage: int) -> T:
        try:
            return work(stage, lambda tensor, how: meeting.combine(stage, tensor, how))
        except BaseException:
            meeting.leave()
            raise

    with ThreadPoolExecutor(stages) as threads:
        futures = [threads.submit(run, stage) for stage in range(stages)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:
        # The others' barrier only broke because of this one.
        raise min(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError))
    return [future.result() for future in futures]
