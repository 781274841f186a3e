"""Precision and compilation under ``ring_ddp``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor
from torch._inductor import config as inductor_config

from tests.helpers.compare import (
    Logged,
    Normalised,
    Place,
    Result,
    assert_same,
    fit_both,
    normalised,
    result_of,
    run_both,
)
from tests.helpers.features import feature
from tests.helpers.models import Batch, Regression

pytestmark = pytest.mark.slow  # the whole table takes minutes

_GROUP = "Precision and compilation"


class _NotesTypes(Normalised):
    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.record(
            "type of gradients", {parameter.grad.dtype for parameter in self.parameters() if parameter.grad is not None}
        )
        self.record("precision", self.trainer.precision)


@feature(
    _GROUP,
    "`32-true`, `bf16-mixed`, `bf16-true`, `16-true`, `64-true`",
    tried="six steps, validation",
    outcome="same bits",
)
@feature(
    _GROUP,
    "`16-mixed` on CPU",
    tried="six steps",
    outcome="Lightning takes `bf16-mixed` instead, as with `ddp`; same bits",
)
@pytest.mark.parametrize(("precision", "used", "dtype"), [
    ("32-true", "32-true", torch.float32),
    ("64-true", "64-true", torch.float64),
    ("bf16-mixed", "bf16-mixed", torch.float32),
    ("bf16-true", "bf16-true", torch.bfloat16),
    ("16-true", "16-true", torch.float16),
    ("16-mixed", "bf16-mixed", torch.float32),
])  # fmt: skip
def test_precisions_that_a_cpu_has(precision: str, used: str, dtype: torch.dtype) -> None:
    ours, theirs = fit_both(_NotesTypes, precision=precision)
    assert_same(ours, theirs)
    for rank in ours:
        assert rank.records == {"type of gradients": [{dtype}] * 6, "precision": [used] * 6}


class _OverflowsOnRank1(Logged):
    """One batch of rank 1 has a gradient that float16 cannot hold."""

    def loss(self, batch: Batch) -> Tensor:
        loss = super().loss(batch)
        return loss * float("inf") if self.rank == 1 and self.global_step == 2 else loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        plugin = self.trainer.precision_plugin
        assert isinstance(plugin, MixedPrecision)
        assert plugin.scaler is not None
        self.record("scale", plugin.scaler.get_scale())


def _train_with_scaler(place: Place, clip: float | None) -> Result:
    module = _OverflowsOnRank1(place.rank)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    plugin = MixedPrecision("16-mixed", "cpu", scaler)
    trainer = place.trainer(plugins=[plugin], gradient_clip_val=clip, limit_val_batches=0)
    trainer.fit(module, place.shard())
    return result_of(trainer, module)


@feature(
    _GROUP,
    "`MixedPrecision` with a `GradScaler`",
    tried="float16 autocast on CPU, one gradient of rank 1 overflows; with and without clipping",
    outcome="both ranks skip the step and halve the scale; same bits",
)
@pytest.mark.parametrize("clip", [None, 0.05])
def test_a_gradient_scaler_skips_the_step_on_all_ranks(clip: float | None) -> None:
    ours, theirs = run_both(_train_with_scaler, clip)
    assert_same(ours, theirs)
    assert [rank.records["scale"] for rank in ours] == [[1024.0] * 2 + [512.0] * 4] * 2


def _fit_compiled(place: Place, backend: str, whole: bool) -> Result:
    inductor_config.compile_threads = 1  # in this process, and not in a pool that outlives the test
    torch._dynamo.reset()
    module = Regression(place.rank, normalised())
    if not whole:
        module.net.compile(backend=backend)
    trainer = place.trainer()
    compiled: Any = torch.compile(module, backend=backend) if whole else module
    trainer.fit(compiled, place.shard())
    counted = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    module.record("compiled", counted > 0)
    return result_of(trainer, module)


@feature(
    _GROUP,
    "`torch.compile`",
    tried="the whole LightningModule with `aot_eager` and with `inductor`, its network alone with `aot_eager`",
    outcome="same bits with `aot_eager`, within 1e-6 with `inductor`",
)
@pytest.mark.parametrize(("backend", "whole", "tolerance"), [
    ("aot_eager", True, 0.0),
    pytest.param("aot_eager", False, 0.0, marks=pytest.mark.slow),
    pytest.param("inductor", True, 1e-6, marks=pytest.mark.slow),
])  # fmt: skip
def test_compiled_modules(backend: str, whole: bool, tolerance: float) -> None:
    ours, theirs = run_both(_fit_compiled, backend, whole, timeout=110.0)
    assert_same(ours, theirs, tolerance)
    assert all(rank.records["compiled"] == [True] for rank in ours)
