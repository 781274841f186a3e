"""The compressed all-reduce: how far off it is, what it sends, and how it ends."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
from torch import Tensor

from ringstrategy.collectives.compressed import CompressedCollective
from ringstrategy.collectives.half_precision import Compression
from ringstrategy.process_group import RankGroup
from tests.helpers.ranks import run_ranks

_ROUNDOFF = {"bf16": 2.0**-8, "fp16": 2.0**-11}
_COMPRESSIONS: list[Compression] = ["bf16", "fp16"]


@contextlib.contextmanager
def _collective(
    compression: Compression, seconds: float = 20.0, segment_bytes: int = 64 * 1024
) -> Iterator[CompressedCollective]:
    group = RankGroup.connect(torch.device("cpu"), timedelta(seconds=seconds))
    collective = CompressedCollective(group, compression, segment_bytes)
    try:
        yield collective
    finally:
        collective.close()


def _gradients(rank: int, numel: int, magnitude: float) -> Tensor:
    """float32 of both signs, different on every rank and in every element."""
    generator = torch.Generator().manual_seed(1000 + rank)
    spread = torch.exp2(torch.randint(-6, 6, (numel,), generator=generator).double())
    return (torch.randn(numel, generator=generator).double() * spread * magnitude).float()


def _within_the_bound(rank: int, world_size: int, compression: Compression) -> tuple[float, list[Tensor]]:
    """The largest error over the bound, and the bits of the results."""
    worst, results = 0.0, []
    with _collective(compression) as collective:
        # Empty, fewer elements than ranks, uneven, one segment exactly, several; normal, subnormal and huge numbers.
        for magnitude in (1.0, 2.0**-142, 2.0**100):
            for numel in (0, 1, 3, 7, 1000, 16_384, 70_001):
                everyone = [_gradients(other, numel, magnitude) / world_size for other in range(world_size)]
                buffer = collective.allocate(4 * (numel + 2)).view(torch.float32)
                buffer[:numel], buffer[numel:] = everyone[rank], torch.tensor([1.0, float(rank == 1)])
                collective.all_reduce(buffer, exact=2).wait()
                exact = torch.stack(everyone).double()
                mean, mean_of_sizes = exact.sum(0), exact.abs().sum(0)
                error = (buffer[:numel].double() - mean).abs()
                # Each number on the wire is also a float32, which below 2^-126 has steps of 2^-149.
                bound = _ROUNDOFF[compression] * (mean_of_sizes + mean.abs()) + (world_size + 2) * 2.0**-150
                bound *= 1 + world_size * 2.0**-23  # the sum in fp32
                assert (error <= bound).all(), (magnitude, numel)
                worst = max(worst, float((error / bound).max()) if numel else 0.0)
                assert buffer[numel:].tolist() == [world_size, world_size > 1]
                results.append(buffer.clone())
    return worst, results


@pytest.mark.parametrize("world_size", [1, 2, *(pytest.param(ranks, marks=pytest.mark.slow) for ranks in (3, 4, 8))])
@pytest.mark.parametrize("compression", _COMPRESSIONS)
def test_the_error_is_within_the_bound_and_all_ranks_have_the_same_bits(
    compression: Compression, world_size: int
) -> None:
    outcomes = run_ranks(_within_the_bound, world_size, compression, timeout=100)
    for worst, results in outcomes:
        assert 0.3 < worst <= 1.0
        assert all(torch.equal(mine, first) for mine, first in zip(results, outcomes[0][1], strict=True))


def _not_finite(rank: int, world_size: int, compression: Compression) -> list[float]:
    with _collective(compression) as collective:
        buffer = collective.allocate(4 * 6).view(torch.float32)
        buffer.copy_(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 1.0]))
        if rank == 0:
            buffer[0], buffer[3] = math.inf, math.inf
        elif rank == 1:
            buffer[1], buffer[3] = math.nan, -math.inf
        collective.all_reduce(buffer, exact=1).wait()
        return buffer.tolist()


@pytest.mark.parametrize("compression", _COMPRESSIONS)
def test_what_is_not_finite_arrives_and_the_rest_is_right(compression: Compression) -> None:
    for result in run_ranks(_not_finite, 2, compression):
        assert str(result) == str([math.inf, math.nan, 6.0, math.nan, 10.0, 2.0])


def _counts(rank: int, world_size: int, compression: Compression) -> list[list[float]]:
    results = []
    with _collective(compression) as collective:
        # In one scale with the gradients they would vanish beside the first, or have the second vanish.
        for gradient in (2.0**60, 2.0**-60):
            buffer = collective.allocate(4 * 8).view(torch.float32)
            buffer[:4], buffer[4:] = gradient, torch.tensor([1.0, 0.0, 1.0 - rank, 300.0 + rank])
            collective.all_reduce(buffer, exact=4).wait()
            results.append((buffer[:4] / gradient).tolist() + buffer[4:].tolist())
    return results


@pytest.mark.parametrize("compression", _COMPRESSIONS)
def test_counts_are_exact_beside_gradients_of_any_size(compression: Compression) -> None:
    expected = [2.0] * 4 + [2.0, 0.0, 1.0, 601.0]
    assert run_ranks(_counts, 2, compression) == [[expected, expected]] * 2


def _other_types(rank: int, world_size: int) -> dict[str, list[float] | list[complex]]:
    results: dict[str, list[float] | list[complex]] = {}
    with _collective("fp16") as collective:
        for dtype in (torch.float64, torch.complex128, torch.complex64, torch.bfloat16, torch.float16):
            buffer = collective.allocate(5 * dtype.itemsize).view(dtype)
            buffer.copy_(torch.tensor([1.0 + rank, -3.0, 2.0**-10, 1.0 + 2.0**-30, 1.0], dtype=torch.float64))
            if dtype.is_complex:
                buffer *= 1j
            collective.all_reduce(buffer, exact=1).wait()
            results[str(dtype)] = buffer.tolist()
        for dtype in (torch.int64, torch.bool, torch.uint8):
            with pytest.raises(TypeError, match=r"compression='fp16' is for gradients in floating point"):
                collective.all_reduce(collective.allocate(8).view(dtype))
    return results


def test_float64_is_not_compressed_and_integers_are_refused() -> None:
    in_16_bits = [6.0, -9.0, 3 * 2.0**-10, 3.0, 3.0]
    in_full = [6.0, -9.0, 3 * 2.0**-10, 3.0 + 3 * 2.0**-30, 3.0]
    for result in run_ranks(_other_types, 3):
        assert result["torch.float64"] == in_full
        assert result["torch.complex128"] == [1j * number for number in in_full]
        assert result["torch.complex64"] == [1j * number for number in in_16_bits]
        assert result["torch.bfloat16"] == result["torch.float16"] == in_16_bits


def _sent(rank: int, world_size: int, dtype: torch.dtype) -> int:
    with _collective("bf16", segment_bytes=2**20) as collective:
        collective.all_reduce(collective.allocate(world_size * 12_000 * dtype.itemsize).view(dtype)).wait()
        return collective.bytes_sent


@pytest.mark.parametrize("world_size", [2, 3])
def test_half_the_bytes_of_a_ring_are_sent(world_size: int) -> None:
    in_full = 2 * (world_size - 1) * 12_000 * 4
    for sent in run_ranks(_sent, world_size, torch.float32):
        assert in_full / 2 < sent < in_full / 2 * 1.002
    assert run_ranks(_sent, world_size, torch.float64) == [2 * in_full] * world_size


def _several_at_once(rank: int, world_size: int) -> Tensor:
    with _collective("bf16") as collective:
        memory = collective.allocate(4 * 1000).view(torch.float32)
        generator = torch.Generator().manual_seed(rank)
        for _ in range(20):
            parts = torch.split(memory, [10, 700, 1, 289])
            memory.copy_(torch.randn(1000, generator=generator))
            works = [collective.all_reduce(part, background=number % 2 == 0) for number, part in enumerate(parts)]
            for work in reversed(works):
                work.wait()
        return memory.clone()


def test_several_buffers_in_flight_give_every_rank_the_same_bits() -> None:
    first, *others = run_ranks(_several_at_once, 3)
    assert all(torch.equal(first, other) for other in others)


def _aborted(rank: int, world_size: int) -> float:
    with _collective("bf16", seconds=30.0) as collective:
        buffer = collective.allocate(64).view(torch.float32)
        begun = time.monotonic()
        if rank == 0:
            threading.Timer(0.3, collective.abort, (KeyError("the reason"),)).start()
            with pytest.raises(KeyError, match="the reason"):
                collective.all_reduce(buffer).wait()
            with pytest.raises(KeyError, match="the reason"):
                collective.all_reduce(buffer)
            return time.monotonic() - begun
        time.sleep(1)
    return 0.0


def test_abort_wakes_whoever_waits_and_whoever_comes_later() -> None:
    assert 0.2 < run_ranks(_aborted, 2)[0] < 5
