"""What layers cost: time, memory, and what would be sent between them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ringstrategy.pipeline.programs import StageProgram, cut
from ringstrategy.pipeline.side_effects import SideEffects, unchanged_buffers
from ringstrategy.pipeline.stage import without_hooks
from ringstrategy.pipeline.tracing import Layer, Trace

__all__ = ["LayerCost", "balance_costs", "measure", "parameter_bytes"]

# A guess that only decides between cuts that are about as good: what one rank copies per second to another.
_BYTES_PER_SECOND = 4e9
# A parameter, its gradient, and the two moments of Adam.
_COPIES_OF_PARAMETERS = 4


@dataclass(frozen=True, slots=True)
class LayerCost:
    """What a layer costs per micro-batch.

    Attributes:
        forward: seconds.
        backward: seconds; 0 where nothing needs a gradient.
        output_bytes: what is sent forwards if a stage ends with this layer; the last layer's is the module's output.
        activation_bytes: what is kept for the backward, without parameters, buffers and the tensors of the call.
        parameter_bytes: of its parameters.
    """

    forward: float
    backward: float
    output_bytes: int
    activation_bytes: int
    parameter_bytes: int


def measure(
    trace: Trace, inputs: Sequence[Tensor], layers: Sequence[Layer] | None = None, repeats: int = 3
) -> list[LayerCost]:
    """Run a module layer by layer, forwards and backwards, and measure.

    Parameters, gradients, buffers and random generators are afterwards as they were. Times are medians, after one run
    that is not counted.

    Args:
        trace: the traced module, whose parameters are all in memory.
        inputs: the tensors of a call; their size is that of a micro-batch.
        layers: layers at which the trace can be cut; what lies between goes with the layer before. ``None``: all.
        repeats: runs that are counted.

    Returns:
        Costs by layer.

    Raises:
        ValueError: a layer does not occur in the trace.
    """
    layers = trace.layers if layers is None else layers
    programs = cut(trace, [layer.anchor for layer in layers[1:]])
    module = trace.module
    effects = SideEffects(module)
    inputs = [tensor.detach().clone() for tensor in inputs]
    try:
        with (
            unchanged_buffers(module),
            without_hooks(module.parameters()),
            torch.inference_mode(False),
            torch.enable_grad(),
        ):
            saved, sent = _bytes(module, programs, inputs)
            runs = [_times(module, programs, inputs) for _ in range(1 + repeats)][1:]
    finally:
        effects.undo()
    return [
        LayerCost(
            forward=statistics.median(run[number][0] for run in runs),
            backward=statistics.median(run[number][1] for run in runs),
            output_bytes=sent[number],
            activation_bytes=saved[number],
            parameter_bytes=parameter_bytes(module, layer),
        )
        for number, layer in enumerate(layers)
    ]


def parameter_bytes(module: nn.Module, layer: Layer) -> int:
    """Size of the parameters of a layer, also while they are on the meta device."""
    return sum(module.get_parameter(name).numel() * module.get_parameter(name).itemsize for name in layer.parameters)


def balance_costs(
    kind: Literal["time", "memory", "size"],
    costs: Sequence[LayerCost],
    micro_batches: int = 1,
    recompute: bool = False,
    bytes_per_second: float = _BYTES_PER_SECOND,
) -> tuple[list[float], list[float]]:
    """Costs in the form that ``partition`` takes.

    Args:
        kind: ``"time"``: seconds of forward and backward, and of sending activations and their gradients. ``"memory"``:
            bytes of parameters, gradients, an Adam's state, and activations. ``"size"``: bytes of parameters.
        costs: measured costs by layer.
        micro_batches: how many of them a stage keeps activations of.
        recompute: whether activations are thrown away and computed again.
        bytes_per_second: how fast a value travels to the next stage.

    Returns:
        Costs by layer, and costs of a cut after each layer.
    """
    if kind == "time":
        again = 2 if recompute else 1
        return (
            [again * cost.forward + cost.backward for cost in costs],
            [2 * cost.output_bytes / bytes_per_second for cost in costs],
        )
    if kind == "memory":
        kept = 1 if recompute else micro_batches
        return (
            [float(_COPIES_OF_PARAMETERS * cost.parameter_bytes + kept * cost.activation_bytes) for cost in costs],
            [0.0] * len(costs),
        )
    return [float(cost.parameter_bytes) for cost in costs], [0.0] * len(costs)


def _bytes(
    module: nn.Module, programs: Sequence[StageProgram], inputs: Sequence[Tensor]
) -> tuple[list[int], list[int]]:
    """What each layer saves for its backward and what it sends, in bytes. Memory that several save counts once."""
    seen = {_memory(tensor) for tensor in (*module.parameters(), *module.buffers(), *inputs)}
    saved: list[int] = []
    sent: list[int] = []
    alive: list[Tensor] = []  # so that no memory is used twice
    values: tuple[Any, ...] = ()

    def count(tensor: Tensor) -> Tensor:
        kept = tensor.detach()  # an output with its graph, kept by that graph, would never be freed
        if _memory(tensor) not in seen:
            seen.add(_memory(tensor))
            alive.append(kept)
            saved[-1] += tensor.untyped_storage().nbytes()
        return kept

    for program in programs:
        saved.append(0)
        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            values = program(values, inputs)
        sent.append(sum(value.numel() * value.itemsize for value in _tensors(values)))
    return saved, sent


def _memory(tensor: Tensor) -> int:
    """What tells pieces of memory apart."""
    return tensor.untyped_storage().data_ptr()


def _times(module: nn.Module, programs: Sequence[StageProgram], inputs: Sequence[Tensor]) -> list[tuple[float, float]]:
    """Seconds of forward and backward by layer."""
    forward, graphs = [], []
    values: tuple[Any, ...] = ()
    for program in programs:
        # Each layer has a graph of its own, or the gradient of a value that skips layers would go through them too.
        leaves = pytree.tree_map_only(Tensor, _leaf, values)
        # A layer may change in place what it is given, which no leaf allows.
        given = pytree.tree_map_only(Tensor, Tensor.clone, leaves)
        began = _now(inputs)
        values = program(given, inputs)
        forward.append(_now(inputs) - began)
        parameters = [module.get_parameter(name) for name in program.parameters]
        sources = [tensor for tensor in (*_tensors(leaves), *parameters) if tensor.requires_grad]
        graphs.append((sources, [tensor for tensor in _tensors(values) if tensor.requires_grad]))
    backward = []
    while graphs:
        sources, results = graphs.pop()
        seconds = 0.0
        if sources and results:
            gradients = [torch.ones_like(tensor) for tensor in results]
            began = _now(inputs)
            torch.autograd.grad(results, sources, gradients, allow_unused=True)
            seconds = _now(inputs) - began
        backward.append(seconds)
    return list(zip(forward, reversed(backward), strict=True))


def _leaf(value: Tensor) -> Tensor:
    """The value without its past."""
    return value.detach().requires_grad_(value.requires_grad)


def _tensors(values: Any) -> list[Tensor]:
    """The tensors among values."""
    return [value for value in pytree.tree_leaves(values) if isinstance(value, Tensor)]


def _now(inputs: Sequence[Tensor]) -> float:
    """The time, once the devices in use have nothing left to do."""
    for device in {tensor.device for tensor in inputs if tensor.is_cuda}:
        torch.cuda.synchronize(device)
    return time.perf_counter()
