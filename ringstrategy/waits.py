"""Who waits for whom, and so who is late."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

__all__ = ["Waiting", "late"]


@dataclass(frozen=True)
class Waiting:
    """Where a rank waits: its how-manieth wait it is, what for, and which rank for, if it is for one alone.

    Without a label the rank goes on; it did so after that many waits.
    """

    sequence: int
    label: str = ""
    on: int | None = None
    since: float = 0.0


def late(me: int, waiting: Waiting, others: Mapping[int, Waiting], candidates: Iterable[int]) -> int:
    """The rank that others wait for.

    That is the one which this rank waits for, if it waits for nobody itself; else the one that *that* one waits for,
    and so on. In a collective it is one that waits for nobody, then the one that has come least far.

    Args:
        me: this rank.
        waiting: what it waits for.
        others: what other ranks have said of their waits.
        candidates: the ranks of which this one hears.

    Returns:
        A rank; this one if there is no other.
    """
    seen = {me}
    on = waiting.on
    while on is not None and on not in seen:
        theirs = others.get(on)
        if theirs is None or not theirs.label:
            return on
        seen.add(on)
        on = theirs.on

    def progress(rank: int) -> tuple[bool, bool, int]:
        theirs = others.get(rank)
        behind = theirs is None or theirs.sequence < waiting.sequence
        return (theirs is not None and bool(theirs.label), not behind, theirs.sequence if theirs else -1)

    return min(candidates, key=progress, default=me)
