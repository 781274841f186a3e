"""The pipelined module as autograd and its callers see it: one differentiable function, on every stage alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from ringstrategy.pipeline.engine import Place
from ringstrategy.pipeline.stand_in import StandIn

__all__ = ["PipelinedCall", "PipelinedForward", "put_together"]


class PipelinedCall:
    """One differentiable call, on one stage.

    Args:
        forward: runs all forwards; returns the output's structure and tensors.
        backward: given the gradients of the tensors and whether the graph is kept, runs all backwards; returns the
            gradients of ``inputs`` and of ``parameters``.
        inputs: tensors given to the module that require a gradient.
        parameters: of this stage, that train.
    """

    def __init__(
        self,
        forward: Callable[[], tuple[Any, list[Tensor]]],
        backward: Callable[[Sequence[Tensor | None], bool], Sequence[Tensor | None]],
        inputs: Sequence[Tensor],
        parameters: Sequence[nn.Parameter],
    ) -> None:
        self.forward = forward
        self.backward = backward
        self._arguments = (*inputs, *parameters)
        self.structure: Any = None

    def run(self) -> Any:
        """Compute the output. Its backward is the pipeline's."""
        # A stage without anything to train takes part in the backward all the same.
        anchor = torch.empty(0, requires_grad=True)
        tensors = _Pipelined.apply(self, anchor, *self._arguments)
        return put_together(self.structure, tensors)


def put_together(structure: Any, tensors: Sequence[Tensor]) -> Any:
    """Put tensors in their places."""
    return pytree.tree_map(lambda leaf: tensors[leaf.number] if isinstance(leaf, Place) else leaf, structure)


class _Pipelined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: PipelinedCall, *_: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        call.structure, tensors = call.forward()
        outputs = tuple(tensor.detach() for tensor in tensors)
        ctx.mark_non_differentiable(
            *(out for out, tensor in zip(outputs, tensors, strict=True) if not tensor.requires_grad)
        )
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            # torch's `once_differentiable` sees it only where `gradients` themselves have a graph.
            raise RuntimeError(
                "The gradient of the pipelined module was asked for with create_graph=True, but its stages cannot "
                "differentiate twice: leave out what needs second derivatives (a gradient penalty, say), or train with "
                "strategy='ring_ddp'."
            )
        keep = torch._C._autograd._get_current_graph_task_keep_graph()
        return (None, None, *ctx.call.backward(gradients, keep))


class PipelinedForward(StandIn):
    """Stands in for the ``forward`` of a module instance. Copies of the module get their class's own.

    Args:
        module: whose forward it is.
        call: what to do instead.
    """

    def __init__(self, module: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__(module, "forward", call)
