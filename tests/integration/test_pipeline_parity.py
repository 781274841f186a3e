"""A pipeline computes what one process computes, however it is cut and scheduled."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch

from tests.helpers.pipelines import (
    Classification,
    assert_like_one_process,
    batches,
    fit_alone,
    fit_stages,
    layered,
)

_QUICK = [(1, 4, "never"), (2, 1, "except_last"), (2, 4, "except_last"), (3, 7, "always"), (4, 2, "never")]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(
    ("stages", "chunks", "checkpoint"),
    [
        pytest.param(*case, marks=() if case in _QUICK else pytest.mark.slow)
        for case in itertools.product([1, 2, 3, 4], [1, 2, 4, 7], ["except_last", "always", "never"])
    ],
)
def test_training_equals_one_process(stages: int, chunks: int, checkpoint: str, schedule: str) -> None:
    """Symptom: gradients too large by the number of micro-batches; other weights per stage."""
    load = partial(batches, 12, 12, 3, 1)
    ranks = fit_stages(stages, load=load, chunks=chunks, checkpoint=checkpoint, schedule=schedule)
    assert_like_one_process(ranks, fit_alone(load=load))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_replicas_of_a_pipeline_equal_one_process(schedule: str) -> None:
    """Symptom: stages count as replicas, or replicas drift apart."""
    ranks = fit_stages(4, chunks=4, num_stages=2, schedule=schedule)
    assert_like_one_process(ranks, fit_alone())


def _in_single_precision() -> Classification:
    return Classification(layered(dtype=torch.float32))


def test_single_precision() -> None:
    """Symptom: the same, in the precision that people train in."""
    load = partial(batches, 12, 12, 12, dtype=torch.float32)
    ranks = fit_stages(3, _in_single_precision, load, chunks=4)
    assert_like_one_process(ranks, fit_alone(_in_single_precision, load), tolerance=1e-6)
