"""Which collective a run gets: agreed by all ranks, and tried before it is trusted.

.. code-block:: text

    algorithm, transport ──▶ names of candidates, in order of preference ──┬──▶ the first that all ranks could try
                                                                           └──▶ with "measure", the fastest of them
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.distributed as dist
from lightning.fabric.utilities import rank_zero_info

from ringstrategy.collectives.backend import BackendCollective
from ringstrategy.collectives.base import Collective
from ringstrategy.collectives.measure import BucketSizes, fastest
from ringstrategy.collectives.naive import naive_all_reduce
from ringstrategy.collectives.nccl import NCCL_ALGORITHMS, uses_nccl
from ringstrategy.collectives.point_to_point import PointToPoint
from ringstrategy.collectives.ring import ring_all_reduce
from ringstrategy.collectives.tree import tree_all_reduce
from ringstrategy.process_group import RankGroup
from ringstrategy.quantities import format_time

__all__ = [
    "CANDIDATES",
    "Algorithm",
    "Candidate",
    "Transport",
    "agree",
    "check_choice",
    "choose_collective",
    "obstacle_to_shared_memory",
    "open_collective",
]

Algorithm = Literal["auto", "measure", "ring", "tree", "naive", "backend"]
Transport = Literal["auto", "shared_memory", "backend"]

_TRIAL_BYTES = 4096


@dataclass(frozen=True)
class Candidate:
    """A collective that a run may get.

    Attributes:
        transport: what it travels over, as the argument of this name asks for it; ``"both"`` is what only
            ``"auto"`` gives.
        obstacle: why ranks cannot have it, judged from what all of them know; None if nothing is in the way.
        connect: makes it, on all ranks together. An :class:`OSError` says that it cannot be had here after all.
    """

    transport: str
    obstacle: Callable[[RankGroup], str | None]
    connect: Callable[[RankGroup], Collective]


# -- the candidates --------------------------------------------------------------------------------------------------


def obstacle_to_shared_memory(group: RankGroup) -> str | None:
    """Why shared memory is out of the question, judged from what all ranks know; None if it is not."""
    if group.device.type != "cpu":
        return f"tensors live on {group.device.type}"
    if not group.one_host:
        hosts = sorted({rank.host.name for rank in group.ranks})
        return f"the ranks do not share one host and its namespaces ({', '.join(hosts)})"
    return None


def _obstacle_to_hierarchical(group: RankGroup) -> str | None:
    if group.device.type != "cpu":
        return f"tensors live on {group.device.type}"
    if group.one_host:
        return "all ranks run on one host"
    if len({rank.host for rank in group.ranks}) == group.world_size:
        return "no two ranks share a host"
    return None


def _obstacle_to_messages(group: RankGroup) -> str | None:
    if group.device.type == "cpu" or uses_nccl(group):
        return None
    return f"the backend {dist.get_backend(group.process_group)!r} sends no tensors that live on {group.device.type}"


def _obstacle_to_host_messages(group: RankGroup) -> str | None:
    if group.device.type == "cpu":
        return None
    return f"tensors live on {group.device.type}, where rings and trees are NCCL's"


def _shared_memory(group: RankGroup) -> Collective:
    # Imported here: its names exist on Linux only.
    from ringstrategy.collectives.shared_memory import SharedMemoryRing

    return SharedMemoryRing(group)


def _hierarchical(group: RankGroup) -> Collective:
    from ringstrategy.collectives.hierarchical import HierarchicalAllReduce  # likewise

    return HierarchicalAllReduce(group)


CANDIDATES: Mapping[str, Candidate] = {
    "shared_memory": Candidate("shared_memory", obstacle_to_shared_memory, _shared_memory),
    "hierarchical": Candidate("both", _obstacle_to_hierarchical, _hierarchical),
    "backend": Candidate("backend", lambda _: None, BackendCollective),
    "ring": Candidate(
        "backend", _obstacle_to_host_messages, lambda group: PointToPoint(group, "ring", ring_all_reduce, tag=0)
    ),
    "tree": Candidate(
        "backend", _obstacle_to_host_messages, lambda group: PointToPoint(group, "tree", tree_all_reduce, tag=1)
    ),
    "naive": Candidate(
        "backend", _obstacle_to_messages, lambda group: PointToPoint(group, "naive", naive_all_reduce, tag=2)
    ),
}

# By algorithm: what ranks get, in order of preference.
_PREFERENCES: Mapping[str, tuple[str, ...]] = {
    "auto": ("shared_memory", "hierarchical", "backend"),
    "measure": tuple(CANDIDATES),
    "ring": ("shared_memory", "ring"),
    "tree": ("tree",),
    "naive": ("naive",),
    "backend": ("backend",),
}


def _names(algorithm: str, transport: str) -> list[str]:
    return [name for name in _PREFERENCES[algorithm] if transport in ("auto", CANDIDATES[name].transport)]


# -- the choice ------------------------------------------------------------------------------------------------------


def check_choice(algorithm: str, transport: str) -> None:
    """Refuse names that nobody knows, and algorithms that do not run over a transport.

    Raises:
        ValueError: with what is possible.
    """
    for what, value, choices in (
        ("algorithm", algorithm, get_args(Algorithm)),
        ("transport", transport, get_args(Transport)),
    ):
        if value not in choices:
            raise ValueError(f"{what}={value!r} is unknown; choose one of {', '.join(map(repr, choices))}.")
    if not _names(algorithm, transport):
        possible = " or ".join(repr(choice) for choice in get_args(Transport) if _names(algorithm, choice))
        others = ", ".join(repr(choice) for choice in get_args(Algorithm) if _names(choice, transport))
        raise ValueError(
            f"algorithm={algorithm!r} does not run over transport={transport!r}. Use transport={possible}, or one of "
            f"the algorithms {others}."
        )


def choose_collective(
    group: RankGroup,
    algorithm: Algorithm = "auto",
    transport: Transport = "auto",
    buckets: BucketSizes = lambda _: [(2**20, torch.float32)],
) -> Collective:
    """Make the collective that ranks shall use. Collective: all ranks get the same.

    Args:
        group: the ranks.
        algorithm: ``"auto"`` is a fixed rule, so that runs repeat bit by bit: CPU ranks of one host use the ring over
            shared memory, and those of several hosts shared memory inside each, if a trial succeeds on every rank; all
            others use the backend. ``"measure"`` tries all that are possible, and keeps the fastest. ``"ring"`` is the
            one over shared memory where that is possible, else the one over the backend's messages; on CUDA,
            ``"ring"`` and ``"tree"`` are NCCL's. The others are what their names say.
        transport: ``"shared_memory"`` and ``"backend"`` insist on it.
        buckets: what a step sends, for ``"measure"``: given a collective's name, elements and dtype of each bucket.

    Raises:
        ValueError: unknown names, or an algorithm that does not run over the transport.
        RuntimeError: what was asked for is not possible here, and why.
    """
    check_choice(algorithm, transport)
    if group.world_size == 1:
        return BackendCollective(group)
    if transport != "shared_memory" and algorithm in NCCL_ALGORITHMS and uses_nccl(group):
        return BackendCollective(group)  # NCCL has been told which of its algorithms to use
    if algorithm == "measure" and group.device.type != "cpu":
        rank_zero_info(f"ringstrategy: on {group.device.type} the backend chooses by measurements of its own.")
        algorithm = "auto"
    opened: dict[str, Collective] = {}
    obstacles: dict[str, str] = {}
    for name in _names(algorithm, transport):
        collective, obstacle = open_collective(group, name)
        if collective is not None:
            opened[name] = collective
            if algorithm != "measure":
                break
        else:
            assert obstacle is not None
            obstacles[name] = obstacle
    if not opened:
        raise RuntimeError(
            f"algorithm={algorithm!r} over transport={transport!r} is not possible here: "
            f"{'; '.join(obstacles.values())}. Use 'auto' for both."
        )
    name = _keep_fastest(group, opened, buckets) if len(opened) > 1 else next(iter(opened))
    if obstacles and algorithm != "measure" and group.device.type == "cpu":
        reasons = "; ".join(f"not by {other!r}, because {obstacle}" for other, obstacle in obstacles.items())
        rank_zero_info(f"ringstrategy: gradients travel by {name!r}, {reasons}.")
    return opened[name]


def _keep_fastest(group: RankGroup, opened: Mapping[str, Collective], buckets: BucketSizes) -> str:
    """The name of the fastest; closes the others, and says why."""
    seconds = fastest(group, opened, buckets)
    name, runner_up, *_ = seconds
    for other, collective in opened.items():
        if other != name:
            collective.close()
    rank_zero_info(
        f"ringstrategy: algorithm='measure' chose {name!r}, {seconds[runner_up] / seconds[name]:.2f}x as fast as the "
        "next. The gradients of a step take the slowest rank "
        f"{', '.join(f'{format_time(time)} by {other!r}' for other, time in seconds.items())}."
    )
    return name


def open_collective(group: RankGroup, name: str) -> tuple[Collective | None, str | None]:
    """Connect, sum, compare, and vote. Collective.

    Args:
        group: the ranks.
        name: one of :data:`CANDIDATES`.

    Returns:
        The collective, or the obstacle to it; the same on all ranks.
    """
    candidate = CANDIDATES[name]
    if (obstacle := candidate.obstacle(group)) is not None:
        return None, obstacle
    collective: Collective | None = None
    problem: str | None = None
    try:
        collective = candidate.connect(group)
    except (ImportError, AttributeError, OSError) as error:
        problem = str(error)
    problem = agree(group, problem)
    if collective is not None and problem is None:
        problem = agree(group, _trial(collective))
        collective.bytes_sent, collective.busy_seconds = 0, 0.0  # the trial was no gradient
    if problem is None:
        return collective, None
    if collective is not None:
        collective.close()
    return None, problem


def agree(group: RankGroup, problem: str | None) -> str | None:
    """Let all ranks know whether any has a problem. Collective.

    Args:
        group: the ranks.
        problem: this rank's own, or what it saw of another, which begins with "rank".

    Returns:
        A problem, with the rank that has it; None if there is none.
    """
    problems = [(who, what) for who, what in zip(group.ranks, group.exchange(problem), strict=True) if what is not None]
    # Others see a rank with a problem go away; its own word says why.
    own = [f"rank {who.rank}: {what}" for who, what in problems if not what.startswith("rank ")]
    return next(iter([*own, *(what for _, what in problems)]), None)


def _trial(collective: Collective) -> str | None:
    """Sum what is different on every rank and in every element."""
    try:
        numbers = torch.arange(_TRIAL_BYTES // 8, dtype=torch.int64)
        buffer = collective.allocate(_TRIAL_BYTES).view(torch.int64)
        buffer.copy_(numbers * (collective.rank + 1))
        collective.all_reduce(buffer).wait()
        expected = numbers * (collective.world_size * (collective.world_size + 1) // 2)
        if not torch.equal(buffer.cpu(), expected):
            return "it read other numbers than its neighbours wrote"
    except (OSError, RuntimeError) as error:
        collective.abort(error)  # the neighbours need not wait for this rank
        return str(error)
    return None
