"""The plan from parameters to buckets."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ringstrategy.gradients.buckets import BucketPlan, Spec, is_dense, plan_buckets

_DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.complex64]


@st.composite
def _specs(draw: st.DrawFn) -> list[Spec]:
    sizes = draw(st.lists(st.tuples(st.integers(0, 300), st.sampled_from(_DTYPES)), max_size=25))
    return [Spec(index, numel, dtype) for index, (numel, dtype) in enumerate(sizes)]


@given(_specs(), st.integers(0, 25), st.integers(1, 2000), st.integers(1, 2000))
def test_every_gradient_has_one_place(specs: list[Spec], cut: int, cap: int, first_cap: int) -> None:
    plan = plan_buckets([specs[:cut], specs[cut:]], cap, first_cap)
    assert sorted(slot.index for bucket in plan.buckets for slot in bucket.slots) == [spec.index for spec in specs]
    for bucket in plan.buckets:
        assert {specs[slot.index].dtype for slot in bucket.slots} == {bucket.dtype}
        assert [specs[slot.index].numel for slot in bucket.slots] == [slot.numel for slot in bucket.slots]
        assert len({slot.index < cut for slot in bucket.slots}) == 1, "a bucket spans two groups"
        assert bucket.numel == bucket.flags + len(bucket.slots)
        if len(bucket.slots) > 1:
            assert sum(slot.numel for slot in bucket.slots) * bucket.dtype.itemsize <= cap


@given(_specs(), st.integers(1, 2000))
def test_places_do_not_overlap_and_start_on_cache_lines(specs: list[Spec], cap: int) -> None:
    plan = plan_buckets([specs], cap)
    taken = 0
    for bucket in plan.buckets:
        assert bucket.offset % 64 == 0
        assert bucket.offset >= taken
        end = 0
        for slot in bucket.slots:
            assert slot.start * bucket.dtype.itemsize % 64 == 0
            assert slot.start >= end
            end = slot.start + slot.numel
        assert bucket.flags >= end
        taken = bucket.offset + bucket.nbytes
    assert plan.nbytes >= taken


def test_the_first_bucket_is_small_and_a_large_gradient_is_alone() -> None:
    specs = [Spec(i, numel, torch.float32) for i, numel in enumerate([10, 10, 10, 10, 500, 10])]
    plan = plan_buckets([specs], cap_bytes=160, first_cap_bytes=80)
    assert _indices(plan) == [[0, 1], [2, 3], [4], [5]]


def test_buckets_leave_when_their_last_gradient_is_expected() -> None:
    dtypes = [torch.float32, torch.float64, torch.float64, torch.float32]
    plan = plan_buckets([[Spec(i, 4, dtype) for i, dtype in enumerate(dtypes)]], cap_bytes=1000)
    assert _indices(plan) == [[1, 2], [0, 3]]


def test_no_parameters_make_no_buckets() -> None:
    assert plan_buckets([[], []], cap_bytes=1) == BucketPlan((), 0)


@pytest.mark.parametrize(("cap", "first"), [(0, 1), (-1, 1), (1, 0)])
def test_a_cap_must_be_positive(cap: int, first: int) -> None:
    with pytest.raises(ValueError, match="at least one byte"):
        plan_buckets([[Spec(0, 1, torch.float32)]], cap, first)


def test_dense_strides() -> None:
    assert is_dense((), ())
    assert is_dense((2, 3), (3, 1))
    assert is_dense((2, 3), (1, 2))
    assert is_dense((1, 3), (77, 1))
    assert not is_dense((2, 3), (6, 2))
    assert not is_dense((2, 3), (0, 1))
    image = torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert is_dense(image.shape, image.stride())


def _indices(plan: BucketPlan) -> list[list[int]]:
    return [[slot.index for slot in bucket.slots] for bucket in plan.buckets]
