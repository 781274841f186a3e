"""Whether all ranks hold the same parameters, bit by bit."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from ringstrategy.process_group import ParameterMismatch

__all__ = ["check_parameters", "digest"]

Checksums = tuple[int, list[int]]  # a rank, and those of its parameters


def digest(tensor: Tensor) -> int:
    """A checksum (CRC-32) of a tensor's values, whatever its strides and device."""
    plain = tensor.detach().cpu().contiguous().reshape(-1)
    return zlib.crc32(plain.view(torch.uint8).numpy().data) if plain.numel() else 0


def check_parameters(
    named_parameters: Iterable[tuple[str, Tensor]],
    rank: int,
    gather: Callable[[Checksums], Sequence[Checksums]],
    where: str,
) -> None:
    """Compare parameters across ranks. Collective.

    Args:
        named_parameters: this rank's; the same names in the same order on all ranks.
        rank: this rank.
        gather: gives an object to all ranks, and returns theirs.
        where: in the training.

    Raises:
        ParameterMismatch: on every rank, with the first parameter that differs, and the first rank that differs from
            the first one.
    """
    parameters = list(named_parameters)
    everyone = gather((rank, [digest(parameter) for _, parameter in parameters]))
    first, expected = everyone[0]
    for place, (name, parameter) in enumerate(parameters):
        for other, theirs in everyone:
            if theirs[place] == expected[place]:
                continue
            differing = sum(mine != own for mine, own in zip(expected, theirs, strict=True))
            raise ParameterMismatch(
                f"At {where}, parameter '{name}' of shape {tuple(parameter.shape)} is another one on rank {other} than "
                f"on rank {first}, as are {differing} of {len(parameters)} in all. The mean of gradients has the same "
                "bits on all ranks, so some of them alone have done something else: look for optimizer steps that "
                "depend on the rank, and for code that writes to parameters without an optimizer."
            )
