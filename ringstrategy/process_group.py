"""The ranks of a run: who they are, where they live, and whether they hold the same model."""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Host", "HostPart", "Members", "ParameterMismatch", "Rank", "RankGroup", "check_same_parameters"]

T = TypeVar("T")


class ParameterMismatch(RuntimeError):
    """The ranks of a run do not hold the same parameters."""


@dataclass(frozen=True)
class Host:
    """What must agree for two processes to reach each other's sockets, processes and memory.

    A container may share the kernel but not the namespaces; equal host names prove nothing.
    """

    name: str
    boot_id: str
    network_namespace: str
    user_namespace: str
    pid_namespace: str

    @classmethod
    def here(cls) -> Host:
        """The host of this process; outside Linux a host that equals no other."""
        try:
            boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            net, user, pid = (os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "user", "pid"))
        except OSError:
            boot_id, net, user, pid = f"unknown-{os.getpid()}", "", "", ""
        return cls(socket.gethostname(), boot_id, net, user, pid)


@dataclass(frozen=True)
class Rank:
    """One process of the run."""

    rank: int
    pid: int
    uid: int
    host: Host

    def __str__(self) -> str:
        return f"rank {self.rank} (pid {self.pid} on {self.host.name})"


class RankGroup:
    """Ranks that talk to each other: all of a run, or some of them; with a control channel for Python objects.

    Made by :meth:`connect` and :meth:`split`.

    Args:
        process_group: for tensors on ``device``.
        control: for objects; it works on host memory.
        ranks: the members.
        device: this rank's device.
        timeout: how long a rank may keep the others waiting.
        owned: the process groups to leave in :meth:`close`.

    Attributes:
        rank: this process's place in the group; ``ranks[rank].rank`` is its number in the run.
        world_size: number of members.
        ranks: who they are, by place in the group.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None,
        control: dist.ProcessGroup | None,
        ranks: Sequence[Rank],
        device: torch.device,
        timeout: timedelta,
        owned: Sequence[dist.ProcessGroup | None] = (),
    ) -> None:
        self.process_group = process_group
        self.control = control
        self.ranks = tuple(ranks)
        self.rank = dist.get_rank(process_group)
        self.world_size = len(self.ranks)
        self.device = device
        self.timeout = timeout
        self._owned = list(owned)

    @classmethod
    def connect(cls, device: torch.device, timeout: timedelta) -> RankGroup:
        """Meet all ranks of the run. Collective; the default process group must be initialised.

        Args:
            device: this rank's device.
            timeout: how long a rank may keep the others waiting.
        """
        world = dist.group.WORLD
        # Objects travel over the host: a device backend would stage them through device memory and its streams.
        separate = dist.get_backend() != "gloo"
        control: dist.ProcessGroup | None = world
        if separate:
            control = dist.new_group(backend="gloo", timeout=timeout)  # type: ignore[assignment]
        ranks = _exchange(Rank(dist.get_rank(), os.getpid(), os.getuid(), Host.here()), control)
        return cls(world, control, ranks, device, timeout, owned=(control,) if separate else ())

    def split(self, members_of_each: Sequence[Sequence[int]]) -> RankGroup:
        """Divide the ranks into groups that do not overlap. Collective.

        A 2 x 3 grid of replicas and stages, for instance, is split into rows and, again, into columns:

        .. code-block:: text

            rows [[0, 1, 2], [3, 4, 5]]      columns [[0, 3], [1, 4], [2, 5]]

        Args:
            members_of_each: the ranks of each group, in ascending order; the same on all ranks.

        Returns:
            The group that this rank belongs to. It outlives neither this one nor the default process group.

        Raises:
            ValueError: a rank is in no group or in two, the order is another, or this group is itself a part.
        """
        groups = [list(members) for members in members_of_each]
        if self.world_size != dist.get_world_size():
            raise ValueError("Only the group of all ranks can be split: every rank takes part in forming each group.")
        if sorted(itertools.chain(*groups)) != list(range(self.world_size)) or any(g != sorted(g) for g in groups):
            raise ValueError(
                f"Every one of the ranks 0 to {self.world_size - 1} belongs to one group, in ascending order; "
                f"got {groups}."
            )
        process_group = control = _new_groups(groups, self.timeout)
        if self.control is not self.process_group:
            control = _new_groups(groups, self.timeout, "gloo")
        mine = next(members for members in groups if self.rank in members)
        owned = (process_group,) if control is process_group else (process_group, control)
        ranks = [self.ranks[member] for member in mine]
        return RankGroup(process_group, control, ranks, self.device, self.timeout, owned)

    @property
    def me(self) -> Rank:
        """This process."""
        return self.ranks[self.rank]

    @cached_property
    def one_host(self) -> bool:
        """Whether all ranks run on one host."""
        return len({rank.host for rank in self.ranks}) == 1

    @cached_property
    def neighbours(self) -> tuple[Rank, ...]:
        """The other ranks of this rank's host."""
        return tuple(rank for rank in self.ranks if rank.host == self.me.host and rank is not self.me)

    def exchange(self, value: T) -> list[T]:
        """Give ``value`` to every rank.

        Returns:
            The values of all ranks, by place in the group.
        """
        return _exchange(value, self.control)

    def broadcast_tensors(self, tensors: Iterable[Tensor], src: int = 0) -> None:
        """Overwrite ``tensors`` on every rank with those of rank ``src``, one message per dtype.

        Args:
            tensors: dense tensors of the same shapes on all ranks.
            src: the place in the group of the rank that has the values.
        """
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for tensor in tensors:
            if tensor.numel():
                by_dtype.setdefault(tensor.dtype, []).append(tensor.detach())
        for same in by_dtype.values():
            flat = torch.cat([_as_real(tensor).reshape(-1).to(self.device) for tensor in same])
            # gloo has no bool; a byte is a byte.
            raw = flat.view(torch.uint8) if flat.dtype == torch.bool else flat
            dist.broadcast(raw, group=self.process_group, group_src=src)
            if self.rank == src:
                continue
            sizes = [_as_real(tensor).numel() for tensor in same]
            for tensor, piece in zip(same, torch.split(flat, sizes), strict=True):
                real = _as_real(tensor)
                real.copy_(piece.view(real.shape))

    def close(self) -> None:
        """Leave the process groups that were made for this one. Touches no other rank."""
        while self._owned:
            owned = self._owned.pop()
            if dist.is_initialized():
                dist.destroy_process_group(owned)


