"""What ranks decide from the lengths of their dataloaders, and how it is said."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from ringstrategy import PipelineStrategy, RingDDPStrategy
from ringstrategy.uneven.idle import neutral
from ringstrategy.uneven.lengths import Agreement, Length, Uneven, UnevenData, agree_on, more_text


def _known(*lengths: int) -> list[Length]:
    return [Length(batches, certain=True) for batches in lengths]


UNKNOWN = Length(None, certain=False)
AS_IS = Agreement(watched=False)


@pytest.mark.parametrize("uneven", ["error", "stop", "join"])
@pytest.mark.parametrize(("lengths", "limit"), [
    (_known(5, 5, 5), 1.0), (_known(16, 8), 8), (_known(16, 17), 0.5), (_known(0, 0), 1.0),
])  # fmt: skip
def test_equal_lengths_are_left_alone(lengths: list[Length], limit: float, uneven: Uneven) -> None:
    assert agree_on(lengths, uneven, limit) == AS_IS


@pytest.mark.parametrize(("uneven", "length"), [("stop", 8), ("join", 16)])
@pytest.mark.parametrize("limit", [1.0, 9, 0.5])
def test_unequal_lengths_become_one(limit: float, uneven: Uneven, length: int) -> None:
    """The Trainer limits it further, on all ranks alike."""
    assert agree_on(_known(16, 8, 12), uneven, limit) == Agreement(watched=True, batches=length)


def test_unequal_lengths_are_an_error_with_all_of_them() -> None:
    with pytest.raises(UnevenData, match=r"has 8 \(ranks 1, 3\), 12 \(rank 2\), 16 \(rank 0\) batches.*uneven='stop'"):
        agree_on(_known(16, 8, 12, 8), "error", 1.0)


@pytest.mark.parametrize("uneven", ["error", "stop", "join"])
@pytest.mark.parametrize("lengths", [[UNKNOWN, UNKNOWN], [*_known(4), UNKNOWN]])
def test_unknown_lengths_are_watched(lengths: list[Length], uneven: Uneven) -> None:
    assert agree_on(lengths, uneven, 1.0) == Agreement(watched=True)


@pytest.mark.parametrize("uneven", ["error", "stop", "join"])
def test_a_stream_that_says_its_length_is_watched(uneven: Uneven) -> None:
    assert agree_on([Length(4, certain=False)] * 2, uneven, 1.0) == Agreement(watched=True, batches=4)


def test_the_error_names_ranks_and_batches() -> None:
    text = more_text([1, 0, 1, 0], 8, "train, epoch 1, step 23")
    assert text.startswith(
        "ranks 1, 3 ran out of training batches after 8 of them (train, epoch 1, step 23), while ranks 0, 2 had more. "
    )


@pytest.mark.parametrize("strategy", [RingDDPStrategy, PipelineStrategy])
@pytest.mark.parametrize("uneven", ["raise", "", None, True])
def test_unknown_ways(uneven: Any, strategy: Any) -> None:
    with pytest.raises(ValueError, match=r"uneven=.* is unknown; choose one of 'error', 'stop', 'join'"):
        strategy(uneven=uneven)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
@pytest.mark.parametrize(("operation", "combine"), [
    ("sum", torch.add), ("mean", torch.add), (dist.ReduceOp.SUM, torch.add), ("MAX", torch.maximum),
    (dist.ReduceOp.MAX, torch.maximum), ("min", torch.minimum), (dist.ReduceOp.MIN, torch.minimum),
    ("product", torch.mul), (dist.ReduceOp.PRODUCT, torch.mul),
])  # fmt: skip
def test_neutral_values_change_nothing(operation: Any, combine: Any, dtype: torch.dtype) -> None:
    values = torch.tensor([0, 1, 1]).to(dtype) if dtype == torch.bool else torch.tensor([0, 3, 200]).to(dtype)
    own = torch.tensor([float("nan"), 1, 2]).to(dtype) if dtype.is_floating_point else values.flip(0)
    assert torch.equal(combine(values, neutral(own, operation)), values)
