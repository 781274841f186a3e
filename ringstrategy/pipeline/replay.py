"""What the last stage logs for micro-batches, as all stages log it for the batch."""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.nn.modules.batchnorm import _NormBase
from torchmetrics import Metric

from ringstrategy import _lightning
from ringstrategy.pipeline.micro_batches import merge

__all__ = ["Entry", "Journal", "MetricRef", "SharedBuffers", "SharedMetrics", "Weights"]


@dataclass(frozen=True)
class Weights:
    """What micro-batches count for.

    Attributes:
        samples: their share of the batch's rows.
        loss: the factor of their loss.
    """

    samples: Sequence[float]
    loss: Sequence[float]

    def mean(self, values: dict[int, Any]) -> Any:
        """The mean of values of some micro-batches, by their rows."""
        total = sum(self.samples[number] for number in values)
        if not total:
            return next(iter(values.values()))
        return sum(value * (self.samples[number] / total) for number, value in values.items())

    def whole_loss(self, losses: dict[int, Tensor]) -> Tensor:
        """The loss of the batch from those of micro-batches; one that counts for nothing may be a mean of nothing."""
        counted = [loss * self.loss[number] for number, loss in losses.items() if self.loss[number]]
        return torch.stack(counted).sum(0) if counted else torch.zeros_like(next(iter(losses.values())))

    def merge(self, extras: Sequence[dict[str, Any]], sizes: Sequence[int]) -> dict[str, Any]:
        """Put together what ``training_step`` returned beside the loss: rows in order, single values as means."""
        merged: dict[str, Any] = {}
        for key in extras[0]:
            values = [extra[key] for extra in extras]
            if all(isinstance(value, Tensor) and not value.dim() for value in values):
                merged[key] = self.mean({number: value.detach() for number, value in enumerate(values)})
            else:
                merged[key] = merge(_detached(values), sizes)
        return merged


@dataclass(frozen=True)
class MetricRef:
    """Stands for a metric of the module, which every stage has.

    Attributes:
        name: within the module.
        value: its value for this batch alone; None if it was not asked for.
    """

    name: str
    value: Any


@dataclass(frozen=True)
class Entry:
    """One value of a batch to log.

    Attributes:
        name: as in ``self.log``.
        value: a number, a tensor, or a :class:`MetricRef`.
        options: of ``self.log``.
    """

    name: str
    value: Any
    options: dict[str, Any]


class Journal:
    """Records ``self.log`` and ``self.log_dict`` of the micro-batches of one batch."""

    def __init__(self) -> None:
        # By name: values by micro-batch, options, and the micro-batches' sizes if they were given.
        self._records: dict[str, tuple[dict[int, Any], dict[str, Any], dict[int, int]]] = {}
        self._losses: dict[int, Tensor] = {}  # by micro-batch

    @contextlib.contextmanager
    def of(self, module: pl.LightningModule, number: int) -> Iterator[None]:
        """Record what ``module`` logs while it works on micro-batch ``number``."""

        def log(name: str, value: Any, *args: Any, **options: Any) -> None:
            options.update(zip(_POSITIONAL, args, strict=False))
            values, _, sizes = self._records.setdefault(name, ({}, options, {}))
            if isinstance(value, Metric):
                name_of_metric = next(key for key, child in module.named_modules() if child is value)
                value = MetricRef(name_of_metric, _lightning.batch_value(value))
            values[number] = value.detach() if isinstance(value, Tensor) else value
            if options.get("batch_size") is not None:
                sizes[number] = options["batch_size"]

        def log_dict(dictionary: Any, *args: Any, **options: Any) -> None:
            for name, value in dictionary.items():
                log(name, value, *args, **options)

        vars(module).update(log=log, log_dict=log_dict)
        try:
            yield
        finally:
            del module.log, module.log_dict

    def note_loss(self, number: int, loss: Tensor) -> None:
        """This tensor, or its value, is the loss of a micro-batch, under whatever name it is logged."""
        self._losses[number] = loss.detach()

    def _is_loss(self, number: int, value: Any) -> bool:
        loss = self._losses.get(number)
        if loss is None or not isinstance(value, (Tensor, float)):
            return False
        return value.data_ptr() == loss.data_ptr() if isinstance(value, Tensor) else value == loss.item()

    def entries(self, weights: Weights) -> list[Entry]:
        """What to log for the whole batch."""
        result = []
        for name, (values, options, sizes) in self._records.items():
            if sizes:
                options = {**options, "batch_size": sum(sizes.values())}
            result.append(Entry(name, self._whole(values, options.get("reduce_fx", "mean"), weights), options))
        return result

    def _whole(self, values: dict[int, Any], reduce_fx: Any, weights: Weights) -> Any:
        first = next(iter(values.values()))
        if isinstance(first, MetricRef):
            batch_values = {number: value.value for number, value in values.items()}
            known = all(isinstance(value, (Tensor, float, int)) for value in batch_values.values())
            return MetricRef(first.name, weights.mean(batch_values) if known else None)
        counted = {number: value for number, value in values.items() if weights.loss[number]}
        if counted and all(self._is_loss(number, value) for number, value in counted.items()):
            return sum(value * weights.loss[number] for number, value in counted.items())
        for names, combine in _REDUCTIONS:
            if reduce_fx in names:
                return combine(torch.stack([torch.as_tensor(value) for value in values.values()]), dim=0)
        return weights.mean(values)


