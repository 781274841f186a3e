"""Values while a forward is traced, and what Python does with values besides computing."""

from __future__ import annotations

import dis
import itertools
import operator
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from torch import Tensor
from torch.fx.proxy import Attribute, Proxy, TraceError
from torch.utils import _pytree as pytree

__all__ = ["IN_PLACE_OPERATORS", "Assertion", "Input", "Rebuild", "Value", "is_assertion", "is_value"]


# `x += y`, `x[i] = y` and their kin.
IN_PLACE_OPERATORS = frozenset(
    (
        *(operator.iadd, operator.iand, operator.ifloordiv, operator.ilshift, operator.imatmul, operator.imod),
        *(operator.imul, operator.ior, operator.ipow, operator.irshift, operator.isub, operator.itruediv),
        *(operator.ixor, operator.setitem),
    )
)


def is_value(thing: Any) -> bool:
    """Whether ``thing`` stands for a value of the run; ``isinstance`` cannot tell."""
    return issubclass(type(thing), Proxy)


def _guarded_class(value: Any) -> type:
    """What ``isinstance(value, ...)`` looks at, for a value that is known when the model runs only.

    Plain torch.fx answers that no traced value is a tensor, and tracing goes on along the wrong branch. torch itself
    asks too, and gets that answer.
    """
    if _is_torch(sys._getframe(1)):
        return type(value)
    raise TraceError("the type of a traced value decides what is run")


def _class_of_input(value: Any) -> type:
    """The same for an argument, which is certainly a tensor."""
    return type(value) if _is_torch(sys._getframe(1)) else Tensor


def _is_torch(frame: FrameType) -> bool:
    """Whether code of torch runs in ``frame``."""
    return str(frame.f_globals.get("__name__")).startswith("torch.")


def _in_place(function: Callable[[Any, Any], Any]) -> Callable[[Proxy, Any], Proxy]:
    """An operator in place; plain torch.fx takes ``x += y`` for ``x = x + y``, and other names of ``x`` miss it."""
    return lambda value, other: value.tracer.create_proxy("call_function", function, (value, other), {})


class Value(Proxy):
    """A value whose type is not known."""

    __class__ = property(_guarded_class)
    __iadd__, __iand__, __ifloordiv__ = map(_in_place, (operator.iadd, operator.iand, operator.ifloordiv))
    __ilshift__, __imatmul__, __imod__ = map(_in_place, (operator.ilshift, operator.imatmul, operator.imod))
    __imul__, __ior__, __ipow__ = map(_in_place, (operator.imul, operator.ior, operator.ipow))
    __irshift__, __isub__, __itruediv__ = map(_in_place, (operator.irshift, operator.isub, operator.itruediv))
    __ixor__ = _in_place(operator.ixor)

    def __getattr__(self, k: str) -> Attribute:
        return ValueAttribute(self, k)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in ("node", "tracer"):
            raise TraceError(f"the attribute {name!r} of a traced value is set")
        object.__setattr__(self, name, value)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, key, value), {})


class ValueAttribute(Attribute):
    """An attribute of a value."""

    __class__ = property(_guarded_class)
    __iadd__, __isub__, __imul__ = map(_in_place, (operator.iadd, operator.isub, operator.imul))
    __itruediv__ = _in_place(operator.itruediv)
    __setitem__ = Value.__setitem__


class Input(Value):
    """An argument: certainly a tensor."""

    __class__ = property(_class_of_input)


class Assertion:
    """Checks what an ``assert`` of the forward checks; the line is its message."""

    def __init__(self, line: str) -> None:
        self._line = line
        self.__name__ = "assertion"

    def __call__(self, condition: Any) -> None:
        """Check a condition."""
        if not condition:
            raise AssertionError(self._line)


def is_assertion(frame: FrameType) -> bool:
    """Whether Python asks for a truth in ``frame`` because of an ``assert``, which fails if it is false."""
    instructions = [one for one in dis.get_instructions(frame.f_code) if one.opname not in ("TO_BOOL", "NOT_TAKEN")]
    for jump, following in itertools.pairwise(instructions):
        if jump.offset < frame.f_lasti:
            continue
        if "JUMP" not in jump.opname:
            return False
        failing = following
        if jump.opname.endswith("IF_FALSE"):
            failing = next(one for one in instructions if one.offset == jump.argval)
        return failing.opname == "LOAD_ASSERTION_ERROR" or failing.argrepr == "AssertionError"
    return False


class Rebuild:
    """Makes a container of a registered type from its parts."""

    def __init__(self, spec: pytree.TreeSpec) -> None:
        self._spec = spec
        self.__name__ = spec.type.__name__

    def __call__(self, *leaves: Any) -> Any:
        """Put the parts together."""
        return pytree.tree_unflatten(leaves, self._spec)
