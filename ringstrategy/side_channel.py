"""Numbers that travel between all ranks while these do other things."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from ringstrategy.failure import FailureMonitor
from ringstrategy.process_group import RankGroup

__all__ = ["SideChannel"]


class SideChannel:
    """Small collectives that are started at one point of the program and finished at a later one.

    They have a process group of their own, on host memory: whatever the ranks do in between cannot be paired with them.
    All ranks must start the same ones in the same order. One whose result nobody wants need not be finished.

    Args:
        group: all ranks of the run. Making the channel is collective.
        monitor: interrupts waits when a rank fails.

    Attributes:
        closed: nothing can be sent any more.
    """

    def __init__(self, group: RankGroup, monitor: FailureMonitor) -> None:
        self._monitor = monitor
        self._rank = group.rank
        self._ranks = group.world_size
        self.closed = False
        with monitor.waiting("a channel for small messages"):
            self._group = dist.new_group(backend="gloo", timeout=group.timeout)

    def add_up(self, value: float, what: str) -> Callable[[], float]:
        """Start to add a number up over all ranks.

        Args:
            value: this rank's.
            what: is waited for, as an error shall name it.

        Returns:
            Waits for the sum, which has the same bits on all ranks.
        """
        finish = self._start(torch.tensor([value], dtype=torch.float64), what)
        return lambda: float(finish())

    def gather(self, value: int, what: str) -> Callable[[], list[int]]:
        """Start to give a byte to all ranks.

        Args:
            value: this rank's, from 0 to 255.
            what: is waited for, as an error shall name it.

        Returns:
            Waits for the bytes of all ranks, by rank.
        """
        # A sum of what only one rank has: gloo starts it sooner than a gather.
        everyone = torch.zeros(self._ranks, dtype=torch.uint8)
        everyone[self._rank] = value
        finish = self._start(everyone, what)

        def found() -> list[int]:
            values: list[int] = finish().tolist()
            return values

        return found

    def _start(self, total: Tensor, what: str) -> Callable[[], Tensor]:
        work = dist.all_reduce(total, group=self._group, async_op=True)  # type: ignore[arg-type]

        def finish() -> Tensor:
            with self._monitor.waiting(what):
                self._monitor.join(work)
            return total

        return finish

    def close(self) -> None:
        """Leave the process group. After a failure it stays, for what is under way in it will not end."""
        self.closed = True
        if not self._monitor.failed and dist.is_initialized():
            dist.destroy_process_group(self._group)