class Members(Protocol):
    """Ranks that can meet, and who they are: a group, or its part on one host.

    Attributes:
        rank: this process's place among them.
        world_size: how many they are.
        ranks: who they are, by place.
        timeout: how long a rank may keep the others waiting.
    """

    rank: int
    world_size: int
    ranks: tuple[Rank, ...]
    timeout: timedelta

    def exchange(self, value: T) -> list[T]:
        """Give ``value`` to every member; the values of all, by place."""


class HostPart:
    """The ranks of a group that run on this rank's host.

    What they exchange passes through the whole group, whose ranks therefore all make the same exchanges, each within
    its own host.

    Args:
        group: the whole.
    """

    def __init__(self, group: RankGroup) -> None:
        self._group = group
        self._places = [place for place, rank in enumerate(group.ranks) if rank.host == group.me.host]
        self.rank = self._places.index(group.rank)
        self.world_size = len(self._places)
        self.ranks = tuple(group.ranks[place] for place in self._places)
        self.timeout = group.timeout

    def exchange(self, value: T) -> list[T]:
        """Give ``value`` to every rank of this host; the values of all, by place."""
        values = self._group.exchange(value)
        return [values[place] for place in self._places]


def _exchange(value: T, control: dist.ProcessGroup | None) -> list[T]:
    values: list[Any] = [None] * dist.get_world_size(control)
    dist.all_gather_object(values, value, group=control)
    return values


def _new_groups(groups: list[list[int]], timeout: timedelta, backend: str | None = None) -> dist.ProcessGroup:
    """Form all groups, as every rank must; the one of this rank."""
    mine, _ = dist.new_subgroups_by_enumeration(groups, timeout=timeout, backend=backend)
    assert isinstance(mine, dist.ProcessGroup)
    return mine


def _as_real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def check_same_parameters(group: RankGroup, named_parameters: Iterable[tuple[str, Tensor]]) -> None:
    """Compare names, shapes and dtypes of the parameters across ranks. Collective.

    Args:
        group: the ranks to compare.
        named_parameters: this rank's parameters, in the order in which they are reduced.

    Raises:
        ParameterMismatch: on every rank, with the first difference and the rank that has it.
    """
    mine = [(name, tuple(parameter.shape), str(parameter.dtype)) for name, parameter in named_parameters]
    everyone = group.exchange(mine)
    first, numbers = everyone[0], [rank.rank for rank in group.ranks]
    for rank, theirs in zip(numbers, everyone, strict=True):
        if theirs == first:
            continue
        index = next((i for i, pair in enumerate(zip(first, theirs, strict=False)) if pair[0] != pair[1]), None)
        if index is None:
            index = min(len(first), len(theirs))
        raise ParameterMismatch(
            f"The ranks do not hold the same model: parameter {index} is {_describe(first, index)} on rank "
            f"{numbers[0]} and {_describe(theirs, index)} on rank {rank} ({len(first)} and {len(theirs)} parameters in "
            "all). Build the same layers in the same order on every rank; only their initial values may differ."
        )


def _describe(parameters: list[tuple[str, tuple[int, ...], str]], index: int) -> str:
    if index >= len(parameters):
        return "absent"
    name, shape, dtype = parameters[index]
    return f"'{name}' with shape {shape} and {dtype}"