_POSITIONAL = ("prog_bar", "logger", "on_step", "on_epoch", "reduce_fx")
_REDUCTIONS = (
    (("sum", torch.sum), torch.sum),
    (("max", torch.max), torch.amax),
    (("min", torch.min), torch.amin),
)


class SharedMetrics:
    """The metrics of a module, which the last stage alone updates, on every stage.

    Args:
        module: the user's.
    """

    def __init__(self, module: pl.LightningModule) -> None:
        self._metrics = {name: child for name, child in module.named_modules() if isinstance(child, Metric)}
        self._before = {name: metric.update_count for name, metric in self._metrics.items()}

    def changes(self) -> dict[str, Any]:
        """The states of those that were updated."""
        return {
            name: _lightning.metric_state(metric)
            for name, metric in self._metrics.items()
            if metric.update_count != self._before[name]
        }

    def apply(self, changes: dict[str, Any]) -> None:
        """Take over the states of another stage."""
        for name, state in changes.items():
            _lightning.set_metric_state(self._metrics[name], state)

    def find(self, value: Any) -> Any:
        """The metric that a reference stands for, with its value for the batch; other values as they are."""
        if not isinstance(value, MetricRef):
            return value
        metric = self._metrics[value.name]
        _lightning.set_batch_value(metric, value.value)
        return metric


class SharedBuffers:
    """Buffers outside of the pipelined module, which the last stage alone sees all micro-batches move, on every stage.

    Args:
        module: the user's.
        inside: names of the others.
    """

    def __init__(self, module: pl.LightningModule, inside: Container[str]) -> None:
        self._module = module
        self._before = {
            name: (buffer, _version(buffer)) for name, buffer in module.named_buffers() if name not in inside
        }

    def changes(self) -> dict[str, Tensor]:
        """Those that were changed or replaced."""
        # Layers move their running statistics without a new version of the buffer.
        statistics = {
            f"{name}.{key}" if name else key
            for name, child in self._module.named_modules()
            if isinstance(child, _NormBase) and child.training
            for key in child._buffers
        }
        return {
            name: buffer
            for name, buffer in self._module.named_buffers()
            if name in self._before
            and (self._before[name][0] is not buffer or self._before[name][1] != _version(buffer) or name in statistics)
        }

    def apply(self, changes: dict[str, Tensor]) -> None:
        """Take over those of another stage."""
        for name, value in changes.items():
            self._module.get_buffer(name).data = value


def _version(tensor: Tensor) -> int:
    """Grows when a tensor is changed; one that was made in inference mode does not count that."""
    return -1 if tensor.is_inference() else tensor._version


def _detached(values: Sequence[Any]) -> list[Any]:
    return [pytree.tree_map_only(Tensor, Tensor.detach, value) for value in values]
