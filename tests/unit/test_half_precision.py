"""Numbers as 16 bits: what a message keeps, and what it may change."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from ringstrategy.collectives.half_precision import (
    Compression,
    MessageLayout,
    add_into,
    decode,
    encode,
    wire_dtype,
)

_COMPRESSIONS: list[Compression] = ["bf16", "fp16"]


@dataclass(frozen=True)
class _Format:
    dtype: torch.dtype
    roundoff: float
    # Below this share of the largest value, fp16 has fewer bits; an error is at most `least` of the largest.
    least: float


_FORMATS = {
    "bf16": _Format(torch.bfloat16, 2.0**-8, 0.0),
    "fp16": _Format(torch.float16, 2.0**-11, 2.0**-39),
}


def _there_and_back(values: Tensor, compression: Compression) -> Tensor:
    dtype = wire_dtype(values.dtype, compression)
    assert dtype is not None
    layout = MessageLayout(values.numel(), 0, 1, dtype)
    (message,) = layout.messages(torch.empty(layout.nbytes(counts=False), dtype=torch.uint8), counts=False)
    encode(values, message)
    back = torch.full_like(values, 7.0)
    decode(message, back)
    added = torch.ones_like(values, dtype=torch.float32)
    add_into(added, message)
    torch.testing.assert_close(added, 1 + back.float(), rtol=0, atol=0, equal_nan=True)
    return back


def _numbers(numel: int, seed: int = 0) -> Tensor:
    """Of both signs, over several orders of magnitude."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(numel, generator=generator) * torch.exp2(torch.randint(-8, 8, (numel,), generator=generator))


@pytest.mark.parametrize("magnitude", [-149, -140, -126, -110, -60, 0, 60, 110, 119])
@pytest.mark.parametrize("compression", _COMPRESSIONS)
def test_changes_no_value_by_more_than_its_unit_roundoff(compression: Compression, magnitude: int) -> None:
    form = _FORMATS[compression]
    # In float64, since 2^-149 is no factor in float32; several segments, the last of them short.
    values = (_numbers(70_001).double() * 2.0**magnitude).float()
    assert values.isfinite().all()
    error = (_there_and_back(values, compression).double() - values.double()).abs()
    largest = float(values.abs().max())
    # A subnormal float32 is itself rounded to a multiple of 2^-149.
    bound = (form.roundoff * values.double().abs()).clamp(min=max(form.least * largest, 2.0**-150))
    assert (error <= bound).all()
    assert error.max() > 0.4 * form.roundoff * largest or magnitude < -130, "it was not rounded at all"


@pytest.mark.parametrize("compression", _COMPRESSIONS)
def test_the_largest_floats_do_not_overflow(compression: Compression) -> None:
    largest = torch.finfo(torch.float32).max
    values = torch.tensor([largest, -largest, largest / 2, 1.0])
    back = _there_and_back(values, compression)
    # Half of it is rounded to 2^127; beside such numbers fp16 has no room for 1.
    assert back[2:].tolist() == [2.0**127, 1.0 if compression == "bf16" else 0.0]
    # The very last floats are nearest to 2^128, which is infinite in float32; those before are not.
    assert back[:2].tolist() == [math.inf, -math.inf]
    near = torch.tensor([largest * (1 - 2.0**-8)])
    assert _there_and_back(near, compression).isfinite().all()


@pytest.mark.parametrize("compression", _COMPRESSIONS)
def test_small_numbers_survive_beside_larger_ones(compression: Compression) -> None:
    values = torch.tensor([1.0, 2.0**-28, 2.0**-38, 1e-9])
    back = _there_and_back(values, compression)
    assert back[:3].tolist() == values[:3].tolist()
    assert back[3] == pytest.approx(1e-9, rel=2.0**-8)
    # fp16 by itself has no number below 2^-24.
    assert values.half()[2] == 0


