"""What running a module's Python code changes besides its result: attributes, states of generators, the grad mode."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

__all__ = ["SideEffects", "unchanged_buffers"]

_MISSING = object()
_CONTAINERS = (dict, list, set)


class SideEffects:
    """Remembers how things are, to tell later what has changed, and to change it back.

    Attributes are compared by identity, and those that are plain dicts, lists or sets (parameters, buffers and
    submodules among them) also entry by entry.

    Args:
        module: its attributes and those of its submodules are watched; the random generators are those of Python,
            NumPy and torch.
    """

    def __init__(self, module: nn.Module) -> None:
        self._attributes = [(child, dict(vars(child)), _contents(child)) for child in module.modules()]
        self._random = _random_states()
        self._grad_enabled = torch.is_grad_enabled()

    def undo(self) -> str:
        """Put everything back.

        Returns:
            What had changed, as a verb phrase such as ``"sets Net.steps"``; empty if nothing had.
        """
        phrases = []
        if names := sorted(name for child, *before in self._attributes for name in _restore(child, *before)):
            phrases.append(f"sets {', '.join(names)}")
        if not _equal(self._random, _random_states()):
            _set_random_states(*self._random)
            phrases.append("draws random numbers")
        if torch.is_grad_enabled() != self._grad_enabled:
            torch.set_grad_enabled(self._grad_enabled)
            phrases.append("switches gradients on or off")
        return " and ".join(phrases)


@contextlib.contextmanager
def unchanged_buffers(module: nn.Module) -> Iterator[None]:
    """Whatever runs within, the module's buffers have their old values afterwards."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)


def _contents(module: nn.Module) -> dict[str, Any]:
    """Copies of a module's attributes that are plain containers."""
    return {name: value.copy() for name, value in vars(module).items() if type(value) in _CONTAINERS}


def _restore(module: nn.Module, attributes: dict[str, Any], contents: dict[str, Any]) -> list[str]:
    """Restore a module's attributes; return the names of those that were changed."""
    now = vars(module)
    changed = {
        name for name in now.keys() | attributes.keys() if now.get(name, _MISSING) is not attributes.get(name, _MISSING)
    }
    for name, copy in contents.items():
        value = attributes[name]
        if not _same_entries(value, copy):
            changed.add(name)
            value.clear()
            value.extend(copy) if isinstance(value, list) else value.update(copy)
    if changed:
        now.clear()
        now.update(attributes)
    return [f"{type(module).__name__}.{name}" for name in changed]


def _same_entries(left: Any, right: Any) -> bool:
    """Whether two containers of one type hold the same objects."""
    if len(left) != len(right):
        return False
    if isinstance(left, dict):
        return all(_same(key, other) and left[key] is right[other] for key, other in zip(left, right, strict=True))
    if isinstance(left, list):
        return all(one is other for one, other in zip(left, right, strict=True))
    return bool(left == right)


def _same(key: Any, other: Any) -> bool:
    """Whether two keys of dicts are the same; tensors are compared by identity, as dicts do."""
    return key is other or (not isinstance(key, Tensor) and bool(key == other))


def _random_states() -> tuple[Any, ...]:
    """States of the global generators."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    return random.getstate(), np.random.get_state(), torch.get_rng_state(), cuda


def _set_random_states(python: Any, numpy: Any, cpu: Tensor, cuda: list[Tensor]) -> None:
    """Put the global generators into given states."""
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(cpu)
    if cuda:
        torch.cuda.set_rng_state_all(cuda)


def _equal(left: tuple[Any, ...], right: tuple[Any, ...]) -> bool:
    """Whether two results of :func:`_random_states` are the same."""
    return (
        left[0] == right[0]
        and all(np.array_equal(one, other) for one, other in zip(left[1], right[1], strict=True))
        and torch.equal(left[2], right[2])
        and len(left[3]) == len(right[3])
        and all(map(torch.equal, left[3], right[3]))
    )
