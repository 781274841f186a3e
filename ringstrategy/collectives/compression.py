"""Where compression applies, and what cannot be compressed: said before the first step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import get_args

from lightning.fabric.utilities import rank_zero_info
from torch import Tensor

from ringstrategy.collectives.base import Collective
from ringstrategy.collectives.compressed import CompressedCollective
from ringstrategy.collectives.half_precision import Compression, wire_dtype
from ringstrategy.process_group import RankGroup

__all__ = ["check_compressible", "check_compression", "with_compression"]


def check_compression(compression: str | None, algorithm: str) -> None:
    """Refuse names that nobody knows, and algorithms that send what they add.

    Args:
        compression: what the user asked for.
        algorithm: the all-reduce, likewise.

    Raises:
        ValueError: with what is possible.
    """
    if compression is None:
        return
    if compression not in get_args(Compression):
        names = ", ".join(map(repr, get_args(Compression)))
        raise ValueError(f"compression={compression!r} is unknown; choose one of {names}, or None for full precision.")
    if algorithm not in ("auto", "backend"):
        raise ValueError(
            f"compression={compression!r} and algorithm={algorithm!r} exclude each other: partial sums would be "
            "rounded at every hop, so compressed gradients go straight to the rank that adds them. Leave "
            "algorithm='auto', or compression=None."
        )


def check_compressible(named_parameters: Iterable[tuple[str, Tensor]], compression: Compression) -> None:
    """Refuse a model with parameters whose gradients cannot travel in 16 bits.

    Args:
        named_parameters: all parameters.
        compression: what the user asked for.

    Raises:
        ValueError: with the first such parameter.
    """
    in_full = None
    for name, parameter in named_parameters:
        try:
            dtype = wire_dtype(parameter.dtype, compression)
        except TypeError as error:
            raise ValueError(f"Parameter '{name}' is {parameter.dtype}. {error}") from error
        if dtype is None and parameter.requires_grad:
            in_full = in_full or name
    if in_full is not None:
        rank_zero_info(
            f"ringstrategy: gradients in float64, e.g. of '{in_full}', are sent in full; compression={compression!r} "
            "is for float32."
        )


def with_compression(collective: Collective, group: RankGroup, compression: Compression | None) -> Collective:
    """Put a compressed collective in the place of one that sends gradients in full. Collective.

    Args:
        collective: what was chosen. It is closed if another takes its place.
        group: the ranks.
        compression: None changes nothing.

    Raises:
        RuntimeError: the group's backend cannot compress on the ranks' device.
    """
    if compression is None or group.world_size == 1:
        return collective
    if collective.name == "shared_memory":
        rank_zero_info(
            f"ringstrategy: compression={compression!r} has no effect: the ranks share memory, where nothing is sent, "
            "and gradients are added in full precision. transport='backend' would compress them."
        )
        return collective
    if collective.name == "hierarchical":
        # Imported here: its names exist on Linux only.
        from ringstrategy.collectives.hierarchical import HierarchicalAllReduce

        assert isinstance(collective, HierarchicalAllReduce)
        collective.compression = compression  # adds up on each host in full, and compresses what crosses
        return collective
    collective.close()
    return CompressedCollective(group, compression)
