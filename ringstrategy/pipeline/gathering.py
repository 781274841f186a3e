"""The gradient of tensors that were gathered from the ranks of a group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.autograd.function import Function, once_differentiable

__all__ = ["with_gradient"]


def with_gradient(gathered: Tensor, own: Tensor, place: int, add_up: Callable[[Tensor], Tensor]) -> Tensor:
    """Let a gradient flow from gathered tensors back into those that they are copies of.

    torch's own ``all_gather`` with a gradient (``torch.distributed.nn``) fails over gloo in groups of some ranks.

    Args:
        gathered: (members, *shape), without a graph.
        own: (*shape), what this rank contributed.
        place: of this rank in the group.
        add_up: sums a tensor over the group. Collective; the backward calls it.

    Returns:
        ``gathered``, whose backward gives ``own`` the sum of the gradients that all members have for it.
    """
    result: Tensor = _WithGradient.apply(own, gathered, place, add_up)
    return result


class _WithGradient(Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, gathered: Tensor, place: int, add_up: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.place, ctx.add_up = place, add_up
        return gathered.view_as(gathered)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.add_up(gradient)[ctx.place], None, None, None
