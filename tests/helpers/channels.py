"""Channels between the ranks of a test."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta

import torch

from ringstrategy.collectives.choose import Transport
from ringstrategy.pipeline.channels import Channel
from ringstrategy.pipeline.connect import connect
from ringstrategy.process_group import RankGroup

__all__ = ["TRANSPORTS", "open_channels", "world"]

TRANSPORTS: list[Transport] = ["shared_memory", "backend"]


def world(seconds: float = 20.0) -> RankGroup:
    """All ranks, on the CPU, with a timeout."""
    return RankGroup.connect(torch.device("cpu"), timedelta(seconds=seconds))


@contextlib.contextmanager
def open_channels(transport: Transport, seconds: float = 20.0) -> Iterator[dict[int, Channel]]:
    """Channels to all other ranks, closed at the end."""
    channels = connect(world(seconds), transport)
    try:
        yield channels
    finally:
        for channel in channels.values():
            channel.close()
