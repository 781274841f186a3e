"""Channels between all ranks of a group: which kind, agreed by all, and tried."""

from __future__ import annotations

import torch
from lightning.fabric.utilities import rank_zero_info

from ringstrategy.collectives.choose import Transport, agree
from ringstrategy.pipeline.backend_channel import BackendChannel
from ringstrategy.pipeline.channels import Channel
from ringstrategy.process_group import RankGroup

__all__ = ["connect"]


def connect(group: RankGroup, transport: Transport = "auto") -> dict[int, Channel]:
    """Connect every rank of a group with every other. Collective: all ranks get the same kind of channels.

    Ranks of one host talk through shared memory, if a trial succeeds on every rank; all others through the process
    group's backend.

    Args:
        group: the ranks.
        transport: ``"shared_memory"`` insists on it, ``"backend"`` forgoes it.

    Returns:
        The channels to the other ranks, by their place in the group.

    Raises:
        RuntimeError: shared memory was insisted on, and is not possible here.
    """
    others = [place for place in range(group.world_size) if place != group.rank]
    if transport != "backend" and others:
        channels, obstacle = _try_shared_memory(group)
        if obstacle is None:
            return channels
        if transport == "shared_memory":
            raise RuntimeError(f"Channels through shared memory are not possible here: {obstacle}.")
        rank_zero_info(f"ringstrategy: stages talk over the process group's backend, because {obstacle}.")
    return {place: BackendChannel(group, place) for place in others}


def _try_shared_memory(group: RankGroup) -> tuple[dict[int, Channel], str | None]:
    """The channels, or the obstacle to them."""
    if not group.one_host:
        hosts = sorted({rank.host.name for rank in group.ranks})
        return {}, f"the ranks do not share one host and its namespaces ({', '.join(hosts)})"
    channels: dict[int, Channel] = {}
    problem: str | None = None
    try:
        # Imported here: its names exist on Linux only.
        from ringstrategy.pipeline.shared_memory_channel import connect_channels

        channels.update(connect_channels(group))
    except (ImportError, AttributeError, OSError, RuntimeError) as error:
        problem = str(error)
    problem = agree(group, problem)
    if problem is None:
        problem = agree(group, _trial(group, channels))
    if problem is None:
        return channels, None
    for channel in channels.values():
        channel.close()
    return {}, problem


def _trial(group: RankGroup, channels: dict[int, Channel]) -> str | None:
    """Send what differs from rank to rank to all others, and compare."""
    numbers = torch.arange(1000)
    try:
        for place, channel in channels.items():
            channel.send([numbers + group.rank, place], "trial")
        for place, channel in channels.items():
            received, addressee = channel.receive("trial")
            if not torch.equal(received, numbers + place) or addressee != group.rank:
                return f"it read another message than {group.ranks[place]} wrote"
            channel.bytes_sent = 0  # the trial was no work
    except (OSError, RuntimeError) as error:
        for channel in channels.values():
            channel.abort(error)  # the others need not wait for this rank
        return str(error)
    return None
