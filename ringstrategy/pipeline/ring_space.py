"""Room in a ring of bytes: pure arithmetic."""

from __future__ import annotations

from collections import deque

__all__ = ["RingSpace"]


class RingSpace:
    """Which bytes of a ring are taken: what was taken first is given back first.

    Args:
        begin: the first byte.
        end: the byte after the last.
    """

    def __init__(self, begin: int, end: int) -> None:
        self._begin = begin
        self._end = end
        self._taken: deque[tuple[int, int]] = deque()

    def __len__(self) -> int:
        return len(self._taken)

    def find(self, nbytes: int) -> int | None:
        """Where ``nbytes`` in a row are free, in the order of the ring; None if nowhere."""
        if not self._taken:
            return self._begin if self._begin + nbytes <= self._end else None
        (oldest, _), (newest, start) = self._taken[0], self._taken[-1]
        if newest < oldest:  # has come round
            return start if start + nbytes <= oldest else None
        if start + nbytes <= self._end:
            return start
        return self._begin if self._begin + nbytes <= oldest else None

    def take(self, start: int, nbytes: int) -> None:
        """Take at least one byte, where :meth:`find` said."""
        self._taken.append((start, start + nbytes))

    def free_oldest(self) -> None:
        """Give back what was taken first."""
        self._taken.popleft()
