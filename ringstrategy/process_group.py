"""The ranks of a run: who they are, where they live, and whether they hold the same model."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Host", "ParameterMismatch", "Rank", "RankGroup", "check_same_parameters"]

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
        return cls(platform.node(), boot_id, net, user, pid)


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
    """All ranks of the default process group, with a control channel for Python objects.

    Args:
        device: this rank's device.
        timeout: how long a rank may keep the others waiting.

    Attributes:
        ranks: who they are, by rank.
        control: the process group for objects; it works on host memory.
    """

    def __init__(self, device: torch.device, timeout: timedelta) -> None:
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.device = device
        self.timeout = timeout
        # Objects travel over the host: a device backend would stage them through device memory and its streams.
        on_device = dist.get_backend() != "gloo"
        self.control: dist.ProcessGroup | None = dist.group.WORLD
        if on_device:
            self.control = dist.new_group(backend="gloo", timeout=timeout)  # type: ignore[assignment]
        self._owns_control = on_device
        self.ranks: tuple[Rank, ...] = tuple(self.exchange(Rank(self.rank, os.getpid(), os.getuid(), Host.here())))

    @classmethod
    def connect(cls, device: torch.device, timeout: timedelta) -> RankGroup:
        """Meet the other ranks. Collective; the default process group must be initialised."""
        return cls(device, timeout)

    @cached_property
    def one_host(self) -> bool:
        """Whether all ranks run on one host."""
        return len({rank.host for rank in self.ranks}) == 1

    @cached_property
    def neighbours(self) -> tuple[Rank, ...]:
        """The other ranks of this rank's host."""
        here = self.ranks[self.rank].host
        return tuple(rank for rank in self.ranks if rank.host == here and rank.rank != self.rank)

    def exchange(self, value: T) -> list[T]:
        """Give ``value`` to every rank.

        Returns:
            The values of all ranks, by rank.
        """
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.control)
        return values

    def broadcast_tensors(self, tensors: Iterable[Tensor], src: int = 0) -> None:
        """Overwrite ``tensors`` on every rank with those of rank ``src``, one message per dtype.

        Args:
            tensors: dense tensors of the same shapes on all ranks.
            src: the rank that has the values.
        """
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for tensor in tensors:
            if tensor.numel():
                by_dtype.setdefault(tensor.dtype, []).append(tensor.detach())
        for same in by_dtype.values():
            flat = torch.cat([_as_real(tensor).reshape(-1).to(self.device) for tensor in same])
            # gloo has no bool; a byte is a byte.
            dist.broadcast(flat.view(torch.uint8) if flat.dtype == torch.bool else flat, src)
            if self.rank == src:
                continue
            sizes = [_as_real(tensor).numel() for tensor in same]
            for tensor, piece in zip(same, torch.split(flat, sizes), strict=True):
                real = _as_real(tensor)
                real.copy_(piece.view(real.shape))

    def close(self) -> None:
        """Leave the control channel. Touches no other rank."""
        if self._owns_control and dist.is_initialized():
            dist.destroy_process_group(self.control)
        self._owns_control = False


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
    expected = everyone[0]
    for rank, theirs in enumerate(everyone):
        if theirs == expected:
            continue
        index = next((i for i, pair in enumerate(zip(expected, theirs, strict=False)) if pair[0] != pair[1]), None)
        if index is None:
            index = min(len(expected), len(theirs))
        raise ParameterMismatch(
            f"The ranks do not hold the same model: parameter {index} is {_describe(expected, index)} on rank 0 and "
            f"{_describe(theirs, index)} on rank {rank} ({len(expected)} and {len(theirs)} parameters in all). Build "
            "the same layers in the same order on every rank; only their initial values may differ."
        )


def _describe(parameters: list[tuple[str, tuple[int, ...], str]], index: int) -> str:
    if index >= len(parameters):
        return "absent"
    name, shape, dtype = parameters[index]
    return f"'{name}' with shape {shape} and {dtype}"
