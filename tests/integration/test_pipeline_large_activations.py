"""Activations that are large: they pass without blocking anybody, and few of them are alive."""

from __future__ import annotations

import time
import weakref
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.pipelines import (
    Batch,
    Classification,
    assert_like_one_process,
    batches,
    fit_alone,
    fit_stages,
    layered,
)


class _Widens(nn.Module):
    """Repeats its input up to some 1.6 million numbers a row; remembers which of its outputs are alive."""

    def __init__(self, times: int, seconds: float = 0.0) -> None:
        super().__init__()
        self.times, self.seconds = times, seconds
        self.outputs: list[weakref.ref[Tensor]] = []
        self.most = 0

    def forward(self, inputs: Tensor) -> Tensor:
        time.sleep(self.seconds)
        output = inputs.repeat(1, self.times)
        self.outputs.append(weakref.ref(output))
        self.most = max(self.most, sum(reference() is not None for reference in self.outputs))
        return output


class _Narrows(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        return inputs.view(len(inputs), -1, 8).mean(1)


class _Wide(Classification):
    """Sends 12 MB per micro-batch, and as much back.

    Args:
        stages: of them, those between the first and the last hand on what they get.
        seconds: that the first stage needs for each micro-batch.
    """

    def __init__(self, stages: int, seconds: float = 0.0) -> None:
        first, *_, last = layered(dtype=torch.float32)
        middle = [nn.Tanh() for _ in range(stages - 2)]
        super().__init__(nn.Sequential(first, _Widens(200_000, seconds), *middle, _Narrows(), last))

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        pass

    def on_train_end(self) -> None:
        widens = self.net.get_submodule("1")
        assert isinstance(widens, _Widens)
        self.record("alive", widens.most)


@pytest.mark.parametrize(
    ("stages", "chunks", "schedule", "seconds"),
    [
        (3, 8, "1f1b", 0.0),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in
          [(3, 8, "gpipe", 0.0), (3, 1, "1f1b", 0.0), (3, 8, "1f1b", 0.05), (4, 8, "1f1b", 0.0)]),
    ],
)  # fmt: skip
def test_large_activations_do_not_block_and_few_are_alive(
    stages: int, chunks: int, schedule: str, seconds: float
) -> None:
    """Symptom: both neighbours wait until the other receives; or every micro-batch stays in memory."""
    build, load = partial(_Wide, stages, seconds), partial(batches, 16, dtype=torch.float32)
    balance = [2] + [1] * (stages - 2) + [2]
    ranks = fit_stages(
        stages, build, load, chunks=chunks, schedule=schedule, balance=balance, checkpoint="never", timeout=100
    )
    assert_like_one_process(ranks, fit_alone(build, load), tolerance=1e-6)
    assert ranks[0].records["alive"] == [chunks if schedule == "gpipe" else min(stages, chunks)]
