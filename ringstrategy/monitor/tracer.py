"""From what happens in training to the spans of a trace."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from ringstrategy.monitor.trace import Span, in_lanes
from ringstrategy.quantities import format_bytes
from ringstrategy.recorder import AllReduce, BucketContents, Recorded

__all__ = ["Tracer"]

_TRAINING, _ALL_REDUCE, _PIPELINE = "training", "all-reduce", "pipeline"
_KINDS = {"F": "forward", "B": "backward"}


class Tracer:
    """Collects what happens in the first steps. Spans are made at the end: a step is to cost little.

    Args:
        steps: how many.
    """

    def __init__(self, steps: int) -> None:
        self._left = steps
        self._phase: tuple[str, float] | None = None
        self._phases: list[tuple[str, float, float, int]] = []
        self._steps: list[tuple[Recorded, Sequence[BucketContents]]] = []

    def turn_to(self, what: str | None) -> None:
        """From here on the training does something else, or nothing that is to be shown."""
        if not self._left:
            return
        now = time.perf_counter()
        if self._phase is not None:
            self._phases.append((*self._phase, now, len(self._steps)))
        self._phase = None if what is None else (what, now)

    def end_step(self, recorded: Recorded, plan: Sequence[BucketContents]) -> None:
        """Take in what has been recorded in a step.

        Args:
            recorded: in it.
            plan: the buckets that were sent, if any were.
        """
        if self._left:
            self._steps.append((recorded, plan))
            self._left -= 1

    def spans(self, clock_offset: float) -> list[Span]:
        """All that was collected, lane by lane.

        Args:
            clock_offset: what this rank's clock is ahead of the one that all share, in seconds.
        """
        training = [Span(_TRAINING, name, begun, ended, {"step": step}) for name, begun, ended, step in self._phases]
        all_reduces, pipeline = [], []
        for step, (recorded, plan) in enumerate(self._steps):
            details = {"step": step}
            training += [
                Span(_TRAINING, "wait for gradients", one.begun, one.ended, details) for one in recorded.finishes
            ]
            all_reduces += _all_reduces(recorded, plan, step)
            pipeline += [
                Span(_PIPELINE, f"{_KINDS[action.kind]} {action.micro_batch}", begun, ended, details)
                for action, begun, ended in recorded.micro_batches
            ]
        # Outer spans before those inside of them.
        training.sort(key=lambda span: (span.begun, -span.ended))
        spans = [*training, *in_lanes(all_reduces), *pipeline]
        return [span._replace(begun=span.begun - clock_offset, ended=span.ended - clock_offset) for span in spans]


def _all_reduces(recorded: Recorded, plan: Sequence[BucketContents], step: int) -> list[list[Span]]:
    """The all-reduces of a step; each is followed by what happens inside of it."""
    # Collectives may have been asked for more than the buckets; then nothing says which is which.
    known = bool(plan) and len(recorded.all_reduces) == sum(finish.buckets for finish in recorded.finishes)
    groups = []
    for number, all_reduce in enumerate(recorded.all_reduces):
        name = f"bucket {number % len(plan)}" if known else "all-reduce"
        parameters = list(plan[number % len(plan)].parameters) if known else []
        details = {"step": step, "bytes": all_reduce.nbytes, "parameters": parameters}
        label = f"{name}, {format_bytes(all_reduce.nbytes)}"
        groups.append([Span(_ALL_REDUCE, label, all_reduce.begun, all_reduce.ended, details), *_parts(all_reduce)])
    return groups


def _parts(all_reduce: AllReduce) -> Iterator[Span]:
    before = all_reduce.begun
    for arrival in all_reduce.arrivals:
        yield Span(_ALL_REDUCE, f"wait for rank {arrival.rank}", before, arrival.time)
        before = arrival.time
    if all_reduce.summed is not None:
        yield Span(_ALL_REDUCE, "sum and hand out", before, all_reduce.summed)
        yield Span(_ALL_REDUCE, "wait for the others", all_reduce.summed, all_reduce.ended)
