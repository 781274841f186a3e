"""A method of a single module, replaced for a while."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

__all__ = ["StandIn"]


class StandIn:
    """Stands in for a method of a module instance. Copies of the module, also unpickled ones, get their class's own.

    Args:
        module: whose method it is.
        name: of the method.
        call: what to do instead.
    """

    def __init__(self, module: nn.Module, name: str, call: Callable[..., Any]) -> None:
        self._module = module
        self._name = name
        # Sockets, threads and traces of its own are nothing for a caller's `torch.compile`.
        self._call = torch.compiler.disable(call)  # type: ignore[no-untyped-call]
        self._before = vars(module).get(name)
        vars(module)[name] = self

    @property
    def own(self) -> Callable[..., Any]:
        """The method of the module's class."""
        return types.MethodType(getattr(type(self._module), self._name), self._module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What a call of the method runs."""
        return self._call(*args, **kwargs)

    def remove(self) -> None:
        """Put back what was there before."""
        if self._before is None:
            vars(self._module).pop(self._name, None)
        else:
            vars(self._module)[self._name] = self._before

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copy = memo[id(self._module)]
        return types.MethodType(getattr(type(copy), self._name), copy)

    def __reduce__(self) -> tuple[Any, ...]:
        # The module exists by then, but has no attributes yet: this finds the class's.
        return getattr, (self._module, self._name)
