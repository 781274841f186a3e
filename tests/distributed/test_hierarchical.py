"""All-reduce over several hosts: hosts here are ranks that are told to share nothing."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from ringstrategy.collectives.half_precision import Compression
from ringstrategy.collectives.hierarchical import HierarchicalAllReduce
from ringstrategy.collectives.host_plan import lane_segments, lanes, places_by_host
from ringstrategy.collectives.links import LinkLost
from ringstrategy.process_group import Host, RankGroup
from tests.helpers.ranks import run_ranks

_CPU = torch.device("cpu")
_DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.int64]
# Which host each rank is on: two by two, one by one, uneven, interleaved, three hosts, all on one.
_QUICK = ["aabb", "abb", "abab"]
_LONG = ["ab", "aab", "abbb", "aaab", "abc", "aabc", "abacb", "aaabb", "aabbcc", "aaa", "a"]


def _group(rank: int, hosts: str, seconds: float = 20.0) -> RankGroup:
    """All ranks, each on the host that its letter names."""
    host = replace(Host.here(), name=f"host-{hosts[rank]}")
    with patch.object(Host, "here", lambda: host):
        return RankGroup.connect(_CPU, timedelta(seconds=seconds))


@contextlib.contextmanager
def _collective(group: RankGroup, segment_bytes: int = 4096) -> Iterator[HierarchicalAllReduce]:
    collective = HierarchicalAllReduce(group, segment_bytes)
    try:
        yield collective
    finally:
        collective.close()


# -- who carries what ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hosts", [*_QUICK, *_LONG])
def test_a_lane_has_one_rank_of_each_host_and_no_rank_two_lanes(hosts: str) -> None:
    here = places_by_host(hosts)
    assert sorted(itertools.chain(*here)) == list(range(len(hosts)))
    of_all = lanes(hosts)
    assert len(of_all) == min(map(len, here))
    assert len({*itertools.chain(*of_all)}) == len(of_all) * len(here)
    for lane in of_all:
        assert [hosts[place] for place in lane] == list(dict.fromkeys(hosts))


@pytest.mark.parametrize("lane_count", [1, 2, 3])
@pytest.mark.parametrize("host_count", [1, 2, 3])
@pytest.mark.parametrize("numel", [0, 1, 2, 5, 6, 7, 64, 1001])
def test_the_pieces_of_all_lanes_cover_a_buffer_once(lane_count: int, host_count: int, numel: int) -> None:
    covered: list[int] = []
    for lane in range(lane_count):
        for pieces in lane_segments(lane, lane_count, host_count, numel, longest=10):
            assert len(pieces) == host_count
            assert pieces[-1][1] - pieces[0][0] <= 10
            covered += itertools.chain(*(range(*piece) for piece in pieces))
    assert covered == list(range(numel))


# -- sums ------------------------------------------------------------------------------------------------------------


def _values(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Small integers, different for every rank and element: their sums are exact in every dtype."""
    numbers = (torch.arange(numel) * 3 + rank * 5) % 31
    return torch.complex(numbers.float(), -2.0 * numbers).to(dtype) if dtype.is_complex else numbers.to(dtype)


def _sums(rank: int, world_size: int, hosts: str) -> tuple[int, int]:
    with _collective(_group(rank, hosts)) as collective:
        assert (collective.name, collective.rank, collective.world_size) == ("hierarchical", rank, world_size)
        nbytes = 0
        for dtype in _DTYPES:
            # Empty, fewer elements than ranks, uneven, several segments with a rest.
            for numel in (0, 1, 2, 3, 7, 1000, 30_007):
                buffer = collective.allocate(numel * dtype.itemsize).view(dtype)
                assert not buffer.any()
                buffer.copy_(_values(rank, numel, dtype))
                collective.all_reduce(buffer).wait()
                expected = sum(_values(other, numel, dtype) for other in range(world_size))
                assert torch.equal(buffer, torch.as_tensor(expected)), (dtype, numel)
                nbytes += buffer.nbytes
        return nbytes, collective.bytes_sent


