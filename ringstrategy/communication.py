"""What the averaging of gradients costs."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Communication"]


class Communication(NamedTuple):
    """What gradient averaging has cost this rank so far.

    Attributes:
        all_reduces: buckets sent.
        bytes_sent: bytes handed to another rank.
        seconds: time in all-reduces, hidden behind backward or not; 0 where the backend does not tell.
        exposed_seconds: time in which backward had ended and the training waited.
        copy_seconds: time that copying gradients into buckets has added to backward; no part of the above. On CUDA the
            host does not wait for a copy: there it is only the time to start them.
    """

    all_reduces: int = 0
    bytes_sent: int = 0
    seconds: float = 0.0
    exposed_seconds: float = 0.0
    copy_seconds: float = 0.0
