"""Operations that change what they are given."""

from __future__ import annotations

import operator
from collections.abc import Mapping

from torch import fx, nn

from ringstrategy.pipeline.traced_values import IN_PLACE_OPERATORS
from ringstrategy.pipeline.tracing import Trace, find_attribute

__all__ = ["changed_inputs"]

# Their results may share memory with their first argument.
_VIEWS = frozenset(
    (
        *("alias", "as_strided", "broadcast_to", "chunk", "contiguous", "cpu", "cuda", "detach", "diagonal", "double"),
        *("expand", "expand_as", "flatten", "float", "getattr", "getitem", "half", "bfloat16", "imag", "movedim"),
        *("moveaxis", "narrow", "permute", "ravel", "real", "reshape", "reshape_as", "select", "split"),
        *("split_with_sizes", "squeeze", "swapaxes", "swapdims", "t", "tensor_split", "to", "transpose", "type"),
        *("type_as", "unbind", "unflatten", "unfold", "unsqueeze", "view", "view_as"),
    )
)


def changed_inputs(trace: Trace, stages: Mapping[fx.Node, int]) -> dict[fx.Node, int]:
    """The tensors of the call that operations in place may change, and the first stage that does."""
    changed: dict[fx.Node, int] = {}
    aliases: dict[fx.Node, frozenset[fx.Node]] = {node: frozenset([node]) for node in trace.inputs}
    for node, stage in stages.items():
        shared = frozenset().union(*(aliases.get(argument, frozenset()) for argument in node.all_input_nodes))
        if not shared:
            continue
        in_place = _is_in_place(trace.module, node)
        if in_place:
            for source in shared:
                changed.setdefault(source, stage)
        if in_place or node.op == "call_module" or _name(node) in _VIEWS:
            aliases[node] = shared
    return changed


def _is_in_place(module: nn.Module, node: fx.Node) -> bool:
    """Whether an operation is one that changes its argument."""
    if node.op == "call_module":
        called = find_attribute(module, str(node.target))
        return any(getattr(child, "inplace", False) for child in called.modules())
    name = _name(node)
    return (
        node.target in IN_PLACE_OPERATORS
        or (name.endswith("_") and not name.endswith("__") and getattr(operator, name, None) is not node.target)
        or bool(node.kwargs.get("inplace", False))
        or node.kwargs.get("out") is not None
    )


def _name(node: fx.Node) -> str:
    """Name of a function or method."""
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
