"""The mean of gradients of which each rank has only some rows."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ringstrategy.process_group import RankGroup

__all__ = ["mean_of_sparse"]


def mean_of_sparse(group: RankGroup, gradient: Tensor | None, used: bool, like: Tensor) -> Tensor | None:
    """Average gradients that are sparse, dense or absent, depending on the rank. Collective.

    Args:
        group: the ranks.
        gradient: this rank's, None if it has none (counts as zero).
        used: whether there is anything new in it.
        like: the parameter.

    Returns:
        The mean: sparse and coalesced, or dense if some rank's is; None if no rank has a new gradient. Its bits are the
        same on all ranks, since all add in rank order.
    """
    if gradient is not None and gradient.is_sparse:
        gradient = gradient.coalesce()
    kinds = group.exchange(None if gradient is None else _Kind.of(gradient, used))
    present = [kind for kind in kinds if kind is not None]
    if not any(kind.used for kind in present):
        return None
    if any(kind.sparse_dim == 0 for kind in present):
        total = torch.zeros_like(like, memory_format=torch.contiguous_format)
        if gradient is not None:
            total.copy_(gradient.detach().to_dense())
        dist.all_reduce(total, group=group.process_group)
        return total.div_(group.world_size)

    # Ranks send as many rows as the one with the most, for all messages must be equally long.
    sparse_dim, most = present[0].sparse_dim, max(kind.nnz for kind in present)
    indices = torch.zeros(sparse_dim, most, dtype=torch.int64, device=like.device)
    values = torch.zeros(most, *like.shape[sparse_dim:], dtype=like.dtype, device=like.device)
    if gradient is not None:
        rows = gradient.values()
        indices[:, : len(rows)] = gradient.indices()
        values[: len(rows)] = rows / group.world_size
    all_indices = [torch.empty_like(indices) for _ in kinds]
    all_values = [torch.empty_like(values) for _ in kinds]
    dist.all_gather(all_indices, indices, group=group.process_group)
    dist.all_gather(all_values, values, group=group.process_group)
    nnz = [kind.nnz if kind else 0 for kind in kinds]
    return torch.sparse_coo_tensor(
        torch.cat([index[:, :n] for index, n in zip(all_indices, nnz, strict=True)], dim=1),
        torch.cat([value[:n] for value, n in zip(all_values, nnz, strict=True)]),
        like.shape,
    ).coalesce()


class _Kind(NamedTuple):
    """What the other ranks must know of a gradient: no sparse dimensions means dense."""

    sparse_dim: int
    nnz: int
    used: bool

    @classmethod
    def of(cls, gradient: Tensor, used: bool) -> _Kind:
        if not gradient.is_sparse:
            return cls(0, 0, used)
        return cls(gradient.sparse_dim(), len(gradient.values()), used)
