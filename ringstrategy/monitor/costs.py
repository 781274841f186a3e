"""From what was recorded to numbers: of one step on one rank, and of many steps on all ranks. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from ringstrategy.communication import Communication
from ringstrategy.recorder import AllReduce, Recorded

__all__ = ["EpochRecord", "RankCosts", "StepCosts", "bubble", "compare", "step_costs"]

# To look for a message that is there already takes less: so many seconds, or this share of a longer wait.
_LOOK_SECONDS = 20e-6
_LOOK_SHARE = 0.1


class StepCosts(NamedTuple):
    """What one step has cost one rank.

    Attributes:
        seconds: of the step.
        communication: of it, as the strategy counts.
        all_reduce_seconds: in which an all-reduce was under way.
        waited_seconds: after the own backward, for the parts of other ranks. None where the collective does not tell.
        slowest: the rank that was waited for longest, if any was.
        backward_ended: when the last backward had ended whose gradients were averaged; NaN if none was.
        computing: of a stage, seconds spent on micro-batches.
        computed: of a stage, when the first micro-batch began and the last one ended; NaN without a pipeline.
    """

    seconds: float
    communication: Communication
    all_reduce_seconds: float
    waited_seconds: float | None
    slowest: int | None
    backward_ended: float
    computing: float
    computed: tuple[float, float]

    @property
    def bubble(self) -> float | None:
        """Share of a stage's time in which it waits; for the first stage, that is of the whole step."""
        begun, ended = self.computed
        return 1.0 - self.computing / (ended - begun) if ended > begun else None


def step_costs(seconds: float, communication: Communication, recorded: Recorded) -> StepCosts:
    """Put together what a step has cost.

    Args:
        seconds: of the step.
        communication: what the strategy has counted in it.
        recorded: what it has told.
    """
    waits: dict[int, float] = {}
    for finish in recorded.finishes:
        for all_reduce in recorded.all_reduces:
            if finish.begun < all_reduce.ended <= finish.ended:  # else backward has hidden it
                rank, waited = _last_wait(all_reduce, since=finish.begun)
                if waited > 0.0:
                    waits[rank] = waits.get(rank, 0.0) + waited
    told = any(all_reduce.arrivals for all_reduce in recorded.all_reduces)
    actions = recorded.micro_batches
    return StepCosts(
        seconds,
        communication,
        communication.seconds or _covered([(one.begun, one.ended) for one in recorded.all_reduces]),
        sum(waits.values()) if told else None,
        max(waits, key=lambda rank: waits[rank]) if waits else None,
        recorded.finishes[-1].begun if recorded.finishes else math.nan,
        sum(one.ended - one.begun for one in actions),
        (min(one.begun for one in actions), max(one.ended for one in actions)) if actions else (math.nan, math.nan),
    )


def _last_wait(all_reduce: AllReduce, since: float) -> tuple[int, float]:
    """The rank whose part came last, and how long it was waited for; -1 and 0.0 if none was."""
    last, until, before = -1, -math.inf, all_reduce.begun
    for arrival in all_reduce.arrivals:
        look = max(_LOOK_SECONDS, _LOOK_SHARE * (all_reduce.arrivals[-1].time - all_reduce.begun))
        if arrival.time - before > look:
            last, until = arrival.rank, arrival.time
        before = arrival.time
    return last, max(until - max(all_reduce.begun, since), 0.0)


def _covered(intervals: Sequence[tuple[float, float]]) -> float:
    """Seconds that lie in at least one interval."""
    total, reached = 0.0, -math.inf
    for begun, ended in sorted(intervals):
        total += max(ended - max(begun, reached), 0.0)
        reached = max(reached, ended)
    return total


