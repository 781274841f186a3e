"""Small messages that are under way while the ranks do other things."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from ringstrategy.failure import FailureMonitor, RankFailure
from ringstrategy.process_group import RankGroup
from ringstrategy.side_channel import SideChannel
from tests.helpers.ranks import run_ranks


@contextlib.contextmanager
def _channel() -> Iterator[tuple[SideChannel, FailureMonitor]]:
    group = RankGroup.connect(torch.device("cpu"), timedelta(seconds=20))
    monitor = FailureMonitor(group)
    channel = SideChannel(group, monitor)
    try:
        yield channel, monitor
    finally:
        channel.close()
        monitor.leave()
        monitor.close()


def _talk(rank: int, world_size: int) -> tuple[list[float], list[list[int]]]:
    sums, bytes_ = [], []
    with _channel() as (channel, _):
        # Started in one order, finished in another, with other collectives in between and some left unfinished.
        pending = [channel.add_up(0.1 * (rank + 1) + 257 * number, "a sum") for number in range(4)]
        asked = [channel.gather(rank + 10 * number, "bytes") for number in range(3)]
        dist.barrier()
        bytes_ = [finish() for finish in asked[:2]]
        other = torch.ones(1000)
        dist.all_reduce(other)
        sums = [finish() for finish in reversed(pending)]
        assert other.eq(world_size).all()
    assert channel.closed
    return sums, bytes_


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_messages_are_exact_and_stay_apart_from_others(world_size: int) -> None:
    first, *others = run_ranks(_talk, world_size)
    assert all(other == first for other in others)
    sums, bytes_ = first
    own = sum(0.1 * (rank + 1) for rank in range(world_size))
    assert sums == pytest.approx([own + 257 * number * world_size for number in reversed(range(4))], abs=1e-12)
    assert bytes_ == [[rank + 10 * number for rank in range(world_size)] for number in range(2)]


def _fail(rank: int, world_size: int) -> str:
    with _channel() as (channel, monitor):
        if rank == 1:
            monitor.report(ValueError("boom"))
            return ""
        with pytest.raises(RankFailure) as failure:
            channel.add_up(1.0, "a sum")()
        monitor.leave()
    return str(failure.value)


def test_a_failure_interrupts_a_wait() -> None:
    (error, _) = run_ranks(_fail, 2)
    assert "rank 1 failed first" in error
    assert "ValueError: boom" in error
