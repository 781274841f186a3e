"""``strategy.communication`` of a pipeline: what stages send each other, and how long they wait for it."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, cast

import pytest

from ringstrategy.communication import Communication
from tests.helpers.pipelines import SCHEDULES, Classification, Pipelined, batches, run_stages

_ROWS, _WIDTH, _CLASSES, _DOUBLE = 12, 8, 4, 8


class _Counts(Classification):
    """Notes the counters after every batch."""

    def on_train_batch_end(self, *_: Any) -> None:
        self.record("counted", cast(Any, self.trainer.strategy).communication)


def _count(place: Pipelined) -> tuple[list[Communication], Communication]:
    module = _Counts()
    trainer = place.trainer(limit_val_batches=0)
    trainer.fit(module, batches(_ROWS, _ROWS, _ROWS))
    return module.records["counted"], cast(Any, trainer.strategy).communication


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_messages_and_waits_of_every_step_are_counted(schedule: str) -> None:
    """Symptom: a pipeline seems to communicate nothing, because nothing is averaged."""
    (first, after_first), (last, after_last) = run_stages(_count, 2, balance=[3, 2], chunks=4, schedule=schedule)
    gradients, outputs = _ROWS * _WIDTH * _DOUBLE, _ROWS * _CLASSES * _DOUBLE
    # Under 1F1B the last stage keeps the outputs to itself, and sends the loss.
    expected = gradients + (outputs if schedule == "gpipe" else _DOUBLE)
    assert [after.bytes_sent - before.bytes_sent for before, after in pairwise(last)] == [expected, expected]
    for counted, afterwards in ((first, after_first), (last, after_last)):
        assert 0.0 < counted[0].exposed_seconds < counted[1].exposed_seconds < counted[2].exposed_seconds
        assert afterwards.exposed_seconds >= counted[2].exposed_seconds, "forgotten after the fit"
        assert afterwards.all_reduces == 0


def test_averaging_over_replicas_is_counted_as_well() -> None:
    """Symptom: one of the two counters hides the other."""
    alone = run_stages(_count, 2, balance=[3, 2], chunks=4)
    beside = run_stages(_count, 4, num_stages=2, balance=[3, 2], chunks=4)
    for rank, (counted, _) in enumerate(beside):
        assert counted[1].all_reduces > counted[0].all_reduces > 0
        step, without = (c[1].bytes_sent - c[0].bytes_sent for c in (counted, alone[rank % 2][0]))
        assert step > without
