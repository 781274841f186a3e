"""Which collective a run gets: agreed by all ranks, and tried before it is trusted."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from lightning.fabric.utilities import rank_zero_info

from ringstrategy.collectives.backend import BackendCollective
from ringstrategy.collectives.base import Collective
from ringstrategy.process_group import RankGroup

__all__ = ["Algorithm", "Transport", "agree", "check_choice", "choose_collective", "obstacle_to_shared_memory"]

Algorithm = Literal["auto", "ring", "backend"]
Transport = Literal["auto", "shared_memory", "backend"]

_TRIAL_BYTES = 4096


def check_choice(algorithm: str, transport: str) -> None:
    """Refuse names that nobody knows, and pairs that exclude each other.

    Raises:
        ValueError: with what is possible.
    """
    for what, value, choices in (
        ("algorithm", algorithm, get_args(Algorithm)),
        ("transport", transport, get_args(Transport)),
    ):
        if value not in choices:
            raise ValueError(f"{what}={value!r} is unknown; choose one of {', '.join(map(repr, choices))}.")
    if {algorithm, transport} in ({"ring", "backend"}, {"backend", "shared_memory"}):
        raise ValueError(
            f"algorithm={algorithm!r} and transport={transport!r} exclude each other: the ring runs over shared "
            "memory, the backend brings its own transport. Leave one of them at 'auto'."
        )


def choose_collective(group: RankGroup, algorithm: Algorithm = "auto", transport: Transport = "auto") -> Collective:
    """Make the collective that fits the ranks' devices and hosts. Collective: all ranks get the same.

    The rule is fixed, so that runs repeat bit by bit: CPU ranks of one host use the ring over shared memory, if a trial
    succeeds on every rank; all others use the backend.

    Args:
        group: the ranks.
        algorithm: ``"ring"`` insists on our own ring, ``"backend"`` on the process group's all-reduce.
        transport: ``"shared_memory"`` insists on it.

    Raises:
        ValueError: unknown names.
        RuntimeError: what was insisted on is not possible here, and why.
    """
    check_choice(algorithm, transport)
    if "backend" in (algorithm, transport) or group.world_size == 1:
        return BackendCollective(group)
    insisted = algorithm == "ring" or transport == "shared_memory"
    obstacle = obstacle_to_shared_memory(group)
    if obstacle is None:
        collective, obstacle = _try_shared_memory(group)
        if collective is not None:
            return collective
    if insisted:
        raise RuntimeError(f"The ring over shared memory is not possible here: {obstacle}. Use transport='auto'.")
    if group.device.type == "cpu":
        rank_zero_info(f"ringstrategy: gradients travel over the process group's backend, because {obstacle}.")
    return BackendCollective(group)


def obstacle_to_shared_memory(group: RankGroup) -> str | None:
    """Why shared memory is out of the question, judged from what all ranks know; None if it is not."""
    if group.device.type != "cpu":
        return f"tensors live on {group.device.type}"
    if not group.one_host:
        hosts = sorted({rank.host.name for rank in group.ranks})
        return f"the ranks do not share one host and its namespaces ({', '.join(hosts)})"
    return None


def _try_shared_memory(group: RankGroup) -> tuple[Collective | None, str | None]:
    """Connect, map, sum, compare, and vote."""
    ring: Collective | None = None
    problem: str | None = None
    try:
        # Imported here: its names exist on Linux only.
        from ringstrategy.collectives.shared_memory import SharedMemoryRing

        ring = SharedMemoryRing(group)
    except (ImportError, AttributeError, OSError) as error:
        problem = str(error)
    problem = agree(group, problem)
    if ring is not None and problem is None:
        problem = agree(group, _trial(ring))
        ring.bytes_sent, ring.busy_seconds = 0, 0.0  # the trial was no gradient
    if problem is None:
        return ring, None
    if ring is not None:
        ring.close()
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


def _trial(ring: Collective) -> str | None:
    """Sum what is different on every rank and in every element."""
    try:
        numbers = torch.arange(_TRIAL_BYTES // 8, dtype=torch.int64)
        buffer = ring.allocate(_TRIAL_BYTES).view(torch.int64)
        buffer.copy_(numbers * (ring.rank + 1))
        ring.all_reduce(buffer).wait()
        expected = numbers * (ring.world_size * (ring.world_size + 1) // 2)
        if not torch.equal(buffer, expected):
            return "it read other numbers than its neighbours wrote"
    except (OSError, RuntimeError) as error:
        ring.abort(error)  # the neighbours need not wait for this rank
        return str(error)
    return None
