"""A batch as micro-batches, and the outputs of micro-batches as the output of the batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

__all__ = ["merge", "micro_batch_sizes", "rows_of", "split"]


def rows_of(tensors: Sequence[Tensor]) -> int | None:
    """Rows of a batch: the first dimension of the first tensor that has one; None where no tensor has any."""
    return next((tensor.shape[0] for tensor in tensors if tensor.dim()), None)


def micro_batch_sizes(rows: int | None, chunks: int, least: int = 1) -> tuple[int, ...]:
    """Rows of each micro-batch: as many micro-batches as wanted and possible, of sizes that differ by at most one.

    Args:
        rows: of the batch. None, for one that cannot be split, makes one micro-batch of 0 rows.
        chunks: number of micro-batches wanted.
        least: rows that a micro-batch should have (two, where a batch norm trains), as far as the batch has them.
    """
    if not rows:
        return (0,)
    count = max(1, min(chunks, rows // least))
    small, more = divmod(rows, count)
    return tuple(small + (number < more) for number in range(count))


def split(tensor: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """The part of a tensor that each micro-batch gets.

    A tensor whose first dimension is not that of the batch (a scalar, a mask over features) goes to all as it is.
    """
    if len(sizes) == 1 or not tensor.dim() or tensor.shape[0] != sum(sizes):
        return [tensor] * len(sizes)
    return list(torch.split(tensor, list(sizes)))


def merge(outputs: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Put the outputs of micro-batches together: tensors row after row; whatever else must agree.

    Args:
        outputs: of each micro-batch, all of one structure (tensors in tuples, lists, dicts, named tuples ...).
        sizes: rows of each micro-batch.

    Raises:
        ValueError: an output that has no rows, or differs between micro-batches.
    """
    if len(outputs) == 1:
        return outputs[0]
    flat = [pytree.tree_flatten_with_path(output) for output in outputs]
    spec = flat[0][1]
    if any(other != spec for _, other in flat):
        raise ValueError("The pipelined module returned another structure for one micro-batch than for another.")
    paths = [pytree.keystr(path) for path, _ in flat[0][0]]
    columns = zip(*([leaf for _, leaf in leaves] for leaves, _ in flat), strict=True)
    return pytree.tree_unflatten(
        [_merge_leaf(path, column, sizes) for path, column in zip(paths, columns, strict=True)], spec
    )


def _merge_leaf(path: str, leaves: Sequence[Any], sizes: Sequence[int]) -> Any:
    first = leaves[0]
    if isinstance(first, Tensor):
        if all(leaf.dim() and leaf.shape[0] == size for leaf, size in zip(leaves, sizes, strict=True)):
            return torch.cat(list(leaves))
        raise ValueError(
            f"The pipelined module's output{path} has shape {tuple(first.shape)} for a micro-batch of {sizes[0]} rows. "
            "The outputs of micro-batches can be put together only where their first dimension is that of the batch: "
            "return one row per sample (and reduce in training_step), or set chunks=1."
        )
    if any(leaf != first for leaf in leaves):
        raise ValueError(
            f"The pipelined module's output{path} is {leaves!r} for the micro-batches of one batch. A value that is no "
            "tensor must be the same for all; return a tensor with one row per sample, or set chunks=1."
        )
    return first
