"""Which collective ranks get, and how the fastest is found."""

from __future__ import annotations

import logging
import os
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
from lightning_utilities.core import rank_zero
from torch import Tensor

from ringstrategy.collectives.base import Watch, Work
from ringstrategy.collectives.choose import Algorithm, Transport, choose_collective, open_collective
from ringstrategy.collectives.measure import _still_possible, fastest, sample
from ringstrategy.process_group import RankGroup
from tests.helpers.ranks import run_ranks

_BUCKETS = [(1000, torch.float32), (300, torch.float64)]


def _group() -> RankGroup:
    return RankGroup.connect(torch.device("cpu"), timedelta(seconds=20))


def _messages() -> list[str]:
    """What ringstrategy says at INFO, from here on."""
    found: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.getMessage().startswith("ringstrategy"):
                found.append(record.getMessage())

    rank_zero.log.addHandler(Keep())
    rank_zero.log.setLevel(logging.INFO)
    return found


def _no_shared_memory(*_: object) -> int:
    raise OSError("no memory today")


_CHOICES: list[tuple[Algorithm, Transport, str, str]] = [  # with shared memory, and without
    ("auto", "auto", "shared_memory", "backend"),
    ("auto", "backend", "backend", "backend"),
    ("ring", "auto", "shared_memory", "ring"),
    ("ring", "backend", "ring", "ring"),
    ("tree", "auto", "tree", "tree"),
    ("tree", "backend", "tree", "tree"),
    ("naive", "auto", "naive", "naive"),
    ("naive", "backend", "naive", "naive"),
    ("backend", "auto", "backend", "backend"),
    ("measure", "shared_memory", "shared_memory", ""),
]


def _chosen(rank: int, world_size: int, possible: bool) -> None:
    said = _messages()
    if not possible and rank == 1:
        os.memfd_create = _no_shared_memory  # type: ignore[assignment]
    group = _group()
    for algorithm, transport, with_it, without in _CHOICES:
        expected = with_it if possible else without
        if not expected:
            with pytest.raises(RuntimeError, match=r"not possible here: rank 1: .*no memory today"):
                choose_collective(group, algorithm, transport)
            continue
        collective = choose_collective(group, algorithm, transport)
        assert collective.name == expected, (algorithm, transport)
        assert (collective.bytes_sent, collective.busy_seconds) == (0, 0.0)
        buffer = collective.allocate(80).view(torch.int64)
        buffer.copy_(torch.arange(10) + 100 * rank)
        collective.all_reduce(buffer).wait()
        assert torch.equal(buffer, torch.arange(10) * world_size + 50 * world_size * (world_size - 1))
        collective.close()
        if expected == without != with_it:
            assert "no memory today" in said.pop(), (algorithm, transport)
    assert not said


@pytest.mark.parametrize("possible", [True, False])
def test_what_ranks_get_with_and_without_shared_memory(possible: bool) -> None:
    run_ranks(_chosen, 2, possible)


def _alone(rank: int, world_size: int) -> None:
    for algorithm, transport, *_ in _CHOICES:
        collective = choose_collective(_group(), algorithm, transport)
        assert collective.name == "backend"
        buffer = collective.allocate(8).view(torch.float64).fill_(3.0)
        collective.all_reduce(buffer).wait()
        assert buffer.item() == 3.0


def test_a_rank_alone_has_nothing_to_choose() -> None:
    run_ranks(_alone, 1)


_OVER_THE_BACKEND: list[Algorithm] = ["ring", "tree", "naive", "measure"]


def _in_parts(rank: int, world_size: int) -> None:
    group = _group().split([[0, 2], [1]])
    for algorithm in _OVER_THE_BACKEND:
        collective = choose_collective(group, algorithm, "backend")
        if rank == 1:
            assert collective.name == "backend"
        elif algorithm != "measure":
            assert collective.name == algorithm
        buffer = collective.allocate(24).view(torch.float64)
        buffer.copy_(torch.arange(3) + 10.0 * rank)
        collective.all_reduce(buffer).wait()
        assert buffer.tolist() == ([10, 11, 12] if rank == 1 else [20, 22, 24])
        collective.close()


def test_parts_of_the_ranks_choose_for_themselves() -> None:
    run_ranks(_in_parts, 3)


# -- by measuring ----------------------------------------------------------------------------------------------------


class _Sleeper:
    """Takes a given time for each call, and keeps count."""

    def __init__(self, name: str, seconds: float) -> None:
        self.name, self.rank, self.world_size = name, 0, 0
        self.bytes_sent, self.busy_seconds = 5, 5.0
        self.sizes: list[int] = []
        self.calls = 0
        self._seconds = seconds

    def allocate(self, nbytes: int) -> Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8)

    def all_reduce(self, buffer: Tensor, background: bool = True, exact: int = 0) -> Work:
        self.sizes.append(buffer.nbytes)
        return self

    def wait(self) -> None:
        self.calls += 1
        time.sleep(self._seconds)

    def watch(self, watch: Watch | None) -> None: ...

    def abort(self, error: BaseException) -> None: ...

    def close(self) -> None: ...


def _slowest_counts(rank: int, world_size: int) -> list[Any]:
    """By the mean over ranks, or on rank 0 alone, "uneven" would win."""
    uneven, even, hopeless = _Sleeper("uneven", 0.060 * rank), _Sleeper("even", 0.040), _Sleeper("hopeless", 0.300)
    rounds = {each.name: each for each in (uneven, even, hopeless)}
    # Large enough to be summed once a round.
    seconds = fastest(_group(), rounds, lambda name: [(2**20, torch.float32)])
    assert all(each.bytes_sent == each.busy_seconds == 0 for each in rounds.values())
    assert hopeless.calls == 1 + 1
    assert uneven.calls == even.calls >= 1 + 3
    return [seconds, list(seconds)]


