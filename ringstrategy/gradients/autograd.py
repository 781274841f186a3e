"""What the reducer needs to know of autograd."""

from __future__ import annotations

from types import FrameType

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

__all__ = ["inside_backward", "with_value"]


def with_value(local: Tensor, mean: Tensor) -> Tensor:
    """The mean as a value, with the local gradient's graph for derivatives of higher order."""
    with torch.enable_grad():
        result: Tensor = _WithValue.apply(local, mean)
    return result


class _WithValue(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, local: Tensor, mean: Tensor) -> Tensor:
        return mean.clone()

    @staticmethod
    def backward(ctx: object, grad_output: Tensor) -> tuple[Tensor, None]:
        return grad_output, None


def inside_backward(frame: FrameType | None) -> bool:
    """Whether a frame, or one that called it, is the backward of a Python-implemented autograd function."""
    inner = BackwardCFunction.apply.__code__
    while frame is not None:
        if frame.f_code is inner:
            return True
        frame = frame.f_back
    return False
