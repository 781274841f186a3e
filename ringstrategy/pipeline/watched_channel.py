"""A channel whose waits end when any rank fails, with that rank and its reason."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from ringstrategy.pipeline.channels import Channel

__all__ = ["Waiting", "WatchedChannel"]

Waiting: TypeAlias = Callable[[str, int], contextlib.AbstractContextManager[None]]


class WatchedChannel:
    """Messages to and from another stage; see :class:`~ringstrategy.pipeline.channels.Channel`.

    A channel alone says that its peer is gone, which may be the consequence of a failure elsewhere.

    Args:
        channel: to the other stage.
        stage: that stage.
        waiting: context around everything that needs the other stage, given what for and the stage.
    """

    def __init__(self, channel: Channel, stage: int, waiting: Waiting) -> None:
        self._channel = channel
        self._stage = stage
        self._waiting = waiting

    @property
    def bytes_sent(self) -> int:
        """Bytes of tensors that were sent so far."""
        return self._channel.bytes_sent

    @bytes_sent.setter
    def bytes_sent(self, count: int) -> None:
        self._channel.bytes_sent = count

    def send(self, values: Sequence[Any], tag: str) -> None:
        """Send values. Never waits for the receiver."""
        with self._waiting(f"{tag} to stage {self._stage}", self._stage):
            self._channel.send(values, tag)

    def receive(self, tag: str) -> list[Any]:
        """Wait for the next message."""
        with self._waiting(f"{tag} of stage {self._stage}", self._stage):
            return self._channel.receive(tag)

    def expect(self, count: int) -> None:
        """Prepare for messages that will be received in any case."""
        self._channel.expect(count)

    def abort(self, error: BaseException) -> None:
        """Make pending and later calls raise ``error``. Safe from any thread."""
        self._channel.abort(error)

    def close(self) -> None:
        """Release threads, sockets and memory."""
        self._channel.close()
