"""Gradients and buckets in memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeGuard

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ringstrategy.collectives.base import Work
from ringstrategy.gradients.buckets import BucketPlan, Spec, is_dense

__all__ = ["Gradient", "LiveBucket", "lay_out", "lives_in", "set_aside"]


@dataclass(eq=False)
class Gradient:
    """A parameter and the state of its gradient."""

    index: int
    name: str
    parameter: nn.Parameter
    hook: RemovableHandle | None = None
    sparse: bool = False
    expected: int = 1  # times it fires in one backward
    fired: int = 0  # times it fired in this backward
    dirty: bool = False  # holds what was never averaged, e.g. accumulated under no_sync
    staged: bool = False  # its bucket has it
    view: Tensor | None = None  # its place in the bucket, in the parameter's own strides
    bucket: LiveBucket | None = None
    graph: Tensor | None = None  # the local gradient, where a graph of higher order hangs on it
    kept: Tensor | None = None  # a mean of an earlier backward, in case nobody has a new gradient

    @property
    def spec(self) -> Spec:
        """What the plan needs to know of it."""
        return Spec(self.index, self.parameter.numel(), self.parameter.dtype)


@dataclass(eq=False)
class LiveBucket:
    """A bucket in memory."""

    flat: Tensor  # all of it, flags included
    flags: Tensor  # one per gradient: how many ranks used the parameter
    gradients: list[Gradient] = field(default_factory=list)
    missing: int = 0  # gradients that are not staged yet
    work: Work | None = None  # its all-reduce, once it has left

    def label(self, number: int) -> str:
        """How errors call it, by its place in the order and the parameters at its ends."""
        first, last = self.gradients[0].name, self.gradients[-1].name
        return f"gradient bucket {number} ({first}{'' if first == last else f' ... {last}'})"


def lives_in(grad: Tensor | None, view: Tensor | None) -> TypeGuard[Tensor]:
    """Whether a gradient is the view of its bucket."""
    return (
        grad is not None
        and view is not None
        and grad.layout == torch.strided
        and grad.data_ptr() == view.data_ptr()
        and grad.numel() > 0
    )


@contextlib.contextmanager
def set_aside(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Parameters have no gradients in here, and the same as before afterwards."""
    before = [(parameter, parameter.grad) for parameter in parameters]
    for parameter, _ in before:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in before:
            parameter.grad = gradient


def _view_like(parameter: Tensor, flat: Tensor) -> Tensor:
    """See a piece of a bucket in the parameter's shape and, where they leave no gaps, its strides."""
    if is_dense(parameter.shape, parameter.stride()):
        return flat.as_strided(parameter.shape, parameter.stride())
    return flat.view(parameter.shape)


def lay_out(plan: BucketPlan, memory: Tensor, gradients: list[Gradient]) -> list[LiveBucket]:
    """Give gradients their places.

    Args:
        plan: which gradient goes where.
        memory: ``plan.nbytes`` bytes.
        gradients: all gradients, by index; those in the plan get their view and bucket.

    Returns:
        The buckets, in the order of the plan.
    """
    buckets = []
    for bucket in plan.buckets:
        flat = memory[bucket.offset : bucket.offset + bucket.nbytes].view(bucket.dtype)
        live = LiveBucket(flat, flat[bucket.flags :], missing=len(bucket.slots))
        for slot in bucket.slots:
            gradient = gradients[slot.index]
            if lives_in(gradient.parameter.grad, gradient.view):
                # Memory of the plan before; not to be mistaken for the new place.
                gradient.parameter.grad = gradient.parameter.grad.detach().clone()
            gradient.view = _view_like(gradient.parameter, flat[slot.start : slot.start + slot.numel])
            gradient.bucket = live
            live.gradients.append(gradient)
        buckets.append(live)
    return buckets
