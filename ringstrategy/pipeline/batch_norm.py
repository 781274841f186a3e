"""Running statistics of normalisation layers, for a mini-batch that passes in micro-batches.

A layer in training normalises every micro-batch by that micro-batch's own statistics. Its running statistics are to
move once, by those of the whole mini-batch, as they do in one process:

    micro-batch                0          1          2
    what the layer saw     n₀ m₀ v₀   n₁ m₁ v₁   n₂ m₂ v₂      count, mean and variance per channel
                               └──────────┼──────────┘
    at the end                          n m v ──▶ running_mean, running_var, num_batches_tracked + 1

While a micro-batch passes, the layer has scratch buffers and a momentum of 1, so that it leaves just the statistics of
this micro-batch in them. That costs nothing, where a pass of our own over its input would take longer than the layer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parameter import is_lazy

__all__ = ["DeferredStatistics", "deferred_statistics", "untracked_statistics"]


class _Seen(NamedTuple):
    """Statistics of what one call of a layer has seen."""

    weight: Tensor  # (1,): values per channel for a BatchNorm, instances for an InstanceNorm
    mean: Tensor  # (channels,)
    variance: Tensor  # (channels,), unbiased


class DeferredStatistics:
    """Collects what training layers see in the micro-batches of one forward call, and moves their statistics once.

    All BatchNorms (SyncBatchNorm too) and InstanceNorms that track running statistics and are in training mode when a
    micro-batch begins take part. Their n-th calls in each micro-batch belong together. An InstanceNorm averages over
    instances, and its mini-batch has more of them; it does not count batches. Layers in half precision tell their
    statistics in half precision, as they keep them; they are combined in float32.

    With a single micro-batch nothing is touched: the layers do what they always do, to the bit.

    Args:
        modules: those that the micro-batches pass through; their children are looked at as well.
        micro_batches: how many there are.
    """

    def __init__(self, modules: Iterable[nn.Module], micro_batches: int) -> None:
        self._layers = _normalisations(modules)
        self._alone = micro_batches == 1
        self._calls: dict[_NormBase, list[list[_Seen]]] = {}  # of a layer, by call and micro-batch

    @contextlib.contextmanager
    def micro_batch(self) -> Iterator[None]:
        """Around the forward of one micro-batch. Outside of it, and after an exception, the layers are as ever.

        Raises:
            ValueError: a lazy layer has not seen an input yet.
        """
        with contextlib.ExitStack() as stack:
            for layer in () if self._alone else _tracking(self._layers):
                calls = iter(self._calls.setdefault(layer, []))
                stack.enter_context(_with_scratch(layer, self._recorder(layer, calls)))
            yield

    def _recorder(self, layer: _NormBase, earlier: Iterator[list[_Seen]]) -> Callable[[_Seen], None]:
        """Puts what a call saw to that of the same call in earlier micro-batches."""

        def record(seen: _Seen) -> None:
            call = next(earlier, None)
            if call is None:
                self._calls[layer].append([seen])
            else:
                call.append(seen)

        return record

    def commit(self) -> None:
        """Move the running statistics, once per call of each layer, by those of all micro-batches together."""
        for layer, calls in self._calls.items():
            for call in calls:
                _move(layer, call)
        self._calls.clear()


@contextlib.contextmanager
def deferred_statistics(modules: Iterable[nn.Module], micro_batches: int) -> Iterator[DeferredStatistics]:
    """Around one forward call of a pipeline; see :class:`DeferredStatistics`.

    After an exception the running statistics stay what they were.

    Args:
        modules: those that the micro-batches pass through; their children are looked at as well.
        micro_batches: how many there are.

    Yields:
        What each micro-batch's forward is to be run under.
    """
    statistics = DeferredStatistics(modules, micro_batches)
    yield statistics
    statistics.commit()


@contextlib.contextmanager
def untracked_statistics(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Around a forward that repeats another one: the same outputs, and no running statistics move.

    Also between the micro-batches of a :class:`DeferredStatistics`, which takes no notice; not inside of one.

    Args:
        modules: those that are run; their children are looked at as well.
    """
    with contextlib.ExitStack() as stack:
        for layer in _tracking(_normalisations(modules)):
            stack.enter_context(_with_scratch(layer))
        yield


