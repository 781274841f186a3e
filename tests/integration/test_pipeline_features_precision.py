"""Precision and compilation under a pipeline."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch._inductor import config as inductor_config

from tests.helpers.compare import Result, result_of
from tests.helpers.features import feature
from tests.helpers.pipelines import (
    Classification,
    Pipelined,
    assert_like_one_process,
    batches,
    fit_alone,
    fit_stages,
    layered,
    run_alone,
    run_stages,
)

pytestmark = pytest.mark.slow  # the whole table takes minutes

_GROUP = "Precision and compilation"

_LOAD = partial(batches, 12, 12, 12, dtype=torch.float32)


class _NotesTypes(Classification):
    def __init__(self) -> None:
        super().__init__(layered(dtype=torch.float32))

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.record("types", {parameter.grad.dtype for parameter in self.parameters() if parameter.grad is not None})
        self.record("precision", self.trainer.precision)


_PRECISIONS = [
    ("32-true", "32-true", torch.float32, 1e-6),
    ("64-true", "64-true", torch.float64, 1e-12),
    ("bf16-mixed", "bf16-mixed", torch.float32, 1e-2),
    ("bf16-true", "bf16-true", torch.bfloat16, 2e-2),
    ("16-true", "16-true", torch.float16, 2e-3),
    ("16-mixed", "bf16-mixed", torch.float32, 1e-2),
]


@feature(
    _GROUP,
    "`32-true`, `bf16-mixed`, `bf16-true`, `16-true`, `64-true`",
    tried="three steps, validation, one micro-batch and four, both schedules",
    outcome="with GPipe and one micro-batch the bits of one process; with four within 1e-6 (`32-true`), 1e-12 "
    "(`64-true`), 1e-2 (`bf16-mixed`), 2e-2 (`bf16-true`), 2e-3 (`16-true`)",
)
@feature(
    _GROUP, "`16-mixed` on CPU", tried="the same", outcome="Lightning takes `bf16-mixed` instead, as in one process"
)
@pytest.mark.parametrize(("precision", "used", "dtype", "tolerance"), _PRECISIONS)
@pytest.mark.parametrize(("schedule", "chunks"), [
    ("gpipe", 1),
    pytest.param("gpipe", 4, marks=pytest.mark.slow),
    pytest.param("1f1b", 4, marks=pytest.mark.slow),
])  # fmt: skip
def test_precisions_that_a_cpu_has(
    precision: str, used: str, dtype: torch.dtype, tolerance: float, schedule: str, chunks: int
) -> None:
    options = {"precision": precision}
    alone = fit_alone(_NotesTypes, _LOAD, options=options)
    ranks = fit_stages(2, _NotesTypes, _LOAD, options=options, chunks=chunks, schedule=schedule, balance=[2, 3])
    assert_like_one_process(ranks, alone, tolerance if chunks > 1 else 0.0)
    for result in (*ranks, alone):
        assert result.records == {"types": [{dtype}] * 3, "precision": [used] * 3}


class _Overflows(Classification):
    """The gradient of the first layer overflows in the third step, and no other."""

    def __init__(self) -> None:
        super().__init__(layered(dtype=torch.float32))

    def on_after_backward(self) -> None:
        gradient = self.net.get_parameter("0.weight").grad
        if self.trainer.fit_loop.batch_idx == 2 and gradient is not None:
            gradient[0, 0] = float("inf")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        plugin = self.trainer.precision_plugin
        assert isinstance(plugin, MixedPrecision)
        assert plugin.scaler is not None
        self.record("scale", plugin.scaler.get_scale())


def _train_with_scaler(place: Pipelined, clip: float | None) -> Result:
    module = _Overflows()
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0))
    trainer = place.trainer(plugins=[plugin], gradient_clip_val=clip)
    trainer.fit(module, batches(*[12] * 6, dtype=torch.float32))
    return result_of(trainer, module)


@feature(
    _GROUP,
    "`MixedPrecision` with a `GradScaler`",
    tried="float16 autocast on CPU, a gradient on the first of two stages overflows; with and without clipping",
    outcome="both stages skip the step and halve the scale; with one micro-batch the bits of one process, with three "
    "within 1e-3",
)
@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize(("schedule", "chunks"), [
    ("gpipe", 1),
    ("1f1b", 3),
    pytest.param("gpipe", 3, marks=pytest.mark.slow),
])  # fmt: skip
def test_a_gradient_scaler_skips_the_step_on_all_stages(schedule: str, chunks: int, clip: float | None) -> None:
    ranks = run_stages(_train_with_scaler, 2, clip, chunks=chunks, schedule=schedule, balance=[2, 3])
    alone = run_alone(_train_with_scaler, clip)
    assert_like_one_process(ranks, alone, 1e-3 if chunks > 1 else 0.0)
    assert all(result.records["scale"] == [1024.0] * 2 + [512.0] * 4 for result in (*ranks, alone))


def _fit_compiled(place: Pipelined, what: str, backend: str) -> Result:
    inductor_config.compile_threads = 1  # in this process, and not in a pool that outlives the test
    torch._dynamo.reset()
    module = Classification(
        nn.Sequential(layered(), nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)).double())
    )
    network: Any = module.net
    if what == "block":
        network[1].compile(backend=backend)
    elif what == "wrapped block":
        network[1] = torch.compile(network[1], backend=backend)
    elif what == "network":
        network.compile(backend=backend)
    trainer = place.trainer()
    compiled: Any = torch.compile(module, backend=backend) if what == "module" else module
    trainer.fit(compiled, batches(12, 12), batches(12))
    module.record("compiled", torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0)
    return result_of(trainer, module)


@feature(
    _GROUP,
    "`torch.compile` of parts",
    tried="a block of the network by `.compile()`, and wrapped; `aot_eager` and `inductor`",
    outcome="compiled, and kept together on one stage; like one process",
)
@feature(
    _GROUP,
    "`torch.compile` of the pipelined network",
    tried="`.compile()` with `aot_eager`",
    outcome="runs as it is, not compiled: compile its blocks; like one process",
)
@feature(
    _GROUP,
    "`torch.compile` of the LightningModule",
    tried="`aot_eager`",
    outcome="what is around the network is compiled, the network runs as it is; like one process",
)
@pytest.mark.parametrize(("what", "backend", "compiled"), [
    ("block", "aot_eager", True),
    pytest.param("block", "inductor", True, marks=pytest.mark.slow),
    pytest.param("wrapped block", "aot_eager", True, marks=pytest.mark.slow),
    pytest.param("network", "aot_eager", False, marks=pytest.mark.slow),
    pytest.param("module", "aot_eager", True, marks=pytest.mark.slow),
])  # fmt: skip
def test_compiled_modules(what: str, backend: str, compiled: bool) -> None:
    ranks = run_stages(_fit_compiled, 2, what, backend, chunks=2, timeout=110.0)
    assert_like_one_process(ranks, run_alone(_fit_compiled, what, backend, timeout=110.0))
    assert any(rank.records["compiled"] == [True] for rank in ranks) == compiled