@pytest.mark.parametrize("hosts", [*_QUICK, *(pytest.param(hosts, marks=pytest.mark.slow) for hosts in _LONG)])
def test_sums_every_dtype_and_length_on_any_division_into_hosts(hosts: str) -> None:
    nbytes, sent = zip(*run_ranks(_sums, len(hosts), hosts), strict=True)
    # Every element goes from every other host to the one that sums it, and back.
    assert sum(sent) == 2 * (len(set(hosts)) - 1) * nbytes[0]


def _counted(rank: int, world_size: int, hosts: str) -> int:
    with _collective(_group(rank, hosts), segment_bytes=6000) as collective:
        buffer = collective.allocate(24_000)
        collective.all_reduce(buffer).wait()
        return collective.bytes_sent


@pytest.mark.parametrize(
    ("hosts", "sent"),
    [
        ("aabb", [12_000] * 4),
        ("abb", [24_000, 24_000, 0]),
        pytest.param("aabbcc", [16_000] * 6, marks=pytest.mark.slow),
    ],
)
def test_counts_what_goes_to_other_hosts(hosts: str, sent: list[int]) -> None:
    """A host sends 2(H - 1)/H of the buffer, in equal parts by the ranks that have a lane."""
    assert run_ranks(_counted, len(hosts), hosts) == sent


def _several_at_once(rank: int, world_size: int, hosts: str) -> torch.Tensor:
    with _collective(_group(rank, hosts), segment_bytes=128) as collective:
        memory = collective.allocate(4 * 1000).view(torch.float32)
        generator = torch.Generator().manual_seed(rank)
        for _ in range(10):
            parts = torch.split(memory, [10, 700, 1, 289])
            memory.copy_(torch.randn(1000, generator=generator))
            works = [collective.all_reduce(part) for part in parts]
            for work in reversed(works):
                work.wait()
        return memory.clone()


def test_several_buffers_in_flight_give_every_rank_the_same_bits() -> None:
    first, *others = run_ranks(_several_at_once, 5, "aabbb")
    assert all(torch.equal(first, other) for other in others)


def _in_a_part(rank: int, world_size: int) -> tuple[float, float]:
    """Two pipelines of two stages on each of two hosts: a stage's replicas are on both."""
    world = _group(rank, "aabb")
    sums = []
    for columns in ([[0, 2], [1, 3]], [[0, 1, 2], [3]]):
        group = world.split(columns)
        with _collective(group) as collective:
            buffer = collective.allocate(8).view(torch.float64)
            buffer.fill_(10.0**rank)
            collective.all_reduce(buffer).wait()
            sums.append(buffer.item())
    return sums[0], sums[1]


def test_a_part_of_the_ranks_sums_its_own() -> None:
    assert run_ranks(_in_a_part, 4) == [(101.0, 111.0), (1010.0, 111.0), (101.0, 111.0), (1010.0, 1000.0)]


# -- in 16 bits -----------------------------------------------------------------------------------------------------


