"""Parts of the ranks as groups of their own."""

from __future__ import annotations

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from ringstrategy.collectives.choose import Transport, choose_collective
from ringstrategy.process_group import ParameterMismatch, RankGroup, check_same_parameters
from tests.helpers.ranks import run_ranks

_CPU = torch.device("cpu")
# World size, and how it is divided: rows and columns of a grid, uneven parts, single ranks, all together.
_SPLITS = [
    (4, [[0, 1], [2, 3]]),
    (4, [[0, 2], [1, 3]]),
    (4, [[1, 3], [0, 2]]),
    (4, [[0, 1, 3], [2]]),
    (3, [[1], [0, 2]]),
    (3, [[0], [1], [2]]),
    (2, [[0, 1]]),
]


def _world() -> RankGroup:
    return RankGroup.connect(_CPU, timedelta(seconds=20))


def _members(rank: int, world_size: int, split: list[list[int]]) -> None:
    world = _world()
    group = world.split(split)
    mine = next(members for members in split if rank in members)
    assert group.world_size == len(mine)
    assert mine[group.rank] == rank
    assert [member.rank for member in group.ranks] == mine
    assert group.me == world.ranks[rank]
    assert (group.me.rank, group.me.pid) == (rank, os.getpid())
    assert group.one_host
    assert [neighbour.rank for neighbour in group.neighbours] == [member for member in mine if member != rank]
    assert (group.device, group.timeout) == (world.device, world.timeout)

    assert group.exchange(rank * 10) == [member * 10 for member in mine]
    for src, member in enumerate(mine):
        tensors = [torch.full((2, 3), float(rank)), torch.tensor([rank % 2 == 0, True]), torch.tensor(rank * 1j)]
        group.broadcast_tensors(tensors, src)
        assert tensors[0].eq(member).all()
        assert tensors[1].tolist() == [member % 2 == 0, True]
        assert tensors[2].item() == member * 1j
    assert world.exchange(rank) == list(range(world_size)), "the whole group goes on"
    group.close()
    group.close()
    dist.barrier()


@pytest.mark.parametrize(("world_size", "split"), _SPLITS)
def test_each_part_talks_among_itself(world_size: int, split: list[list[int]]) -> None:
    run_ranks(_members, world_size, split)


def _sums(rank: int, world_size: int, split: list[list[int]], transport: Transport) -> None:
    group = _world().split(split)
    mine = next(members for members in split if rank in members)
    collective = choose_collective(group, transport=transport)
    assert collective.name == ("backend" if len(mine) == 1 else transport)
    assert (collective.rank, collective.world_size) == (mine.index(rank), len(mine))
    for numel in (1, 3, 1001):
        buffer = collective.allocate(8 * numel).view(torch.float64)
        buffer.copy_(torch.arange(numel) + 100.0 * rank)
        collective.all_reduce(buffer).wait()
        assert torch.equal(buffer, torch.arange(numel, dtype=torch.float64) * len(mine) + 100.0 * sum(mine))
    collective.close()


@pytest.mark.parametrize("transport", ["shared_memory", "backend"])
@pytest.mark.parametrize(("world_size", "split"), _SPLITS)
def test_each_part_sums_its_own(world_size: int, split: list[list[int]], transport: Transport) -> None:
    run_ranks(_sums, world_size, split, transport)


def _grid(rank: int, world_size: int) -> tuple[float, float]:
    world = _world()
    rows, columns = world.split([[0, 1], [2, 3]]), world.split([[0, 2], [1, 3]])
    collectives = [choose_collective(group) for group in (rows, columns)]
    sums = []
    for collective in collectives:
        assert collective.name == "shared_memory"
        buffer = collective.allocate(8).view(torch.float64)
        buffer.fill_(10.0**rank)
        works = collective.all_reduce(buffer)
        works.wait()
        sums.append(buffer.item())
        collective.close()
    return sums[0], sums[1]


def test_a_rank_can_be_in_a_row_and_a_column() -> None:
    assert run_ranks(_grid, 4) == [(11.0, 101.0), (11.0, 1010.0), (1100.0, 101.0), (1100.0, 1010.0)]


def _fallback(rank: int, world_size: int) -> None:
    group = _world().split([[0], [1, 2]])
    if rank == 2:

        def refuse(*_: object) -> int:
            raise OSError("no memory today")

        os.memfd_create = refuse  # type: ignore[assignment]
    if rank != 0:
        with pytest.raises(RuntimeError, match=r"not possible here: rank 2: .*no memory today"):
            choose_collective(group, transport="shared_memory")


def test_problems_name_the_rank_of_the_run() -> None:
    run_ranks(_fallback, 3)


def _mismatch(rank: int, world_size: int) -> None:
    group = _world().split([[0], [1, 3], [2]])
    check_same_parameters(group, [("weight", torch.zeros(2))])
    if rank in (1, 3):
        with pytest.raises(
            ParameterMismatch, match=r"shape \(1,\) .* on rank 1 and 'weight' with shape \(3,\) .* rank 3"
        ):
            check_same_parameters(group, [("weight", torch.zeros(rank))])


def test_unequal_models_name_the_ranks_of_the_run() -> None:
    run_ranks(_mismatch, 4)


def _refused(rank: int, world_size: int) -> None:
    world = _world()
    for split in ([[0, 1]], [[0, 1], [1, 2]], [[0, 2, 1]], [[0, 1, 2, 3]], []):
        with pytest.raises(ValueError, match=r"ranks 0 to 2 belongs to one group, in ascending order; got \["):
            world.split(split)
    part = world.split([[0, 1], [2]])
    with pytest.raises(ValueError, match=r"Only the group of all ranks can be split"):
        part.split([[0]])


def test_splits_that_are_none_are_refused() -> None:
    run_ranks(_refused, 3)