def test_the_slowest_rank_counts_and_all_ranks_agree() -> None:
    first, second = run_ranks(_slowest_counts, 2)
    assert first == second
    seconds, order = first
    assert order == ["even", "uneven", "hopeless"]
    assert 0.040 <= seconds["even"] < seconds["uneven"] < 0.300 <= seconds["hopeless"]
    assert seconds["uneven"] >= 0.060


def _of_its_own_buckets(rank: int, world_size: int) -> None:
    """One collective sends many small buckets, which take it longer together than the other's large one."""
    small, large = _Sleeper("small", 0.004), _Sleeper("large", 0.010)
    sizes = {"small": [(100, torch.float32)] * 5, "large": [(500, torch.float64)]}
    seconds = fastest(_group(), {"small": small, "large": large}, sizes.__getitem__)
    assert list(seconds) == ["large", "small"]
    assert set(small.sizes) == {400}
    assert set(large.sizes) == {4000}
    assert small.calls == 1 + 5 * (small.calls // 5)
    assert large.calls >= 1 + 4, "little is summed several times in a round"


def test_each_is_tried_with_its_own_buckets() -> None:
    run_ranks(_of_its_own_buckets, 2)


def _extrapolated(rank: int, world_size: int) -> None:
    """Sixty buckets of 4 MiB, of which eight are tried."""
    sleeper, other = _Sleeper("sleeper", 0.002), _Sleeper("other", 0.1)
    seconds = fastest(_group(), {"sleeper": sleeper, "other": other}, lambda name: [(2**20, torch.float32)] * 60)
    assert sleeper.calls == 1 + 8
    assert 60 * 0.002 <= seconds["sleeper"] < 3 * 60 * 0.002


def test_a_step_of_many_bytes_is_judged_by_its_first_buckets() -> None:
    run_ranks(_extrapolated, 2)
    assert sample([(100, torch.float32), (50, torch.float64), (10, torch.float32)], 10_000) == [
        (100, torch.float32),
        (50, torch.float64),
        (10, torch.float32),
    ]
    assert sample([(100, torch.float32), (50, torch.float64), (10, torch.float32)], 607) == [
        (100, torch.float32),
        (25, torch.float64),
        (1, torch.float32),
    ]
    assert sample([], 100) == []


def _measured(rank: int, world_size: int, transport: Transport, buckets: list[tuple[int, torch.dtype]]) -> list[str]:
    said = _messages()
    collective = choose_collective(_group(), "measure", transport, lambda _: buckets)
    running = [thread.name for thread in threading.enumerate() if thread.name.startswith("ringstrategy-")]
    assert len(running) == (collective.name != "backend"), "the others are closed"
    assert (collective.bytes_sent, collective.busy_seconds) == (0, 0.0)
    (line,) = said
    assert f"algorithm='measure' chose {collective.name!r}, " in line
    names = ["backend", "ring", "tree", "naive", *(["shared_memory"] if transport == "auto" else [])]
    assert all(f"s by {name!r}" in line for name in names), line
    assert line.index(f"s by {collective.name!r}") == min(line.index(f"s by {name!r}") for name in names)
    buffer = collective.allocate(8).view(torch.float64)
    buffer.fill_(rank + 1.0)
    collective.all_reduce(buffer).wait()
    assert buffer.item() == world_size * (world_size + 1) / 2
    collective.close()
    return [collective.name]


@pytest.mark.parametrize("buckets", [_BUCKETS, [(2**20, torch.float32)], []], ids=["small", "4 MiB", "none"])
@pytest.mark.parametrize("transport", ["auto", "backend"])
def test_all_ranks_keep_the_same_and_say_why(transport: Transport, buckets: list[tuple[int, torch.dtype]]) -> None:
    first, second = run_ranks(_measured, 2, transport, buckets)
    assert first == second


def _adds_wrongly(rank: int, world_size: int) -> None:
    group = _group()
    add = Tensor.add_

    def add_one_more(own: Tensor, theirs: Tensor) -> Tensor:
        return add(add(own, theirs), 1)

    if rank == 1:
        Tensor.add_ = add_one_more  # type: ignore[method-assign,assignment]
    collective, obstacle = open_collective(group, "ring")
    assert collective is None
    assert obstacle == "rank 0: it read other numbers than its neighbours wrote"
    with pytest.raises(
        RuntimeError, match=r"'ring' over transport='backend' is not possible here: rank 0: it read oth"
    ):
        choose_collective(group, "ring", "backend")


def test_what_sums_wrongly_on_one_rank_no_rank_gets() -> None:
    run_ranks(_adds_wrongly, 2)


def test_what_is_slower_every_time_is_out_after_three_rounds() -> None:
    first = {"a": [1.0, 1.2], "b": [1.3, 1.4], "c": [2.3, 2.5]}
    assert _still_possible(first) == ["a", "b"]
    then = {"a": [1.0, 1.2, 1.1], "b": [1.3, 1.4, 1.3], "c": [1.15, 1.9, 1.9]}
    assert _still_possible(then) == ["a", "c"]
    assert _still_possible({"a": [0.0, 0.0, 0.0], "b": [0.0, 0.0, 0.0]}) == ["a", "b"]
