"""The mean of gradients of which each rank has only some rows."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from ringstrategy.process_group import RankGroup

__all__ = ["mean_of_sparse"]


def mean_of_sparse(group: RankGroup, gradient: Tensor | None, like: Tensor) -> Tensor | None:
    """Average gradients that are sparse, dense or absent, depending on the rank. Collective.

    Args:
        group: the ranks.
        gradient: this rank's, None if it has none (counts as zero).
        like: the parameter.

    Returns:
        The mean: sparse and coalesced, or dense if some rank's is; None if no rank has a gradient. Its bits are the
        same on all ranks, since all add in rank order.
    """
    if gradient is not None and gradient.is_sparse:
        gradient = gradient.coalesce()
    kind = None if gradient is None else (gradient.sparse_dim(), gradient._nnz()) if gradient.is_sparse else "dense"
    kinds = group.exchange(kind)
    present = [k for k in kinds if k is not None]
    if not present:
        return None
    if "dense" in present:
        dense = torch.zeros_like(like) if gradient is None else gradient.to_dense() if gradient.is_sparse else gradient
        total = dense.detach().contiguous().clone()
        dist.all_reduce(total)
        return total.div_(group.world_size)

    sparse_dim, most = present[0][0], max(nnz for _, nnz in present)
    nnz = [k[1] if k else 0 for k in kinds]
    # Ranks send as many rows as the one with the most, for all messages must be equally long.
    indices = torch.zeros(sparse_dim, most, dtype=torch.int64, device=like.device)
    values = torch.zeros(most, *like.shape[sparse_dim:], dtype=like.dtype, device=like.device)
    if gradient is not None:
        indices[:, : gradient._nnz()] = gradient.indices()
        values[: gradient._nnz()] = gradient.values() / group.world_size
    all_indices = [torch.empty_like(indices) for _ in kinds]
    all_values = [torch.empty_like(values) for _ in kinds]
    dist.all_gather(all_indices, indices)
    dist.all_gather(all_values, values)
    return torch.sparse_coo_tensor(
        torch.cat([index[:, :n] for index, n in zip(all_indices, nnz, strict=True)], dim=1),
        torch.cat([value[:n] for value, n in zip(all_values, nnz, strict=True)]),
        like.shape,
    ).coalesce()
