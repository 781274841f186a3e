"""Any module as a chain of layers, at whose borders it can be cut into stages."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, fx, nn

from ringstrategy.pipeline.calls import Call
from ringstrategy.pipeline.tracer import LeafTracer, is_hooked

__all__ = ["Anchor", "Layer", "Trace", "Traces", "common_layers", "find_module", "split_layers", "trace"]

# So many traces are no longer a few modes and shapes of calls.
_MANY_TRACES = 16

# Target of a called submodule, and its how manieth call it is: the same place in every trace of a module.
Anchor = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Layer:
    """What is never cut: a called submodule and the operations up to the next one.

    Attributes:
        name: for people, e.g. ``"layer1.0.conv1"``.
        anchor: the submodule and its how manieth call in the forward it is, from 0.
        parameters: names within the module of the parameters that are used; tied ones by their first name.
        buffers: the same for buffers.
    """

    name: str
    anchor: Anchor
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Trace:
    """A module's forward, as it is for one call and one state of the training flags.

    Attributes:
        module: the module.
        call: the call.
        layers: the layers in the order in which they run.
        nodes: the operations of each layer.
        output: the node of the result.
        constants: tensors that the forward makes from nothing, by target of ``get_attr`` nodes.
    """

    module: nn.Module
    call: Call
    layers: tuple[Layer, ...]
    nodes: tuple[tuple[fx.Node, ...], ...] = field(repr=False)
    output: fx.Node = field(repr=False)
    constants: dict[str, Tensor] = field(repr=False)

    @property
    def inputs(self) -> tuple[fx.Node, ...]:
        """The tensors of the call."""
        return tuple(node for node in self.output.graph.nodes if node.op == "placeholder")


def find_module(lightning_module: pl.LightningModule, attribute: str | None = None) -> tuple[str, nn.Module]:
    """The module that is cut into stages.

    Args:
        lightning_module: the user's module.
        attribute: name of the submodule, dotted if it lies deeper. ``None``: the only child that has parameters and
            can be called, else the LightningModule itself if it has a ``forward``.

    Returns:
        Name and module; the name of the LightningModule itself is empty.

    Raises:
        ValueError: there is no such submodule, or no single candidate.
    """
    children = {
        name: child
        for name, child in lightning_module.named_children()
        if _can_be_called(child) and next(child.parameters(), None) is not None
    }
    name = type(lightning_module).__name__
    candidates = f"submodules with parameters: {', '.join(children) or 'none'}"
    for child_name, child in lightning_module.named_children():
        if hasattr(child, "_orig_mod") and attribute in (None, child_name):
            raise ValueError(f"{name}.{child_name} is compiled, and cannot be cut into stages: leave out torch.compile")
    if attribute is not None:
        try:
            found = lightning_module.get_submodule(attribute)
        except AttributeError as error:
            raise ValueError(f"{name} has no submodule {attribute!r}; {candidates}") from error
        if not _can_be_called(found):
            raise ValueError(f"{name}.{attribute} has no forward, so it cannot be cut into stages; {candidates}")
        return attribute, found
    if len(children) == 1:
        return next(iter(children.items()))
    if type(lightning_module).forward is not pl.LightningModule.forward:
        return "", lightning_module
    raise ValueError(
        f"which module of {name} to cut into stages is not clear ({candidates}): name it, e.g. module="
        f'"{next(iter(children), "net")}", or define {name}.forward'
    )


def trace(module: nn.Module, call: Call, anchors: Iterable[Anchor] = ()) -> Trace:
    """Find the layers of a module, in its present state of training or evaluation.

    Args:
        module: any module; it is left as it is.
        call: how it is called.
        anchors: where it is cut already.

    Returns:
        Its operations, by layer.

    Raises:
        UntraceableError: a ValueError that names the line of ``forward`` that cannot be traced, and the remedy.
    """
    tracer = LeafTracer(module, call, (target for target, _ in anchors))
    graph = tracer.run()
    groups: list[list[fx.Node]] = [[]]
    found: list[Anchor] = []
    calls: dict[str, int] = {}
    output = graph.output_node()
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr", "output"):
            continue  # there wherever they are used
        if node.op == "call_module":
            target = str(node.target)
            found.append((target, calls.get(target, 0)))
            calls[target] = found[-1][1] + 1
            if len(found) > 1:
                groups.append([])
        groups[-1].append(node)
    layers = []
    for number, ((target, nth), nodes) in enumerate(zip(found or [("", 0)], groups, strict=True)):
        parameters, buffers = used_state(module, nodes if number < len(groups) - 1 else [*nodes, output])
        name = f"{target} (call {nth + 1})" if nth else target
        layers.append(Layer(name or type(module).__name__, (target, nth), parameters, buffers))
    return Trace(module, call, tuple(layers), tuple(map(tuple, groups)), output, tracer.constants)


class Traces:
    """The traces of a module: one per call and state of the training flags, made when it is first needed.

    Args:
        module: the module.
        anchors: where it is cut already.
    """

    def __init__(self, module: nn.Module, anchors: Iterable[Anchor] = ()) -> None:
        self._module = module
        self._anchors = tuple(anchors)
        self._traces: dict[tuple[Call, tuple[int, ...]], Trace] = {}

    def get(self, call: Call) -> Trace:
        """The trace for a call of the module as it is now; the same object for the same state.

        Raises:
            UntraceableError: see :func:`trace`.
        """
        key = (call, self._state())
        if key not in self._traces:
            self._traces[key] = trace(self._module, call, self._anchors)
            if len(self._traces) == _MANY_TRACES:
                rank_zero_warn(
                    f"{type(self._module).__name__} has been traced {_MANY_TRACES} times, once for each set of "
                    "arguments that are no tensors. If one of them is another number at each step, make it a tensor."
                )
        return self._traces[key]

    def _state(self) -> tuple[int, ...]:
        """All that a trace depends on besides the call: the submodules, their flags of training and their hooks."""
        state: list[int] = []
        waiting = [self._module]
        while waiting:
            module = waiting.pop()
            state += (id(module), module.training, is_hooked(module))
            waiting += [child for child in module._modules.values() if child is not None]
        return tuple(state)


def common_layers(traces: Sequence[Trace]) -> tuple[Layer, ...]:
    """The layers at which every one of several traces of a module can be cut.

    Args:
        traces: e.g. one of training and one of evaluation, where a network has auxiliary heads only in training.

    Returns:
        The longest chain of anchors that occur in all traces in the same order. What lies between them goes with the
        layer before, in parameters and buffers too.
    """
    places = [{layer.anchor: place for place, layer in enumerate(trace.layers)} for trace in traces]
    shared = [layer.anchor for layer in traces[0].layers if all(layer.anchor in known for known in places)]
    # Longest chain that ascends in all traces at once: `best[i]` is one that ends with shared[i].
    best: list[list[Anchor]] = []
    for anchor in shared:
        before = [chain for chain in best if all(known[chain[-1]] < known[anchor] for known in places)]
        best.append([*max(before, key=len, default=[]), anchor])
    chain = max(best, key=len, default=[traces[0].layers[0].anchor])
    groups = [split_layers(trace, chain[1:]) for trace in traces]
    merged = []
    for number, anchor in enumerate(chain):
        members = [trace.layers[place] for trace, group in zip(traces, groups, strict=True) for place in group[number]]
        merged.append(
            Layer(
                name=next(layer.name for layer in members if layer.anchor == anchor),
                anchor=anchor,
                parameters=_union(layer.parameters for layer in members),
                buffers=_union(layer.buffers for layer in members),
            )
        )
    return tuple(merged)


def split_layers(trace: Trace, anchors: Sequence[Anchor]) -> tuple[range, ...]:
    """Split the layers of a trace before each of the given ones.

    Args:
        trace: the trace.
        anchors: of the first layer of every part but the first, in order.

    Returns:
        Numbers of the layers, by part.

    Raises:
        ValueError: an anchor does not occur in the trace, or not in this order.
    """
    places = {layer.anchor: place for place, layer in enumerate(trace.layers)}
    name = type(trace.module).__name__
    for target, nth in anchors:
        if (target, nth) not in places:
            raise ValueError(
                f"{name} cannot be cut before call {nth + 1} of {target!r}: with these arguments and flags of training "
                "its forward does not contain that call; cut at layers that all its traces have in common"
            )
    starts = [0, *(places[anchor] for anchor in anchors), len(trace.layers)]
    for left, right, (target, _) in zip(starts, starts[1:], anchors, strict=False):
        if left >= right:
            raise ValueError(f"{name} cannot be cut before {target!r}: nothing is left for the stage before it")
    return tuple(range(left, right) for left, right in itertools.pairwise(starts))


def state_names(module: nn.Module) -> tuple[dict[int, str], dict[int, str]]:
    """Names of parameters and of buffers by identity; of several names the first, as in ``named_parameters``."""
    return (
        {id(parameter): name for name, parameter in module.named_parameters()},
        {id(buffer): name for name, buffer in module.named_buffers()},
    )


def used_state(module: nn.Module, nodes: Iterable[fx.Node]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of the parameters and of the buffers that operations of a module's trace use.

    Args:
        module: the traced module.
        nodes: the operations.

    Returns:
        The names, tied ones by the first of their names, in the order of use.
    """
    parameters, buffers = state_names(module)
    found: list[int] = []
    for node in nodes:
        for used in (node, *(argument for argument in node.all_input_nodes if argument.op == "get_attr")):
            if used.op not in ("call_module", "get_attr"):
                continue
            value = find_attribute(module, str(used.target))
            found += [id(value)]
            if isinstance(value, nn.Module):
                found += [id(tensor) for tensor in (*value.parameters(), *value.buffers())]
    return _union([[parameters[key] for key in found if key in parameters]]), _union(
        [[buffers[key] for key in found if key in buffers]]
    )


def find_attribute(module: nn.Module, target: str) -> Any:
    """What a dotted name stands for in a module; the module itself for the empty name, ``None`` for an unknown one."""
    value: Any = module
    for name in target.split(".") if target else ():
        value = getattr(value, name, None)
    return value


def _can_be_called(module: nn.Module) -> bool:
    """Whether a module has a ``forward``; a ModuleList has none."""
    return getattr(type(module), "forward", None) not in (None, nn.Module.forward)


def _union(groups: Iterable[Iterable[str]]) -> tuple[str, ...]:
    """All names once, in order."""
    return tuple(dict.fromkeys(name for group in groups for name in group))
