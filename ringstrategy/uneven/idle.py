"""A training step that a rank takes only because the others need it there."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchmetrics import Metric

from ringstrategy import _lightning

__all__ = ["kept_buffers", "kept_values", "neutral"]


@contextlib.contextmanager
def kept_values(module: pl.LightningModule) -> Iterator[None]:
    """Metrics of the module, and what it logs, are not moved by what runs in here.

    What is synchronised over the ranks in here keeps the result, and what will be synchronised when the epoch ends
    waits for that: the other ranks count on this one.
    """
    metrics = [child for child in module.modules() if isinstance(child, Metric)]
    states = [{name: _copy(value) for name, value in _lightning.metric_state(metric).items()} for metric in metrics]
    values = [_lightning.batch_value(metric) for metric in metrics]
    try:
        with _lightning.kept_logs(module):
            yield
    finally:
        for metric, state, value in zip(metrics, states, values, strict=True):
            _lightning.set_metric_state(metric, state)
            _lightning.set_batch_value(metric, value)


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return list(value) if isinstance(value, list) else value


@contextlib.contextmanager
def kept_buffers(module: nn.Module) -> Iterator[None]:
    """Whatever runs in here, the module's buffers have their old values afterwards.

    It must include the backward, for which autograd may have saved them.
    """
    buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers() if not buffer.is_meta]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)


def neutral(tensor: Tensor, operation: Any) -> Tensor:
    """What changes nothing when it is combined with the values of other ranks.

    Args:
        tensor: of the shape and dtype that they have.
        operation: ``"sum"``, ``"mean"``, ``"max"``, ``"min"``, ``"product"``, or a ``ReduceOp``.
    """
    name = operation.lower() if isinstance(operation, str) else operation
    if name in ("max", dist.ReduceOp.MAX):
        return torch.full_like(tensor, _lowest(tensor.dtype))
    if name in ("min", dist.ReduceOp.MIN):
        return torch.full_like(tensor, _highest(tensor.dtype))
    return torch.ones_like(tensor) if name in ("product", dist.ReduceOp.PRODUCT) else torch.zeros_like(tensor)


def _highest(dtype: torch.dtype) -> float:
    if dtype == torch.bool:
        return True
    return float("inf") if dtype.is_floating_point else torch.iinfo(dtype).max


def _lowest(dtype: torch.dtype) -> float:
    if dtype == torch.bool:
        return False
    return float("-inf") if dtype.is_floating_point else torch.iinfo(dtype).min
