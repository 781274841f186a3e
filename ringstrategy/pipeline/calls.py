"""The arguments of a call: tensors apart from everything else."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

__all__ = ["Call", "Example", "flatten_call"]

# Values of these types are written into a trace as they are: they cannot change behind its back.
_CONSTANTS = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    enum.Enum,
    range,
    slice,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)


@dataclass(frozen=True, slots=True)
class Call:
    """How a module was called, but for the tensors: two equal calls run the same operations.

    Attributes:
        spec: the structure of ``(args, kwargs)``.
        leaves: type and value of every leaf in order; ``(Tensor, None)`` for a tensor. The type is there because
            ``1``, ``1.0`` and ``True`` are equal.
    """

    spec: pytree.TreeSpec
    leaves: tuple[tuple[type, Any], ...]

    @property
    def tensors(self) -> int:
        """Number of tensors among the arguments."""
        return sum(kind is Tensor for kind, _ in self.leaves)

    def restore(self, tensors: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments as they were, with ``tensors`` in the places of the tensors.

        Args:
            tensors: one value per tensor, in the order of :func:`flatten_call`.

        Returns:
            Positional and keyword arguments.

        Raises:
            ValueError: another number of tensors.
        """
        if len(tensors) != self.tensors:
            raise ValueError(f"the call has {self.tensors} tensors, not {len(tensors)}")
        remaining = iter(tensors)
        leaves = [next(remaining) if kind is Tensor else value for kind, value in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return args, kwargs


@dataclass(frozen=True)
class Example:
    """Arguments of the pipelined module.

    Attributes:
        tensors: those among them, flattened.
        call: all the rest.
    """

    tensors: list[Tensor]
    call: Call


def flatten_call(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Tensor], Call]:
    """Take the tensors out of a call's arguments.

    Args:
        args: positional arguments; tensors and constants, also within tuples, lists, dicts and named tuples.
        kwargs: keyword arguments.

    Returns:
        The tensors in order, and all the rest.

    Raises:
        TypeError: a value that is neither a tensor nor a constant.
    """
    values, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
    tensors: list[Tensor] = []
    leaves: list[tuple[type, Any]] = []
    for position, value in enumerate(values):
        if isinstance(value, Tensor):
            tensors.append(value)
            leaves.append((Tensor, None))
        elif isinstance(value, _CONSTANTS):
            leaves.append((type(value), value))
        else:
            where = _where(args, kwargs, position)
            raise TypeError(
                f"{where} of the pipelined module is of type {type(value).__name__}; stages can be given tensors, "
                "numbers, strings and None, also within tuples, lists and dicts"
            )
    return tensors, Call(spec, tuple(leaves))


def _where(args: Sequence[Any], kwargs: Mapping[str, Any], position: int) -> str:
    """Name the leaf at ``position``."""
    path = pytree.tree_flatten_with_path((tuple(args), dict(kwargs)))[0][position][0]
    _, argument, *rest = (str(key) for key in path)
    return f"argument {argument.strip('[]')}" + "".join(rest)
