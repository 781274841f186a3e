"""Arguments of a call: tensors apart from everything else."""

from __future__ import annotations

import enum
from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor

from ringstrategy.pipeline.calls import flatten_call

Pair = namedtuple("Pair", ["first", "second"])


class Mode(enum.Enum):
    FAST = 1


def _numbers(value: Any) -> Any:
    """The same structure with each tensor replaced by its number."""
    tensors, call = flatten_call((value,), {})
    (args, _) = call.restore([int(tensor) for tensor in tensors])
    return args[0]


def _t(number: int) -> Tensor:
    return torch.tensor(number)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (_t(3), 3),
        ((_t(1), None, _t(2)), (1, None, 2)),
        ([_t(1), [True, _t(2)]], [1, [True, 2]]),
        ({"a": _t(1), "b": {"c": _t(2), "d": "text"}}, {"a": 1, "b": {"c": 2, "d": "text"}}),
        (Pair(_t(1), 2.5), Pair(1, 2.5)),
        (OrderedDict(z=_t(1), a=_t(2)), OrderedDict(z=1, a=2)),
        ((), ()),
        (torch.float16, torch.float16),
        (Mode.FAST, Mode.FAST),
    ],
)
def test_arguments_are_restored(value: Any, expected: Any) -> None:
    restored = _numbers(value)
    assert restored == expected
    assert type(restored) is type(expected)


def test_tensors_come_in_order_of_arguments_then_keywords() -> None:
    tensors, call = flatten_call((_t(1), [_t(2), 7]), {"y": _t(3), "x": None})
    assert [int(tensor) for tensor in tensors] == [1, 2, 3]
    assert call.tensors == 3
    assert call.restore(["a", "b", "c"]) == (("a", ["b", 7]), {"y": "c", "x": None})


def test_tensors_do_not_tell_calls_apart_but_all_else_does() -> None:
    def call(*args: Any, **kwargs: Any) -> Any:
        return flatten_call(args, kwargs)[1]

    assert call(_t(1), 2) == call(torch.zeros(3, 4), 2)
    assert hash(call(_t(1), 2)) == hash(call(torch.zeros(3, 4), 2))
    different = [
        call(_t(1)),
        call(_t(1), 1),
        call(_t(1), True),
        call(_t(1), 1.0),
        call(_t(1), None),
        call(_t(1), _t(1)),
        call(_t(1), x=1),
        call((_t(1),)),
        call([_t(1)]),
        call({"a": _t(1)}),
        call({"b": _t(1)}),
        call(Pair(_t(1), 1)),
        call("1"),
    ]
    assert len(set(different)) == len(different)


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((_t(1), object()), {}, r"argument 1 of the pipelined module is of type object"),
        (([_t(1), {"k": {1, 2}}],), {}, r"argument 0\[1\]\['k'\] .* set"),
        ((), {"sizes": [1, lambda: None]}, r"argument 'sizes'\[1\] .* function"),
    ],
)
def test_what_cannot_be_given_to_stages_is_named(args: Any, kwargs: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        flatten_call(args, kwargs)


def test_a_wrong_number_of_tensors_is_refused() -> None:
    _, call = flatten_call((_t(1), _t(2)), {})
    with pytest.raises(ValueError, match="has 2 tensors, not 1"):
        call.restore([_t(1)])
