"""What layers cost."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ringstrategy.pipeline.calls import flatten_call
from ringstrategy.pipeline.costs import LayerCost, balance_costs, measure, parameter_bytes
from ringstrategy.pipeline.tracing import Trace, common_layers, trace
from tests.helpers.cut_models import Convolutions, Counts, InPlace, Skips, Structures, Tied

MIB = 1024 * 1024


def _trace(module: nn.Module, *args: object) -> tuple[Trace, list[Tensor]]:
    tensors, call = flatten_call(args, {})
    return trace(module, call), tensors


class Slow(nn.Module):
    """Takes longer than its neighbours, in one direction or in both."""

    def __init__(self, forward: int, backward: int) -> None:
        super().__init__()
        self.work = forward, backward

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.work[0]):
            torch.mm(x.detach(), x.detach())
        result: Tensor = Worker.apply(x, self.work[1])
        return result


class Worker(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, work: int) -> Tensor:
        ctx.work = work  # type: ignore[attr-defined]
        return x * 1

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *gradients: Tensor) -> tuple[Tensor, None]:
        for _ in range(ctx.work):  # type: ignore[attr-defined]
            torch.mm(gradients[0], gradients[0])
        return gradients[0], None


def test_times_are_those_of_the_layer_alone() -> None:
    module = nn.Sequential(nn.Linear(128, 128), Slow(40, 0), Slow(0, 40), Slow(40, 40), nn.Tanh())
    costs = measure(*_trace(module, torch.rand(128, 128)), repeats=15)
    slow_forward = min(costs[1].forward, costs[3].forward)
    slow_backward = min(costs[2].backward, costs[3].backward)
    assert max(costs[number].forward for number in (0, 2, 4)) < slow_forward / 2
    assert max(costs[number].backward for number in (0, 1, 4)) < slow_backward / 2
    assert all(cost.forward > 0 and cost.backward > 0 for cost in costs)


class Wide(nn.Module):
    """A value of 1 MiB that skips a layer, and saved activations that can be counted."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Linear(256, 512), nn.Tanh(), nn.Linear(512, 256)

    def forward(self, x: Tensor) -> Tensor:
        skipped = self.one(x)
        h = self.two(skipped)
        return torch.add(self.three(h), F.avg_pool1d(skipped, 2))


def test_bytes() -> None:
    costs = measure(*_trace(Wide(), torch.rand(512, 256)))
    assert [cost.output_bytes for cost in costs] == [MIB, 2 * MIB, MIB // 2]
    # The tensors of the call are no activations; what two layers save counts once.
    assert [cost.activation_bytes for cost in costs] == [0, MIB, MIB]
    assert [cost.parameter_bytes for cost in costs] == [(256 + 1) * 512 * 4, 0, (512 + 1) * 256 * 4]


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        (Skips(), (torch.rand(3, 4),)),
        (InPlace(), (torch.rand(3, 4),)),
        (Convolutions(), (torch.rand(3, 2, 8, 8),)),
        (Tied(), (torch.tensor([[1, 2]]),)),
        (Structures(), ({"x": torch.rand(2, 3, 4), "n": torch.arange(3)}, (torch.rand(2, 3, 4), None))),
        (nn.Sequential(nn.Linear(4, 4), Counts(), nn.Dropout()), (torch.rand(3, 4),)),
    ],
)
def test_measuring_changes_nothing(module: nn.Module, arguments: tuple[object, ...]) -> None:
    next(module.parameters()).grad = torch.ones_like(next(module.parameters()))
    found, inputs = _trace(module, *arguments)
    before = copy.deepcopy((module.state_dict(), inputs, torch.get_rng_state()))
    with torch.no_grad():
        costs = measure(found, inputs)
    assert len(costs) == len(found.layers)
    after = module.state_dict(), inputs, torch.get_rng_state()
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    gradients = [parameter.grad for parameter in module.parameters()]
    assert gradients[0] is not None
    assert gradients[0].eq(1).all()
    assert all(gradient is None for gradient in gradients[1:])
    if isinstance(module, nn.Sequential):
        assert module[1].calls == 0


def test_what_lies_between_layers_goes_with_the_one_before() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 8))
    found, inputs = _trace(module, torch.rand(2, 4))
    layers = common_layers([found])
    merged = [layers[0], layers[2]]
    costs = measure(found, inputs, merged)
    assert [cost.output_bytes for cost in costs] == [2 * 4 * 4, 2 * 8 * 4]


def test_nothing_needs_a_gradient() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).requires_grad_(False)
    costs = measure(*_trace(module, torch.rand(2, 4)))
    assert [cost.backward for cost in costs] == [0.0, 0.0]
    assert [cost.activation_bytes for cost in costs] == [0, 0]


def test_sizes_are_known_without_memory() -> None:
    module = Tied().to("meta")
    found, _ = _trace(module, torch.zeros(1, 2, dtype=torch.long))
    assert [parameter_bytes(module, layer) for layer in found.layers] == [7 * 4 * 4, 5 * 4 * 4, 0, 7 * 4 * 4]


def test_costs_of_a_balance() -> None:
    costs = [LayerCost(1.0, 2.0, 100, 10, 7), LayerCost(0.5, 0.25, 40, 20, 3)]
    assert balance_costs("time", costs, bytes_per_second=50.0) == ([3.0, 0.75], [4.0, 1.6])
    assert balance_costs("time", costs, recompute=True)[0] == [4.0, 1.25]
    assert balance_costs("size", costs) == ([7.0, 3.0], [0.0, 0.0])
    assert balance_costs("memory", costs, micro_batches=4) == ([4 * 7 + 4 * 10.0, 4 * 3 + 4 * 20.0], [0.0, 0.0])
    assert balance_costs("memory", costs, micro_batches=4, recompute=True)[0] == [4 * 7 + 10.0, 4 * 3 + 20.0]
