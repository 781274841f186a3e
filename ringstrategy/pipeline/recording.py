"""What torch.fx passes over in silence, recorded: functions with their own backward, contexts, changed buffers."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from ringstrategy.pipeline.traced_values import IN_PLACE_OPERATORS, is_value

__all__ = ["record_assignments", "record_contexts", "record_functions"]


@contextlib.contextmanager
def record_functions(tracer: fx.Tracer) -> Iterator[None]:
    """Record calls of ``autograd.Function``: looking into their forward would lose their backward."""
    original = vars(torch.autograd.Function)["apply"]

    def apply(function: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        if not any(map(is_value, pytree.tree_leaves((args, kwargs)))):
            return original.__get__(None, function)(*args, **kwargs)
        return tracer.create_proxy("call_function", _Apply(function), args, kwargs)

    torch.autograd.Function.apply = classmethod(apply)
    try:
        yield
    finally:
        torch.autograd.Function.apply = original


class _Apply:
    """Calls an ``autograd.Function``."""

    def __init__(self, function: type[torch.autograd.Function]) -> None:
        self._function = function
        self.__name__ = function.__name__

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self._function.apply(*args, **kwargs)


@contextlib.contextmanager
def record_contexts(stack: list[Callable[[], Any]]) -> Iterator[None]:
    """Keep in ``stack`` how to open again the contexts that are open and change what operations do."""
    again: dict[type, Callable[[Any], Callable[[], Any]]] = {
        torch.no_grad: lambda context: torch.no_grad,
        torch.enable_grad: lambda context: torch.enable_grad,
        torch.set_grad_enabled: lambda context: functools.partial(torch.set_grad_enabled, context.mode),
        torch.inference_mode: lambda context: functools.partial(torch.inference_mode, context.mode),
        torch.autocast: lambda context: functools.partial(
            torch.autocast, context.device, context.fast_dtype, context._enabled, context._cache_enabled
        ),
    }
    with contextlib.ExitStack() as patches:
        for kind, describe in again.items():
            patches.enter_context(_record_context(kind, describe, stack))
        yield


@contextlib.contextmanager
def _record_context(
    kind: Any, describe: Callable[[Any], Callable[[], Any]], stack: list[Callable[[], Any]]
) -> Iterator[None]:
    """Keep in ``stack`` which contexts of one class are open."""
    enter, leave = kind.__enter__, kind.__exit__

    def enter_recorded(context: Any) -> Any:
        entered = enter(context)
        stack.append(describe(context))
        return entered

    def leave_recorded(context: Any, *error: Any) -> Any:
        stack.pop()
        return leave(context, *error)

    kind.__enter__, kind.__exit__ = enter_recorded, leave_recorded
    try:
        yield
    finally:
        kind.__enter__, kind.__exit__ = enter, leave


@contextlib.contextmanager
def record_assignments(names: Mapping[Any, str]) -> Iterator[None]:
    """Pass over assignments that change nothing: ``self.steps += 1`` has been recorded as an addition in place.

    Args:
        names: of all submodules.
    """
    assign = nn.Module.__setattr__

    def assign_unless_same(module: nn.Module, name: str, value: Any) -> None:
        if is_value(value) and module in names:
            node = value.node
            path = f"{names[module]}.{name}" if names[module] else name
            source = node.args[0] if node.target in IN_PLACE_OPERATORS else None
            if isinstance(source, fx.Node) and source.op == "get_attr" and source.target == path:
                return
        assign(module, name, value)

    nn.Module.__setattr__ = assign_unless_same  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        nn.Module.__setattr__ = assign  # type: ignore[method-assign]