def _normalisations(modules: Iterable[nn.Module]) -> tuple[_NormBase, ...]:
    inner = (layer for module in modules for layer in module.modules() if isinstance(layer, _NormBase))
    return tuple(dict.fromkeys(inner))


def _tracking(layers: Iterable[_NormBase]) -> Iterator[_NormBase]:
    """The layers whose next forward would move their running statistics."""
    for layer in layers:
        if layer.training and layer.track_running_stats and layer.running_mean is not None:
            if is_lazy(layer.running_mean):
                raise ValueError(
                    f"{layer} has no shape yet, so its statistics cannot be collected over micro-batches. Run the "
                    "module once on an input before training."
                )
            yield layer


@contextlib.contextmanager
def _with_scratch(layer: _NormBase, record: Callable[[_Seen], None] | None = None) -> Iterator[None]:
    """Lend a layer buffers that keep nothing but the last input's statistics, and tell what they were."""
    # The dictionary itself: assignment to a buffer's name takes forty times as long, and there are many layers.
    buffers, momentum = layer._buffers, layer.momentum
    own = {name: buffers[name] for name in ("running_mean", "running_var", "num_batches_tracked")}
    mean, var, tracked = own.values()
    assert mean is not None
    assert var is not None

    def lend() -> None:
        # Zeros, because momentum 1 multiplies what was there by 0.
        buffers.update(running_mean=torch.zeros_like(mean), running_var=torch.zeros_like(var))

    def called(_layer: nn.Module, _inputs: Any, output: Tensor) -> None:
        # A fill rather than a copy from the host, for which a GPU would stop.
        weight = torch.full((1,), _samples(layer, output), dtype=_wide(mean), device=mean.device)
        assert layer.running_mean is not None
        assert layer.running_var is not None
        assert record is not None
        record(_Seen(weight, layer.running_mean, layer.running_var))
        lend()  # the next call's

    hook = None
    try:
        lend()
        buffers.update(num_batches_tracked=None if tracked is None else torch.zeros_like(tracked))
        layer.momentum = 1.0
        if record is not None:
            hook = layer.register_forward_hook(called, prepend=True)
        yield
    finally:
        buffers.update(own)
        layer.momentum = momentum
        if hook is not None:
            hook.remove()


def _samples(layer: _NormBase, output: Tensor) -> int:
    """How many samples the statistics of a call are made of."""
    if isinstance(layer, _InstanceNorm):
        batched = output.dim() > layer._get_no_batch_dim()  # type: ignore[no-untyped-call]
        return output.shape[0] if batched else 1
    values = output.numel() // output.shape[1]
    if isinstance(layer, nn.SyncBatchNorm) and dist.is_available() and dist.is_initialized():
        values *= dist.get_world_size(layer.process_group)  # taken to have equal shares
    return values


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


@torch.no_grad()
def _move(layer: _NormBase, call: Sequence[_Seen]) -> None:
    """Combine one call's statistics of all micro-batches and move the running ones.

    The sum of squared deviations from the common mean is that of the parts from their own means, plus that of the means
    (Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances", 1979).
    """
    assert layer.running_mean is not None
    assert layer.running_var is not None
    weights, means, variances = (torch.stack(part).to(_wide(part[0])) for part in zip(*call, strict=True))
    total = weights.sum(0)
    mean = (weights * means).sum(0) / total
    if isinstance(layer, _InstanceNorm):
        variance = (weights * variances).sum(0) / total
        factor = layer.momentum or 0.0
    else:
        squares = (weights - 1) * variances + weights * (means - mean).square()
        variance = squares.sum(0) / (total - 1)
        factor = _factor(layer)
    for running, new in ((layer.running_mean, mean), (layer.running_var, variance)):
        # As the layer itself does, without autograd's notice: a graph that has saved the buffers does not need them.
        running.data.copy_((1 - factor) * running + factor * new)


def _factor(layer: _NormBase) -> float:
    """Count the mini-batch, and say how much it weighs; without momentum each weighs the same."""
    if layer.num_batches_tracked is not None:
        layer.num_batches_tracked.add_(1)
    if layer.momentum is not None:
        return layer.momentum
    return 0.0 if layer.num_batches_tracked is None else 1.0 / float(layer.num_batches_tracked)
