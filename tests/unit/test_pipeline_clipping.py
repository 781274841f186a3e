"""Clipping over stages is that of torch on the whole model."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from ringstrategy.pipeline.clipping import Combine, clip_grad_norm_
from tests.helpers.stage_threads import run_stage_threads

_NORMS = [2.0, 1.0, 3.5, 0.5, 0.0, -1.0, math.inf, -math.inf]


def _parameters(seed: int, shapes: Sequence[Sequence[int]], dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    """Parameters with gradients; a negative size stands for one without."""
    generator = torch.Generator().manual_seed(seed)
    parameters = []
    for shape in shapes:
        sizes = [abs(size) for size in shape]
        parameter = nn.Parameter(torch.zeros(sizes, dtype=dtype))
        if min(shape, default=0) >= 0:
            parameter.grad = (torch.randn(sizes, generator=generator, dtype=torch.float64) * 3).to(dtype)
        parameters.append(parameter)
    return parameters


def _copies(parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    copies = []
    for parameter in parameters:
        copy = nn.Parameter(parameter.detach().clone())
        copy.grad = None if parameter.grad is None else parameter.grad.clone()
        copies.append(copy)
    return copies


def _clip(stages: Sequence[Sequence[nn.Parameter]], max_norm: float, p: float) -> list[Tensor]:
    """Each stage clips its own; what each was told."""

    def work(stage: int, combine: Combine) -> Tensor:
        return clip_grad_norm_(iter(stages[stage]), max_norm, p, counts=lambda _: True, combine=combine)

    return run_stage_threads(len(stages), work)


def _assert_same_gradients(ours: Sequence[nn.Parameter], theirs: Sequence[nn.Parameter]) -> None:
    torch.testing.assert_close([one.grad for one in ours], [one.grad for one in theirs], rtol=1e-14, atol=0.0)


@pytest.mark.parametrize("p", _NORMS)
@pytest.mark.parametrize("max_norm", [0.7, 1e4], ids=["clips", "leaves"])
def test_as_torch_on_the_whole(p: float, max_norm: float) -> None:
    # The second stage has no parameter, the third none with a gradient, as one whose layers are frozen.
    stages = [_parameters(1, [[4, 3], [3], [-2]]), [], _parameters(2, [[-5]]), _parameters(3, [[7], [], [2, 2]])]
    whole = _copies([parameter for stage in stages for parameter in stage])
    expected = nn.utils.clip_grad_norm_(whole, max_norm, p)
    totals = _clip(stages, max_norm, p)
    torch.testing.assert_close([totals[0], totals[2], totals[3]], [expected] * 3, rtol=1e-14, atol=0.0)
    torch.testing.assert_close(totals[1], expected.float())
    _assert_same_gradients([parameter for stage in stages for parameter in stage], whole)


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.lists(st.lists(st.integers(-2, 4).filter(bool), max_size=2), max_size=3), min_size=1, max_size=4),
    st.sampled_from(_NORMS),
    st.integers(0, 100),
)
def test_any_distribution_over_stages(shapes: list[list[list[int]]], p: float, seed: int) -> None:
    stages = [_parameters(seed + stage, own) for stage, own in enumerate(shapes)]
    whole = _copies([parameter for stage in stages for parameter in stage])
    expected = nn.utils.clip_grad_norm_(whole, 0.5, p)
    for total in _clip(stages, 0.5, p):
        torch.testing.assert_close(total.double(), expected.double(), rtol=1e-6, atol=0.0)
    _assert_same_gradients([parameter for stage in stages for parameter in stage], whole)


def test_a_parameter_of_two_stages_counts_once_and_is_scaled_on_both() -> None:
    first, (tied,), last = _parameters(1, [[3]]), _parameters(2, [[4, 2]]), _parameters(3, [[5]])
    (copy,) = _copies([tied])
    whole = _copies([*first, tied, *last])
    expected = nn.utils.clip_grad_norm_(whole, 0.1)

    def work(stage: int, combine: Combine) -> Tensor:
        own = [[*first, tied], [copy], [*last]][stage]
        return clip_grad_norm_(own, 0.1, counts=lambda parameter: parameter is not copy, combine=combine)

    # The middle stage has nothing that counts, and scales in double precision all the same.
    torch.testing.assert_close(run_stage_threads(3, work), [expected] * 3, rtol=1e-14, atol=0.0)
    _assert_same_gradients([*first, tied, *last], whole)
    _assert_same_gradients([copy], [whole[1]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("foreach", [None, False])
def test_other_dtypes_keep_torchs_type_of_the_norm(dtype: torch.dtype, foreach: bool | None) -> None:
    stages = [_parameters(1, [[30], [4, 4]], dtype), _parameters(2, [[50]], dtype)]
    whole = _copies([parameter for stage in stages for parameter in stage])
    expected = nn.utils.clip_grad_norm_(whole, 1.0, foreach=foreach)

    def work(stage: int, combine: Combine) -> Tensor:
        return clip_grad_norm_(stages[stage], 1.0, counts=lambda _: True, combine=combine, foreach=foreach)

    # One rounding of the norm, and one of the product.
    torch.testing.assert_close(run_stage_threads(2, work), [expected] * 2)
    ours = [parameter.grad for stage in stages for parameter in stage]
    torch.testing.assert_close(ours, [parameter.grad for parameter in whole])


@pytest.mark.parametrize("where", [0, 1])
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("p", [2.0, 1.0, math.inf, -math.inf])
def test_one_stage_spoils_the_norm_of_all_as_in_torch(p: float, value: float, where: int) -> None:
    stages = [_parameters(1, [[4], [3]]), _parameters(2, [[5]])]
    spoilt = stages[where][0].grad
    assert spoilt is not None
    spoilt[1] = value
    whole = _copies([parameter for stage in stages for parameter in stage])
    expected = nn.utils.clip_grad_norm_(whole, 1.0, p)
    totals = _clip(stages, 1.0, p)
    torch.testing.assert_close(totals, [expected] * 2, rtol=1e-14, atol=0.0, equal_nan=True)
    ours = [parameter.grad for stage in stages for parameter in stage]
    theirs = [parameter.grad for parameter in whole]
    torch.testing.assert_close(ours, theirs, rtol=1e-14, atol=0.0, equal_nan=True)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_every_stage_raises_if_asked_to_and_touches_nothing(value: float) -> None:
    stages = [_parameters(1, [[4]]), _parameters(2, [[5]]), []]
    spoilt = stages[1][0].grad
    assert spoilt is not None
    spoilt[0] = value
    before = _copies([*stages[0], *stages[1]])

    def work(stage: int, combine: Combine) -> str:
        with pytest.raises(RuntimeError, match=r"norm of order 2.0 of all stages' gradients is (nan|inf)") as caught:
            clip_grad_norm_(stages[stage], 1.0, counts=lambda _: True, combine=combine, error_if_nonfinite=True)
        return str(caught.value)

    assert len(set(run_stage_threads(3, work))) == 1
    for ours, theirs in zip([*stages[0], *stages[1]], before, strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0.0, atol=0.0, equal_nan=True)


@pytest.mark.parametrize("p", _NORMS)
def test_without_any_gradient_the_norm_is_zero(p: float) -> None:
    assert nn.utils.clip_grad_norm_(_parameters(1, [[-3]]), 1.0, p) == 0
    assert _clip([_parameters(1, [[-3]]), []], 1.0, p) == [torch.tensor(0.0)] * 2
