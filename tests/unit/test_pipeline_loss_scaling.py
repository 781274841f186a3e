"""One overflow on any stage skips the step on all of them."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import SGD, Adam, Optimizer

from ringstrategy.pipeline.clipping import Combine
from ringstrategy.pipeline.loss_scaling import SharedOverflow
from tests.helpers.stage_threads import run_stage_threads

_OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "sgd": lambda parameters: SGD(parameters, lr=0.1),
    "unscales by itself": lambda parameters: Adam(parameters, lr=0.1, fused=True),
}
_STEPS = 6
_OVERFLOWS = {1: 0, 2: 2, 4: 2}  # on which stage, by step; in step 4 nobody but the last stage has a gradient


def _scaler() -> GradScaler:
    return GradScaler("cpu", init_scale=8.0, growth_interval=2)


def _parameters(stage: int) -> list[nn.Parameter]:
    """The middle stage has none that ever gets a gradient."""
    sizes = {0: [3, 2], 1: [4], 2: [5]}[stage]
    return [nn.Parameter(torch.arange(1.0, size + 1, dtype=torch.float64)) for size in sizes]


def _backward(parameters: list[nn.Parameter], scaler: GradScaler, stage: int, step: int) -> None:
    """Gradients of the squares of this stage's parameters, scaled, in the steps in which it has any."""
    scaled = scaler.scale(torch.ones((), dtype=torch.float64))  # on all stages: all of them have the loss
    for parameter in parameters:
        if stage != 1 and not (step == 4 and stage == 0):
            parameter.grad = 2 * parameter.detach() * scaled
            if _OVERFLOWS.get(step) == stage:
                parameter.grad[-1] = math.inf if step % 2 else math.nan


def _train(
    build: Callable[[list[nn.Parameter]], Optimizer], unscale: bool, stages: list[int], combine: Combine | None
) -> tuple[list[list[Tensor]], list[float]]:
    """Train what these stages hold; parameters and scale after each step."""
    held = {stage: _parameters(stage) for stage in stages}
    optimizer = build([parameter for own in held.values() for parameter in own])
    scaler = _scaler()
    shared = None if combine is None else SharedOverflow(scaler, combine)
    seen, scales = [], []
    for step in range(_STEPS):
        optimizer.zero_grad()
        for stage, own in held.items():
            _backward(own, scaler, stage, step)
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        seen.append([parameter.detach().clone() for own in held.values() for parameter in own])
        scales.append(scaler.get_scale())
    if shared is not None:
        shared.close()
    return seen, scales


@pytest.mark.parametrize(
    ("name", "unscale"), [("sgd", True), ("sgd", False), ("unscales by itself", False)], ids=lambda value: str(value)
)
def test_stages_step_and_scale_as_the_whole(name: str, unscale: bool) -> None:
    build = _OPTIMIZERS[name]
    whole, expected_scales = _train(build, unscale, [0, 1, 2], combine=None)
    assert len(set(expected_scales)) > 2, "the scale must have gone up and down"
    results = run_stage_threads(3, lambda stage, combine: _train(build, unscale, [stage], combine))
    assert [scales for _, scales in results] == [expected_scales] * 3
    for step, expected in enumerate(whole):
        together = [parameter for seen, _ in results for parameter in seen[step]]
        torch.testing.assert_close(together, expected, rtol=1e-14, atol=0.0)


def test_torch_alone_refuses_a_stage_without_gradients() -> None:
    """Why a stage must take part whose optimizer has nothing to look at."""
    with pytest.raises(AssertionError, match="No inf checks were recorded"):
        _train(_OPTIMIZERS["sgd"], True, [1], combine=None)


def test_several_optimizers_agree_each_for_itself() -> None:
    def work(stage: int, combine: Combine) -> tuple[list[float], float]:
        scaler = _scaler()
        shared = SharedOverflow(scaler, combine)
        parameters = [nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))]
        optimizers = [SGD([parameter], lr=1.0) for parameter in parameters]
        scaler.scale(torch.ones(()))
        parameters[0].grad = torch.tensor([8.0])
        if stage == 1:
            parameters[1].grad = torch.tensor([math.inf])
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
        scaler.update()
        shared.close()
        return [parameter.item() for parameter in parameters], scaler.get_scale()

    assert run_stage_threads(2, work) == [([0.0, 1.0], 4.0)] * 2


def test_close_leaves_the_scaler_as_it_was() -> None:
    scaler = _scaler()
    before = dict(scaler.__dict__)
    shared = SharedOverflow(scaler, lambda tensor, _: tensor)
    assert scaler.__dict__.keys() != before.keys()
    shared.close()
    shared.close()
    assert scaler.__dict__ == before
