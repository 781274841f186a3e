"""NCCL's own ring and tree: on CUDA, the algorithms of these names are NCCL's.

NCCL reads the environment variable ``NCCL_ALGO`` when it makes a communicator, that is with the process group (which
Lightning binds to its device), and never again. So the variable must be there before, and it stays: a process group
outlives a fit, and later ones share its communicator.

The value is limited to the all-reduce, as NCCL understands since 2.24: its broadcast, for instance, has no tree, and
would fail.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping

import torch
import torch.distributed as dist

from ringstrategy.process_group import RankGroup

__all__ = ["NCCL_ALGORITHMS", "force_algorithm", "prepare", "uses_nccl"]

NCCL_ALGORITHMS = ("ring", "tree")
_VARIABLE = "NCCL_ALGO"


def prepare(algorithm: str, device: torch.device, backend: str | None) -> None:
    """Before the process group is made: see to it that NCCL will use the algorithm that was asked for.

    Args:
        algorithm: as the strategy was asked for it; all but ``"ring"`` and ``"tree"`` leave the choice to NCCL.
        device: of this rank. Elsewhere than on CUDA, NCCL has no part.
        backend: of the process group to be; None is the device's default.

    Raises:
        ValueError: the user's ``NCCL_ALGO`` says otherwise.
        RuntimeError: there is a process group already, which was made without it.
    """
    if algorithm in NCCL_ALGORITHMS and device.type == "cuda" and "nccl" in (backend or "nccl"):
        force_algorithm(algorithm)


def force_algorithm(algorithm: str, environment: MutableMapping[str, str] = os.environ) -> None:
    """Have NCCL use an algorithm for all-reduces, from the next communicator on, in this process.

    Args:
        algorithm: ``"ring"`` or ``"tree"``.
        environment: the variables that NCCL reads.

    Raises:
        ValueError: the user's ``NCCL_ALGO`` says otherwise.
        RuntimeError: there is a process group already, which was made without it.
    """
    present = environment.get(_VARIABLE)
    if present is not None:
        if _for_all_reduce(present) != algorithm:
            raise ValueError(
                f"algorithm={algorithm!r}, but {_VARIABLE}={present!r} in the environment tells NCCL something else. "
                f"Unset it, or use algorithm='backend', which leaves the choice to NCCL and to {_VARIABLE}."
            )
    elif dist.is_initialized():
        raise RuntimeError(
            f"algorithm={algorithm!r} on CUDA sets {_VARIABLE}, which NCCL reads when it connects the ranks; but the "
            f"process group exists already. Set {_VARIABLE}='allreduce:{algorithm}' before it is made, or use "
            "algorithm='auto'."
        )
    else:
        environment[_VARIABLE] = f"allreduce:{algorithm}"


def uses_nccl(group: RankGroup) -> bool:
    """Whether tensors on the group's device travel through NCCL."""
    return group.device.type == "cuda" and "nccl" in dist.get_backend(group.process_group)


def _for_all_reduce(value: str) -> str:
    """What a value of ``NCCL_ALGO`` leaves to the all-reduce, in lower case.

    >>> _for_all_reduce("Ring"), _for_all_reduce("ring;allreduce:Tree"), _for_all_reduce("broadcast:ring")
    ('ring', 'tree', '')
    """
    algorithms = ""
    for entry in value.lower().split(";"):
        function, _, listed = entry.strip().rpartition(":")
        if function in ("", "allreduce"):
            algorithms = listed
    return algorithms
