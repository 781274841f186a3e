"""What every collective must do, and what the shared-memory ring does besides."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch

from ringstrategy.collectives.base import Collective
from ringstrategy.collectives.choose import check_choice, choose_collective, open_collective
from ringstrategy.collectives.links import LinkLost
from ringstrategy.collectives.shared_memory import SharedMemoryRing
from ringstrategy.process_group import RankGroup
from tests.helpers.ranks import run_ranks

_CPU = torch.device("cpu")
_NAMES = ["shared_memory", "backend", "ring", "tree", "naive"]
_DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.complex64,
    torch.int64,
]


@contextlib.contextmanager
def _collective(name: str, seconds: float = 20.0) -> Iterator[Collective]:
    group = RankGroup.connect(_CPU, timedelta(seconds=seconds))
    collective, obstacle = open_collective(group, name)
    assert collective is not None, obstacle
    try:
        yield collective
    finally:
        collective.close()


def _values(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Small integers, different for every rank and element: their sums are exact in every dtype."""
    numbers = (torch.arange(numel) * 3 + rank * 5) % 31
    return torch.complex(numbers.float(), -2.0 * numbers).to(dtype) if dtype.is_complex else numbers.to(dtype)


def _sums(rank: int, world_size: int, name: str) -> None:
    with _collective(name) as collective:
        assert collective.name == name
        assert (collective.rank, collective.world_size) == (rank, world_size)
        for dtype in _DTYPES:
            # Empty, fewer elements than ranks, uneven, several segments with a rest.
            for numel in (0, 1, 2, 3, 7, 1000, 300_007):
                buffer = collective.allocate(numel * dtype.itemsize).view(dtype)
                assert not buffer.any()
                buffer.copy_(_values(rank, numel, dtype))
                collective.all_reduce(buffer).wait()
                expected = sum(_values(other, numel, dtype) for other in range(world_size))
                assert torch.equal(buffer, torch.as_tensor(expected)), (dtype, numel)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, pytest.param(5, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", _NAMES)
def test_sums_every_dtype_and_length(name: str, world_size: int) -> None:
    run_ranks(_sums, world_size, name)


def _several_at_once(rank: int, world_size: int, name: str) -> torch.Tensor:
    with _collective(name) as collective:
        memory = collective.allocate(4 * 1000).view(torch.float32)
        generator = torch.Generator().manual_seed(rank)
        for _ in range(20):
            parts = torch.split(memory, [10, 700, 1, 289])
            memory.copy_(torch.randn(1000, generator=generator))
            works = [collective.all_reduce(part) for part in parts]
            for work in reversed(works):
                work.wait()
        return memory.clone()


@pytest.mark.parametrize("name", _NAMES)
def test_several_buffers_in_flight_give_every_rank_the_same_bits(name: str) -> None:
    first, *others = run_ranks(_several_at_once, 3, name)
    assert all(torch.equal(first, other) for other in others)


def _counted(rank: int, world_size: int, name: str) -> int:
    with _collective(name) as collective:
        before = collective.bytes_sent
        collective.all_reduce(collective.allocate(world_size * 1200)).wait()
        return collective.bytes_sent - before


@pytest.mark.parametrize("name", ["shared_memory", "backend", "ring"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_counts_the_bytes_of_a_ring(name: str, world_size: int) -> None:
    assert run_ranks(_counted, world_size, name) == [2 * (world_size - 1) * 1200] * world_size


def _foreign_buffer(rank: int, world_size: int) -> None:
    with _collective("shared_memory") as collective:
        collective.allocate(64)
        with pytest.raises(ValueError, match=r"memory of the last allocate"):
            collective.all_reduce(torch.zeros(4)).wait()


def test_refuses_a_buffer_that_it_did_not_allocate() -> None:
    run_ranks(_foreign_buffer, 2)


def _different_lengths(rank: int, world_size: int) -> None:
    with _collective("shared_memory") as collective:
        memory = collective.allocate(64)
        with pytest.raises((RuntimeError, LinkLost), match=r"different ways|is gone"):
            collective.all_reduce(memory[: 32 + rank]).wait()


def test_ranks_that_sum_different_buffers_are_told() -> None:
    run_ranks(_different_lengths, 2)


def _different_sizes(rank: int, world_size: int) -> None:
    with _collective("shared_memory") as collective, pytest.raises(OSError, match=r"allocated 6[45] bytes"):
        collective.allocate(64 + rank)


def test_ranks_that_allocate_different_sizes_are_told() -> None:
    run_ranks(_different_sizes, 2)


def _one_leaves(rank: int, world_size: int) -> str:
    with _collective("shared_memory") as collective:
        memory = collective.allocate(64)
        if rank == 1:
            return ""
        with pytest.raises(LinkLost) as caught:
            collective.all_reduce(memory).wait()
        return str(caught.value)


def test_a_rank_that_leaves_is_noticed_at_once() -> None:
    begun = time.monotonic()
    message = run_ranks(_one_leaves, 2)[0]
    assert "rank 1 (pid " in message
    assert "is gone" in message
    assert time.monotonic() - begun < 15


def _one_is_silent(rank: int, world_size: int) -> tuple[str, float]:
    with _collective("shared_memory", seconds=1.0) as collective:
        memory = collective.allocate(64)
        if rank == 1:
            time.sleep(4)
            return "", 0.0
        begun = time.monotonic()
        with pytest.raises(LinkLost) as caught:
            collective.all_reduce(memory).wait()
        return str(caught.value), time.monotonic() - begun


def test_a_silent_rank_is_given_up_after_the_timeout() -> None:
    message, seconds = run_ranks(_one_is_silent, 2)[0]
    assert "did not answer within 1 s" in message
    assert 0.9 < seconds < 3


def _aborted(rank: int, world_size: int) -> None:
    with _collective("shared_memory") as collective:
        memory = collective.allocate(64)
        if rank == 0:
            threading.Timer(0.3, collective.abort, (KeyError("the reason"),)).start()
            with pytest.raises(KeyError, match="the reason"):
                collective.all_reduce(memory).wait()
            with pytest.raises(KeyError, match="the reason"):
                collective.all_reduce(memory)
        else:
            time.sleep(1)


def test_abort_wakes_whoever_waits_and_whoever_comes_later() -> None:
    run_ranks(_aborted, 2)


def _leftovers(rank: int, world_size: int) -> tuple[list[str], int, int]:
    before = len(os.listdir("/proc/self/fd"))
    with _collective("shared_memory") as collective:
        collective.all_reduce(collective.allocate(4096)).wait()
        shared = os.listdir("/dev/shm")
        view = collective.allocate(8)
        view.fill_(7)
    assert view.tolist() == [7] * 8, "memory must outlive the ring while somebody looks at it"
    return shared, before, len(os.listdir("/proc/self/fd"))


def test_nothing_is_in_dev_shm_and_every_descriptor_is_closed() -> None:
    present = set(os.listdir("/dev/shm"))
    for shared, before, after in run_ranks(_leftovers, 2):
        assert not [name for name in set(shared) - present if "ring" in name]
        assert after <= before + 1  # the memory that `view` still maps


def _stranger_first(rank: int, world_size: int) -> float:
    """Another process reaches the ring's address before the neighbour does."""
    group = RankGroup.connect(_CPU, timedelta(seconds=20))
    addresses: list[str] = []
    original = socket.socket.bind

    def bind(self: socket.socket, address: str) -> None:
        original(self, address)
        addresses.append(address)

    exchange = group.exchange

    def exchange_late(value: object) -> list[object]:
        values = exchange(value)
        if rank == 0 and os.fork() == 0:
            stranger = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            stranger.connect(addresses[0])
            stranger.send(b"b" * 25)
            os._exit(0)
        if rank == 0:
            os.wait()
        exchange(None)
        return values

    group.exchange = exchange_late  # type: ignore[assignment,method-assign]
    socket.socket.bind = bind  # type: ignore[method-assign,assignment]
    try:
        ring = SharedMemoryRing(group)
    finally:
        socket.socket.bind = original  # type: ignore[method-assign]
    buffer = ring.allocate(8).view(torch.float64)
    buffer.fill_(rank + 1.0)
    ring.all_reduce(buffer).wait()
    ring.close()
    return buffer.item()


def test_a_stranger_at_the_socket_is_turned_away() -> None:
    assert run_ranks(_stranger_first, 2) == [3.0, 3.0]


def _no_sockets(rank: int, world_size: int) -> str:
    def refuse(*_: object) -> None:
        raise OSError("no sockets today")

    if rank == 1:
        socket.socket.bind = refuse  # type: ignore[method-assign]
    group = RankGroup.connect(_CPU, timedelta(seconds=20))
    collective = choose_collective(group)
    buffer = collective.allocate(8).view(torch.float64)
    buffer.fill_(rank + 1.0)
    collective.all_reduce(buffer).wait()
    assert buffer.item() == 3.0
    with pytest.raises(RuntimeError, match=r"not possible here: rank 1 cannot listen .*no sockets today"):
        choose_collective(group, algorithm="ring", transport="shared_memory")
    return collective.name


def test_all_ranks_fall_back_together() -> None:
    assert run_ranks(_no_sockets, 2) == ["backend", "backend"]


@pytest.mark.parametrize(
    ("algorithm", "transport", "message"),
    [
        (
            "butterfly",
            "auto",
            "'butterfly' is unknown; choose one of 'auto', 'measure', 'ring', 'tree', 'naive', 'back",
        ),
        ("auto", "pigeon", "transport='pigeon' is unknown; choose one of 'auto', 'shared_memory', 'backend'"),
        (
            "tree",
            "shared_memory",
            "'tree' does not run over transport='shared_memory'. Use transport='auto' or 'backend'",
        ),
        ("naive", "shared_memory", "or one of the algorithms 'auto', 'measure', 'ring'"),
        ("backend", "shared_memory", "algorithm='backend' does not run over transport='shared_memory'"),
    ],
)
def test_names_that_mean_nothing_are_refused(algorithm: str, transport: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_choice(algorithm, transport)
