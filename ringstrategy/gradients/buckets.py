"""Which gradient lives where: a pure plan from parameters to buckets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

__all__ = ["ALIGNMENT", "MIB", "Bucket", "BucketPlan", "Slot", "Spec", "is_dense", "plan_buckets"]

MIB = 1024 * 1024
ALIGNMENT = 64  # bytes; a cache line, and a multiple of every element size


@dataclass(frozen=True, slots=True)
class Spec:
    """What the plan needs to know of a parameter.

    Attributes:
        index: its number among all parameters.
        numel: elements of its gradient.
        dtype: their type.
    """

    index: int
    numel: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of one gradient.

    Attributes:
        index: the parameter's number.
        start: first element, counted from the bucket's.
        numel: elements.
    """

    index: int
    start: int
    numel: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """Gradients of one dtype that travel together.

    Memory, in elements of the dtype; every slot starts on a cache line::

        | gradient 7 ..| gradient 6 ....| gradient 5 | one flag per gradient |
        0              slots[1].start                 flags                   numel

    Attributes:
        dtype: of all elements.
        slots: the gradients, in the order in which they are expected.
        flags: first of ``len(slots)`` elements that count the ranks which used each parameter.
        numel: elements in all.
        offset: first byte, counted from the plan's memory.
    """

    dtype: torch.dtype
    slots: tuple[Slot, ...]
    flags: int
    numel: int
    offset: int

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """All buckets, in the order in which they leave.

    Attributes:
        buckets: the buckets.
        nbytes: size of the memory that holds them, in bytes.
    """

    buckets: tuple[Bucket, ...]
    nbytes: int


def plan_buckets(groups: Sequence[Sequence[Spec]], cap_bytes: int, first_cap_bytes: int = MIB) -> BucketPlan:
    """Put gradients into buckets.

    Gradients of one dtype fill a bucket in the given order until the next would exceed the cap; a gradient larger than
    the cap has a bucket of its own. The first bucket is small, so that communication starts early.

    Args:
        groups: parameters in the order in which their gradients are expected; no bucket spans two groups.
        cap_bytes: most bytes of gradients in a bucket.
        first_cap_bytes: the same for the very first bucket, if smaller.

    Returns:
        Buckets in the order in which their last gradients are expected.

    Raises:
        ValueError: a cap is not positive.
    """
    if cap_bytes <= 0 or first_cap_bytes <= 0:
        raise ValueError(f"a bucket must hold at least one byte, not {min(cap_bytes, first_cap_bytes)}")
    filled: list[list[Spec]] = []
    for group in groups:
        open_buckets: dict[torch.dtype, list[Spec]] = {}
        complete: list[list[Spec]] = []
        for spec in group:
            bucket = open_buckets.setdefault(spec.dtype, [])
            cap = cap_bytes if filled or complete else min(cap_bytes, first_cap_bytes)
            if bucket and (sum(s.numel for s in bucket) + spec.numel) * spec.dtype.itemsize > cap:
                complete.append(bucket)
                bucket = open_buckets[spec.dtype] = []
            bucket.append(spec)
        complete.extend(open_buckets.values())
        position = {spec.index: place for place, spec in enumerate(group)}
        filled.extend(sorted(complete, key=lambda specs: position[specs[-1].index]))
    buckets: list[Bucket] = []
    offset = 0
    for specs in filled:
        buckets.append(_lay_out(specs, offset))
        offset = _aligned(offset + buckets[-1].nbytes)
    return BucketPlan(tuple(buckets), offset)


def _lay_out(specs: Sequence[Spec], offset: int) -> Bucket:
    dtype = specs[0].dtype
    line = max(ALIGNMENT // dtype.itemsize, 1)
    slots, start = [], 0
    for spec in specs:
        slots.append(Slot(spec.index, start, spec.numel))
        start += -(-spec.numel // line) * line
    return Bucket(dtype, tuple(slots), flags=start, numel=start + len(specs), offset=offset)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether strides cover a shape's elements without gaps or overlaps, in whatever order.

    >>> is_dense((2, 3), (1, 2)), is_dense((2, 3), (6, 2))
    (True, False)
    """
    expected = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True