class EpochRecord(NamedTuple):
    """What a rank tells the others of an epoch.

    Attributes:
        seconds: of its steps together.
        communication: of them together.
        all_reduce_seconds: of them together.
        backwards_ended: by step, by the clock that all ranks share.
        computing: of a stage, by step.
        computed: of a stage, by step, by that clock.
    """

    seconds: float
    communication: Communication
    all_reduce_seconds: float
    backwards_ended: list[float]
    computing: list[float]
    computed: list[tuple[float, float]]

    @classmethod
    def of(cls, steps: Sequence[StepCosts], clock_offset: float) -> EpochRecord:
        """Put steps together.

        Args:
            steps: of this rank.
            clock_offset: what its clock is ahead of the shared one, in seconds.
        """
        return cls(
            sum(step.seconds for step in steps),
            sum_of([step.communication for step in steps]),
            sum(step.all_reduce_seconds for step in steps),
            [step.backward_ended - clock_offset for step in steps],
            [step.computing for step in steps],
            [(step.computed[0] - clock_offset, step.computed[1] - clock_offset) for step in steps],
        )


class RankCosts(NamedTuple):
    """What steps have cost one rank, seen beside the others.

    Attributes:
        steps: how many.
        seconds: of them together.
        communication: of them together.
        all_reduce_seconds: in which an all-reduce was under way.
        waited_seconds: from the end of its own backward to that of the last rank's.
        slowest: steps in which its backward ended last, of the ranks that it averages with.
        compared: steps in which there were others to compare with.
        computing: of a stage, seconds spent on micro-batches.
        available: of a stage, seconds from the first micro-batch on any stage to the end of the last.
    """

    steps: int
    seconds: float
    communication: Communication
    all_reduce_seconds: float
    waited_seconds: float
    slowest: int
    compared: int
    computing: float
    available: float

    def plus(self, other: RankCosts) -> RankCosts:
        """Those of this and other steps."""
        return RankCosts(
            self.steps + other.steps,
            self.seconds + other.seconds,
            sum_of([self.communication, other.communication]),
            self.all_reduce_seconds + other.all_reduce_seconds,
            self.waited_seconds + other.waited_seconds,
            self.slowest + other.slowest,
            self.compared + other.compared,
            self.computing + other.computing,
            self.available + other.available,
        )


def compare(records: Sequence[EpochRecord], stages: int = 1) -> list[RankCosts]:
    """See ranks beside each other.

    Args:
        records: by rank.
        stages: ranks per pipeline. Ranks of the same stage average their gradients; those of one pipeline, which have
            consecutive numbers, wait for each other's micro-batches.

    Returns:
        The costs by rank.
    """
    costs = []
    for rank, record in enumerate(records):
        alike = [other.backwards_ended for other in records[rank % stages :: stages]]
        waited, slowest, compared = 0.0, 0, 0
        for own, *ends in zip(record.backwards_ended, *alike, strict=False):
            if len(ends) > 1 and not any(map(math.isnan, ends)):
                waited += max(ends) - own
                slowest += own == max(ends)
                compared += 1
        first = rank - rank % stages
        pipeline = [other.computed for other in records[first : first + stages]]
        makespans = [
            max(ended for _, ended in step) - min(begun for begun, _ in step) for step in zip(*pipeline, strict=False)
        ]
        known = [place for place, seconds in enumerate(makespans) if not math.isnan(seconds)]
        costs.append(
            RankCosts(
                len(record.backwards_ended),
                record.seconds,
                record.communication,
                record.all_reduce_seconds,
                waited,
                slowest,
                compared,
                sum(record.computing[place] for place in known),
                sum(makespans[place] for place in known),
            )
        )
    return costs


def bubble(costs: Sequence[RankCosts]) -> float | None:
    """Share of all stages' time in which they compute nothing; None without a pipeline."""
    available = sum(one.available for one in costs)
    return 1.0 - sum(one.computing for one in costs) / available if available else None


def sum_of(communications: Sequence[Communication]) -> Communication:
    """Add up, field by field."""
    return Communication(*map(sum, zip(Communication(), *communications, strict=True)))
