"""The contract of a channel: what two ranks of a pipeline say to each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

__all__ = ["Channel", "WrongMessage"]


class WrongMessage(RuntimeError):
    """Another message arrived than the one that was waited for: the ranks went different ways."""


class Channel(Protocol):
    """Messages to and from one other rank, first in, first out in each direction.

    A message is a list of values under a tag. Both ends must call :meth:`send` and :meth:`receive` in matching order;
    the two directions are independent. One thread at a time may use a channel, except for :meth:`abort`.

    Attributes:
        bytes_sent: bytes of tensors that were sent so far.
    """

    bytes_sent: int

    def send(self, values: Sequence[Any], tag: str) -> None:
        """Send values. Never waits for the receiver; the values may be changed as soon as it returns.

        Args:
            values: tensors, of any dtype, shape and layout, and anything that pickles. Autograd does not see that they
                are sent.
            tag: what the receiver expects, e.g. ``"forward 3"``.

        Raises:
            LinkLost: the other rank is gone, where that shows.
            TypeError: a value that does not pickle.
        """

    def receive(self, tag: str) -> list[Any]:
        """Wait for the next message.

        Args:
            tag: what its sender must have called it.

        Returns:
            The values. Tensors are new ones that belong to the caller: leaves of autograd with the dtype, shape and
            ``requires_grad`` of what was sent, and with its strides if it was dense or expanded.

        Raises:
            WrongMessage: its sender calls it otherwise.
            LinkLost: the other rank left, or sent nothing within the timeout.
        """

    def expect(self, count: int) -> None:
        """Prepare for messages that will be received in any case; a hint that may save time.

        Args:
            count: how many.
        """

    def abort(self, error: BaseException) -> None:
        """Make pending and later calls raise ``error``. Safe from any thread."""

    def close(self) -> None:
        """Release threads, sockets and memory, once what was sent is on its way. Idempotent."""
