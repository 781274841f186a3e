"""A signal to all ranks that each of them hears at another moment."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from types import FrameType

import torch

from ringstrategy.control import Control

__all__ = ["DeferredSignal"]


class DeferredSignal:
    """Calls a signal's handler where all ranks are at the same point, once per signal.

    SLURM announces the end of a job by a signal, on which Lightning saves a checkpoint and has the job requeued. It
    does so inside the signal handler, wherever the training is. But the save is collective, and the ranks are not in
    the same place: one would be in the barrier of the save while another waits for it in an all-reduce.

    Args:
        signum: the signal; from now on it is only counted.
        handler: what to do.
        control: the ranks.
    """

    def __init__(self, signum: signal.Signals, handler: Callable[[int, FrameType], object], control: Control) -> None:
        self._signum = signum
        self._handler = handler
        self._control = control
        self._arrived = 0
        self._handled = 0
        signal.signal(signum, self._count)

    def handle(self) -> None:
        """Call the handler on every rank if one of them has heard a signal that was not handled yet. Collective."""
        arrived = int(self._control.reduce(torch.tensor(self._arrived), operation="max"))
        if arrived > self._handled:
            # By number, so that a rank that hears of this signal only now does not have it handled again.
            self._handled = arrived
            self._handler(self._signum, sys._getframe())

    def _count(self, signum: int, frame: FrameType | None) -> None:
        self._arrived += 1
