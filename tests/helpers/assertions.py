"""Comparisons that the parity tests share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

__all__ = ["assert_close_to_single_process", "assert_ranks_identical"]


def assert_ranks_identical(states: Sequence[Mapping[str, Tensor]]) -> None:
    """Every rank holds the same bits: rank sums are made once and copied, so nothing less will do."""
    assert states, "no rank returned anything"
    first = states[0]
    for rank, state in enumerate(states[1:], start=1):
        assert state.keys() == first.keys(), f"rank {rank} has other names: {state.keys() ^ first.keys()}"
        for name, tensor in state.items():
            assert torch.equal(tensor, first[name]), (
                f"{name} on rank {rank} is off rank 0's by {_largest_difference(tensor, first[name]):.3g}"
            )


def assert_close_to_single_process(
    state: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float = 1e-6
) -> None:
    """The parameters are those of one process on the concatenated batches, up to ``tolerance`` in absolute terms."""
    assert state.keys() == expected.keys(), f"names differ: {state.keys() ^ expected.keys()}"
    for name, tensor in state.items():
        assert tensor.shape == expected[name].shape, f"{name}: {tensor.shape} instead of {expected[name].shape}"
        assert tensor.dtype == expected[name].dtype, f"{name}: {tensor.dtype} instead of {expected[name].dtype}"
        difference = _largest_difference(tensor, expected[name])
        # Written so that a NaN fails.
        assert difference <= tolerance, f"{name} is off by {difference:.3g}, more than {tolerance:g}"


def _largest_difference(one: Tensor, other: Tensor) -> float:
    wide = torch.complex128 if one.is_complex() else torch.float64
    return (one.to(wide) - other.to(wide)).abs().max().item() if one.numel() else 0.0