def _compressed(
    rank: int, world_size: int, hosts: str, compression: Compression, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """What ranks bring, their sum, and the bytes that were sent. The last elements are counts."""
    with _collective(_group(rank, hosts), segment_bytes=4096) as collective:
        collective.compression = compression
        buffer = collective.allocate(_NUMEL * dtype.itemsize).view(dtype)
        torch.randn(_NUMEL, generator=torch.Generator().manual_seed(rank), dtype=dtype, out=buffer)
        buffer[-_COUNTS:] = torch.arange(_COUNTS) * 1001 + rank
        mine = buffer.clone()
        for _ in range(2):  # the second time with what the first has planned
            buffer.copy_(mine)
            collective.all_reduce(buffer, exact=_COUNTS).wait()
        return mine, buffer.clone(), collective.bytes_sent // 2


_NUMEL, _COUNTS = 10_007, 5


@pytest.mark.parametrize(
    ("hosts", "compression", "dtype"),
    [
        ("aabb", "bf16", torch.float32),
        ("abb", "fp16", torch.float32),
        pytest.param("aabbc", "fp16", torch.complex64, marks=pytest.mark.slow),
        pytest.param("aabb", "bf16", torch.float64, marks=pytest.mark.slow),
        pytest.param("aab", "fp16", torch.bfloat16, marks=pytest.mark.slow),
    ],
)
def test_compression_rounds_once_on_each_way(hosts: str, compression: Compression, dtype: torch.dtype) -> None:
    ranks = run_ranks(_compressed, len(hosts), hosts, compression, dtype)
    brought, (total, *others) = torch.stack([rank[0] for rank in ranks]), [rank[1] for rank in ranks]
    assert all(torch.equal(total, other) for other in others)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    exact = brought.to(wide).sum(0)
    halved = dtype in (torch.float32, torch.complex64)
    if dtype != torch.bfloat16:
        assert torch.equal(total[-_COUNTS:], exact[-_COUNTS:].to(dtype)), "counts travel in full"
        unit = {"bf16": 2.0**-8, "fp16": 2.0**-11}[compression] if halved else 1e-15
        # Of the real and the imaginary part alike, hence of the magnitude times the root of 2.
        bound = unit * 1.5 * (brought.to(wide).abs().sum(0) + exact.abs()) + 1e-5 * halved
        assert ((total.to(wide) - exact).abs() <= bound).all()
    in_full = 2 * (len(set(hosts)) - 1) * _NUMEL * dtype.itemsize
    sent = sum(rank[2] for rank in ranks)
    assert (0.5 * in_full < sent < 0.53 * in_full) if halved else sent == in_full


# -- failures --------------------------------------------------------------------------------------------------------


def _aborted(rank: int, world_size: int) -> float:
    with _collective(_group(rank, "aabb")) as collective:
        memory = collective.allocate(64_000)
        collective.all_reduce(memory).wait()
        if rank == 3:
            time.sleep(1.0)  # and does not come: its neighbour misses it, and so does the other host
            return 0.0
        begun = time.monotonic()
        threading.Timer(0.3, collective.abort, (KeyError("the reason"),)).start()
        with pytest.raises(KeyError, match="the reason"):
            collective.all_reduce(memory).wait()
        with pytest.raises(KeyError, match="the reason"):
            collective.all_reduce(memory)
        return time.monotonic() - begun


def test_abort_wakes_whoever_waits_for_another_host_and_whoever_comes_later() -> None:
    assert max(run_ranks(_aborted, 4)) < 0.9


def _one_leaves(rank: int, world_size: int) -> str:
    with _collective(_group(rank, "aabb")) as collective:
        memory = collective.allocate(64)
        if rank != 2:
            return ""
        with pytest.raises(LinkLost) as caught:
            collective.all_reduce(memory).wait()
        return str(caught.value)


def test_a_rank_that_leaves_is_noticed_on_its_host() -> None:
    assert "rank 3 (pid " in run_ranks(_one_leaves, 4)[2]


def _another_host_is_gone(rank: int, world_size: int) -> None:
    with _collective(_group(rank, "ab")) as collective:
        memory = collective.allocate(64)
        dist.barrier()
        if rank == 1:
            os._exit(0)
        time.sleep(0.5)  # gloo knows by now: already starting a message fails
        with pytest.raises(LinkLost, match=r"rank 1 \(pid \d+ on .*\) is gone"):
            collective.all_reduce(memory).wait()
        raise ValueError("noticed")


def test_a_host_that_has_left_is_named() -> None:
    with pytest.raises(AssertionError, match="ValueError: noticed"):
        run_ranks(_another_host_is_gone, 2)


def _foreign_buffer(rank: int, world_size: int) -> None:
    with _collective(_group(rank, "ab")) as collective:
        collective.allocate(64)
        with pytest.raises(ValueError, match=r"memory of the last allocate"):
            collective.all_reduce(torch.zeros(4)).wait()


def test_refuses_a_buffer_that_it_did_not_allocate() -> None:
    run_ranks(_foreign_buffer, 2)
