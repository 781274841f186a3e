"""Where the gradients of a reducer lie, by what has been seen of the order in which they arrive."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ringstrategy.collectives.base import Collective
from ringstrategy.gradients.buckets import ALIGNMENT, plan_buckets
from ringstrategy.gradients.live import Gradient, LiveBucket, lay_out
from ringstrategy.process_group import RankGroup

__all__ = ["Layout"]


class Layout:
    """The buckets, laid out anew whenever more is known.

    A backward is observed: in which order gradients arrive, and how often. Rank 0's order makes the plan for all later
    ones, on all ranks.

    Args:
        gradients: all of them, by index.
        collective: has the memory.
        group: the ranks.
        cap_bytes: most bytes of gradients in a bucket.
        waiting: context around every wait, given what is waited for.

    Attributes:
        buckets: in the order in which they leave.
        observing: this backward makes the next plan.
        order: indices of the gradients that have arrived, while observing.
    """

    def __init__(
        self,
        gradients: list[Gradient],
        collective: Collective,
        group: RankGroup,
        cap_bytes: int,
        waiting: Callable[[str], contextlib.AbstractContextManager[None]],
    ) -> None:
        self.buckets: list[LiveBucket] = []
        self.observing = True
        self.order: list[int] = []
        self._gradients = gradients
        self._collective = collective
        self._group = group
        self._cap = cap_bytes
        self._waiting = waiting
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._groups: list[list[Gradient]] = []  # the order that was observed, and what some rank did not use
        self._stale = True  # the buckets do not follow what is known by now

    def observe(self) -> None:
        """The next backward is to be observed: it has gradients that there were none of."""
        self.observing = self._stale = True

    def follow(self, trained: Sequence[Gradient]) -> None:
        """Lay out the buckets anew if more is known than when they were made. Collective where memory grows.

        Args:
            trained: the gradients that there may be; those that were never observed go last.
        """
        if not self._stale:
            return
        known = {gradient.index for group in self._groups for gradient in group}
        new = [gradient for gradient in reversed(trained) if gradient.index not in known]
        groups = [[g.spec for g in group if not g.sparse] for group in (*self._groups, new)]
        plan = plan_buckets(groups, self._cap)
        if plan.nbytes > self._memory.numel():
            # With room for another arrangement, so that one piece of memory serves all.
            with self._waiting("memory for gradient buckets"):
                self._memory = self._collective.allocate(plan.nbytes + ALIGNMENT * len(trained))
        self.buckets = lay_out(plan, self._memory, self._gradients)
        self._memory.zero_()
        self._stale = False

    def share(self, trained: Sequence[Gradient]) -> None:
        """Agree with the other ranks on the order of gradients, how often they fire, and which are sparse. Collective.

        Args:
            trained: the gradients that there may be.
        """
        mine = (
            self.order,
            {g.index: g.fired for g in trained},
            {g.index for g in trained if _is_sparse(g.parameter.grad)},
        )
        with self._waiting("the order of gradients"):
            everyone = self._group.exchange(mine)
        order = everyone[0][0]
        for gradient in trained:
            gradient.expected = max(1, *(fired.get(gradient.index, 0) for _, fired, _ in everyone))
            gradient.sparse |= any(gradient.index in sparse for _, _, sparse in everyone)
        # What some rank did not use may come late or never; it must not hold up the rest.
        always = dict.fromkeys(index for index in order if all(fired[index] for _, fired, _ in everyone))
        rest = [gradient for gradient in reversed(trained) if gradient.index not in always]
        self._groups = [[self._gradients[index] for index in always], rest]
        self.observing = False
        self._stale = True  # for the next backward: the gradients of this one lie where they are

    def close(self) -> None:
        """Let go of the memory."""
        self.buckets.clear()
        self._memory = torch.empty(0, dtype=torch.uint8)


def _is_sparse(gradient: Tensor | None) -> bool:
    return gradient is not None and gradient.is_sparse
