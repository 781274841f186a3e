"""The ring, the tree and the naive all-reduce: messages, bytes, other traffic, and failures."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ringstrategy.collectives.chunks import segments, split, tree_links
from ringstrategy.collectives.links import LinkLost
from ringstrategy.collectives.naive import naive_all_reduce
from ringstrategy.collectives.point_to_point import Algorithm, PointToPoint
from ringstrategy.collectives.ring import ring_all_reduce
from ringstrategy.collectives.tree import tree_all_reduce
from ringstrategy.process_group import RankGroup
from tests.helpers.ranks import run_ranks

_ALGORITHMS: dict[str, Algorithm] = {"ring": ring_all_reduce, "tree": tree_all_reduce, "naive": naive_all_reduce}
_SEGMENT_BYTES = 64
_LENGTHS = (0, 1, 2, 3, 5, 16, 17, 1000)
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.int64)


@contextlib.contextmanager
def _collective(name: str, segment_bytes: int = _SEGMENT_BYTES) -> Iterator[PointToPoint]:
    group = RankGroup.connect(torch.device("cpu"), timedelta(seconds=20))
    collective = PointToPoint(group, name, _ALGORITHMS[name], segment_bytes=segment_bytes)
    try:
        yield collective
    finally:
        collective.close()


def _random(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    numbers = torch.randn(numel, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
    return (1000 * numbers).to(torch.int64) if dtype == torch.int64 else numbers.to(dtype)


_CASES = [(name, dtype, numel) for name in _ALGORITHMS for dtype in _DTYPES for numel in _LENGTHS]


def _sums(rank: int, world_size: int) -> list[Tensor]:
    results = []
    for name, dtype, numel in _CASES:
        with _collective(name) as collective:
            buffer = collective.allocate(numel * dtype.itemsize).view(dtype)
            buffer.copy_(_random(rank, numel, dtype))
            collective.all_reduce(buffer).wait()
            results.append(buffer)
    return results


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
def test_all_ranks_end_with_the_same_bits(world_size: int) -> None:
    first, *others = run_ranks(_sums, world_size)
    for other in others:
        assert all(map(torch.equal, first, other))
    for result, (name, dtype, numel) in zip(first, _CASES, strict=True):
        wide = torch.complex128 if dtype.is_complex else torch.float64
        parts = [_random(rank, numel, dtype).to(wide) for rank in range(world_size)]
        # Each of up to four additions rounds a partial sum, which is at most the sum of all magnitudes.
        bound = 0.0 if dtype == torch.int64 else 4 * torch.finfo(dtype).eps
        off = (result.to(wide) - sum(parts, torch.zeros(numel, dtype=wide))).abs()
        assert (off <= bound * torch.stack([part.abs() for part in parts]).sum(0)).all(), (name, dtype, numel)


def _in_order(rank: int, world_size: int) -> Tensor:
    with _collective("naive") as collective:
        buffer = collective.allocate(4 * 999).view(torch.float32)
        buffer.copy_(_random(rank, 999, torch.float32))
        collective.all_reduce(buffer).wait()
        return buffer


def test_the_naive_one_adds_in_the_order_of_the_ranks() -> None:
    expected = _random(0, 999, torch.float32)
    for rank in (1, 2, 3):
        expected += _random(rank, 999, torch.float32)
    assert torch.equal(run_ranks(_in_order, 4)[3], expected)


# -- messages and bytes ----------------------------------------------------------------------------------------------


def _of_ring(rank: int, world_size: int, numel: int) -> tuple[int, int]:
    """Messages and elements that a rank sends: every shard twice, except two that it sends once."""
    numbers = [len(segments(owner, world_size, numel, _SEGMENT_BYTES // 4)) for owner in range(world_size)]
    shards = [stop - start for start, stop in split(0, numel, world_size)]
    once = (rank + 1) % world_size, (rank + 2) % world_size
    return 2 * sum(numbers) - sum(numbers[i] for i in once), 2 * numel - sum(shards[i] for i in once)


def _of_tree(rank: int, world_size: int, numel: int) -> tuple[int, int]:
    """The buffer up to its parent, and down to each child."""
    parent, children = tree_links(rank, world_size)
    links = len(children) + (parent is not None)
    return links * len(segments(0, 1, numel, _SEGMENT_BYTES // 4)), links * numel


def _of_naive(rank: int, world_size: int, numel: int) -> tuple[int, int]:
    """The buffer to rank 0, or from there to everybody."""
    buffers = 1 if rank else world_size - 1
    return buffers * (numel > 0), buffers * numel


_COUNTS: dict[str, Callable[[int, int, int], tuple[int, int]]] = {
    "ring": _of_ring,
    "tree": _of_tree,
    "naive": _of_naive,
}


def _counted(rank: int, world_size: int) -> None:
    for name, of_formula in _COUNTS.items():
        with _collective(name) as collective:
            for numel in (0, 1, 5, 300):
                messages, before = collective._messages.sent, collective.bytes_sent
                collective.all_reduce(collective.allocate(4 * numel).view(torch.float32)).wait()
                found = collective._messages.sent - messages, (collective.bytes_sent - before) // 4
                assert found == of_formula(rank, world_size, numel), (name, numel)
            assert collective.busy_seconds > 0


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_messages_and_bytes_are_those_of_the_formulas(world_size: int) -> None:
    run_ranks(_counted, world_size)


def test_all_ranks_together_send_what_the_modules_say() -> None:
    """2(N - 1) messages per rank in a ring, 2(N - 1) in all in a tree and a star; everywhere 2 S (N - 1) bytes."""
    for world_size in (2, 3, 5):
        numel = 3 * world_size  # shards of three elements, a buffer of one segment
        for name, messages in (("ring", 2 * (world_size - 1) * world_size), ("tree", 2 * (world_size - 1))):
            counts = [_COUNTS[name](rank, world_size, numel) for rank in range(world_size)]
            assert sum(count for count, _ in counts) == messages
            assert sum(elements for _, elements in counts) == 2 * numel * (world_size - 1)


# -- other traffic ---------------------------------------------------------------------------------------------------


def _beside(rank: int, world_size: int) -> None:
    """Several algorithms at work in the background, while this thread uses the same process group for other things."""
    group = RankGroup.connect(torch.device("cpu"), timedelta(seconds=20))
    collectives = [PointToPoint(group, name, _ALGORITHMS[name], tag) for tag, name in enumerate(_ALGORITHMS)]
    buffers = [collective.allocate(8 * 50_000).view(torch.int64) for collective in collectives]
    numbers = torch.arange(50_000)
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    for turn in range(5):
        for place, buffer in enumerate(buffers):
            buffer.copy_(numbers * (rank + 1) + place)
        pairs = list(zip(collectives, buffers, strict=True))
        works = [collective.all_reduce(buffer) for collective, buffer in (pairs if rank else reversed(pairs))]

        total = torch.full((3000,), float(rank + turn))
        dist.all_reduce(total)
        assert total.eq(sum(other + turn for other in range(world_size))).all()
        received = torch.zeros(5000)
        sending = dist.isend(torch.full((5000,), float(rank)), right)
        dist.recv(received, left)
        assert sending is not None
        sending.wait()
        assert received.eq(left).all()
        assert group.exchange((rank, turn)) == [(other, turn) for other in range(world_size)]

        for work in works:
            work.wait()
        for place, buffer in enumerate(buffers):
            expected = numbers * (world_size * (world_size + 1) // 2) + place * world_size
            assert torch.equal(buffer, expected), (turn, collectives[place].name)
    for collective in collectives:
        collective.close()


@pytest.mark.parametrize("world_size", [2, 3])
def test_messages_keep_apart_from_all_other_traffic(world_size: int) -> None:
    run_ranks(_beside, world_size)


# -- failures --------------------------------------------------------------------------------------------------------


def _aborted(rank: int, world_size: int, name: str) -> float:
    with _collective(name) as collective:
        memory = collective.allocate(64)
        begun = time.monotonic()
        if rank == 0:
            first, second = collective.all_reduce(memory[:32]), collective.all_reduce(memory[32:])
            threading.Timer(0.2, collective.abort, (KeyError("the reason"),)).start()
            for call in (first.wait, second.wait, partial(collective.all_reduce, memory)):
                with pytest.raises(KeyError, match="the reason"):
                    call()
            with pytest.raises(KeyError, match="the reason"):
                collective.allocate(64)
            collective.close()
        seconds = time.monotonic() - begun
        dist.barrier()
        return seconds


@pytest.mark.parametrize("name", _ALGORITHMS)
def test_abort_wakes_whoever_waits_though_nothing_wakes_the_backend(name: str) -> None:
    assert 0.15 < run_ranks(_aborted, 2, name)[0] < 2.0


def _one_leaves(rank: int, world_size: int, name: str, later: float) -> None:
    with _collective(name) as collective:
        memory = collective.allocate(64)
        dist.barrier()
        if rank == 1:
            os._exit(0)
        time.sleep(later)
        with pytest.raises(LinkLost, match=r"rank 1 \(pid \d+ on .*\) is gone, or did not answer in time"):
            collective.all_reduce(memory).wait()
        with pytest.raises(LinkLost, match="is gone"):
            collective.all_reduce(memory)
        raise ValueError("noticed")


@pytest.mark.parametrize("later", [0.0, 0.5], ids=["while it is waited for", "before a message is started"])
@pytest.mark.parametrize("name", _ALGORITHMS)
def test_a_rank_that_leaves_is_named(name: str, later: float) -> None:
    with pytest.raises(AssertionError, match="ValueError: noticed"):
        run_ranks(_one_leaves, 2, name, later)


def _threads(rank: int, world_size: int) -> list[str]:
    for name in _ALGORITHMS:
        with _collective(name) as collective:
            collective.all_reduce(collective.allocate(4096)).wait()
            collective.close()
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("ringstrategy")]


def test_closing_ends_the_thread() -> None:
    assert run_ranks(_threads, 2) == [[], []]