@pytest.mark.parametrize("compression", _COMPRESSIONS)
def test_what_is_not_finite_stays_visible_and_spoils_nothing_else(compression: Compression) -> None:
    values = torch.tensor([math.inf, 1.5, -math.inf, math.nan, 2.0**-20, 0.0])
    back = _there_and_back(values, compression)
    assert back.isnan().tolist() == values.isnan().tolist()
    finite = ~values.isnan()
    assert back[finite].tolist() == values[finite].tolist()


@pytest.mark.parametrize("values", [[], [0.0], [0.0, -0.0], [math.nan], [-math.inf] * 3])
@pytest.mark.parametrize("compression", _COMPRESSIONS)
def test_nothing_finite_or_nothing_at_all(compression: Compression, values: list[float]) -> None:
    given = torch.tensor(values)
    torch.testing.assert_close(_there_and_back(given, compression), given, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("compression", _COMPRESSIONS)
def test_what_has_16_bits_travels_as_it_is(compression: Compression, dtype: torch.dtype) -> None:
    values = torch.cat([_numbers(100), torch.tensor([0.0, math.inf, 2.0**-24, 60000.0])]).to(dtype)
    assert wire_dtype(dtype, compression) == dtype
    assert torch.equal(_there_and_back(values, compression), values)


def test_types() -> None:
    assert wire_dtype(torch.float32, "bf16") == wire_dtype(torch.complex64, "bf16") == torch.bfloat16
    assert wire_dtype(torch.float32, "fp16") == torch.float16
    assert wire_dtype(torch.float64, "fp16") is wire_dtype(torch.complex128, "bf16") is None
    for dtype in (torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn):
        with pytest.raises(TypeError, match=r"compression='bf16' is for gradients in floating point.*compression=None"):
            wire_dtype(dtype, "bf16")


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize(("numel", "exact"), [(0, 0), (1, 0), (3, 3), (10, 3), (1000, 1), (1001, 17)])
def test_messages_cover_the_buffer_once_and_do_not_overlap(ranks: int, numel: int, exact: int) -> None:
    layout = MessageLayout(numel, exact, ranks, torch.float16)
    shards = layout.shards
    assert [index for start, stop in shards for index in range(start, stop)] == list(range(numel - exact))
    for counts in (True, False):
        memory = torch.zeros(ranks * layout.nbytes(counts), dtype=torch.uint8)
        messages = layout.messages(memory, counts)
        for number, (message, (start, stop)) in enumerate(zip(messages, shards, strict=True)):
            assert message.values.numel() == stop - start
            assert message.counts.numel() == exact * counts
            message.factor.fill_(number + 1)
            message.counts.fill_(number + 2)
            message.values.fill_(number + 3)
        for number, message in enumerate(messages):
            got = itertools.chain(message.factor.tolist(), message.counts.tolist(), message.values.tolist())
            assert set(got) <= {number + 1, number + 2, number + 3}
        assert layout.nbytes(counts) <= 4 + 4 * exact * counts + 2 * -(-(numel - exact) // ranks) + 15


def test_a_rank_reads_what_others_wrote_about_its_shard() -> None:
    layout = MessageLayout(11, 2, 4, torch.bfloat16)  # shards of 3, 2, 2 and 2
    size = layout.nbytes(counts=True)
    for rank in range(4):
        memory = torch.zeros(4 * size, dtype=torch.uint8)
        for sender in range(4):
            outgoing = torch.zeros(4 * size, dtype=torch.uint8)
            message = layout.messages(outgoing, counts=True)[rank]
            message.values.fill_(sender + 1)
            message.counts.fill_(sender)
            memory[sender * size : (sender + 1) * size] = outgoing[rank * size : (rank + 1) * size]
        for sender, message in enumerate(layout.copies(memory, rank)):
            assert message.values.tolist() == [sender + 1] * (3 if rank == 0 else 2)
            assert message.counts.tolist() == [sender] * 2
