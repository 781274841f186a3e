"""1F1B on one stage: the loss that hands out gradients which are known already."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ringstrategy.pipeline.calls import Example, flatten_call
from ringstrategy.pipeline.engine import Engine
from ringstrategy.pipeline.micro_step import MicroSteps
from ringstrategy.pipeline.pipeline import Pipeline
from ringstrategy.pipeline.plan import PipelinePlan, choose_cut
from tests.helpers.pipelines import Classification, layered

CPU = torch.device("cpu")


def step() -> tuple[Classification, Tensor, list[Tensor]]:
    """A module, the loss of a batch in three micro-batches, and the gradients that it should lead to."""
    module = Classification(layered())
    batch = torch.randn(7, 8, dtype=torch.float64), torch.randint(4, (7,))
    module.loss(batch).backward()  # type: ignore[no-untyped-call]
    expected = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    module.zero_grad()
    chosen = choose_cut(module.net, 1, "size", Example(*flatten_call((batch[0],), {})), chunks=3)
    plan = PipelinePlan("net", module.net, chosen, module)
    pipeline = Pipeline(plan, Engine(0, {}), CPU, chunks=3, checkpoint="never")
    return module, MicroSteps(pipeline, module, "samples", CPU).run(module.loss, batch), expected


@pytest.mark.parametrize("factor", [1.0, 0.25])
def test_the_loss_hands_out_the_gradients_of_the_batch(factor: float) -> None:
    module, loss, expected = step()
    (loss * factor).backward()  # type: ignore[no-untyped-call]
    for parameter, gradient in zip(module.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient * factor)


def test_it_hands_them_out_once_more_where_the_graph_was_kept() -> None:
    module, loss, expected = step()
    loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
    loss.backward()  # type: ignore[no-untyped-call]
    for parameter, gradient in zip(module.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient * 2)
    with pytest.raises(RuntimeError, match="retain_graph=True"):
        loss.backward()  # type: ignore[no-untyped-call]
