"""What a stage computes, without other stages: gradients of micro-batches become those of the batch."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ringstrategy.pipeline.calls import flatten_call
from ringstrategy.pipeline.programs import cut
from ringstrategy.pipeline.stage import CheckpointMode, Pass, StageCode
from ringstrategy.pipeline.tracing import trace


class Positions(nn.Module):
    """The gradients of both parameters, and of the input, are one and the same tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.randn(1, 3))
        self.other = nn.Parameter(torch.randn(1, 3))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.one + self.other


class Lookup(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 3, sparse=True)

    def forward(self, inputs: Tensor) -> Tensor:
        rows: Tensor = self.table(inputs)
        return rows.sin()


def run(module: nn.Module, micro_batches: list[Tensor], checkpoint: CheckpointMode = "never") -> Pass:
    """All forwards, then all backwards of the outputs' sum."""
    code = StageCode(cut(trace(module, flatten_call((micro_batches[0],), {})[1]), [])[0], list(module.parameters()))
    part = Pass(code, [[each] for each in micro_batches], checkpoint, lambda *_: contextlib.nullcontext(), True)
    outputs = [part.forward(number, []) for number in range(len(micro_batches))]
    for number in reversed(range(len(micro_batches))):
        part.backward(number, [torch.ones_like(outputs[number][0])])
    return part


@pytest.mark.parametrize("checkpoint", ["never", "except_last", "always"])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_gradients_add_up(count: int, checkpoint: CheckpointMode) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    inputs = torch.randn(6, 4, dtype=torch.float64)
    part = run(module, list(inputs.chunk(count)), checkpoint)
    module(inputs).sum().backward()
    for found, parameter in zip(part.take_gradients(), module.parameters(), strict=True):
        torch.testing.assert_close(found, parameter.grad)
    assert part.take_gradients() == [None] * 4


def test_a_gradient_that_several_share_is_not_added_to() -> None:
    micro_batches = [torch.randn(1, 3, requires_grad=True) for _ in range(3)]
    part = run(Positions(), micro_batches)
    for gradient in part.take_gradients():
        assert torch.equal(gradient, torch.full((1, 3), 3.0))  # type: ignore[arg-type]
    assert all(torch.equal(row[0], torch.ones(1, 3)) for row in part.input_gradients)  # type: ignore[arg-type]


def test_sparse_gradients_add_up() -> None:
    module = Lookup()
    inputs = torch.tensor([[0, 1], [1, 4], [4, 4]])
    found = run(module, list(inputs.chunk(3))).take_gradients()[0]
    module(inputs).sum().backward()
    assert found is not None
    assert found.is_sparse
    torch.testing.assert_close(found.to_dense(), module.table.weight.grad.to_dense())  # type: ignore[union-attr]


def test_no_hook_of_a_parameter_sees_a_micro_batch() -> None:
    module = nn.Linear(2, 2)
    seen: list[Tensor] = []
    handle = module.weight.register_hook(seen.append)  # type: ignore[no-untyped-call]
    run(module, list(torch.randn(4, 2).chunk(4)))
    assert not seen
    module(torch.ones(1, 2)).sum().backward()
    assert len(seen) == 1
    handle.remove()


def test_a_backward_does_not_hold_all_gradients_beside_their_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[list[Tensor | None]] = []

    def watched(*args: Any, **options: Any) -> Any:
        gradients = differentiate(*args, **options)
        found.append(list(gradients))
        return gradients

    differentiate = torch.autograd.grad
    monkeypatch.setattr(torch.autograd, "grad", watched)
    part = run(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), list(torch.randn(3, 4).chunk(3)))
    sums = [gradient.data_ptr() for gradient in part.take_gradients() if gradient is not None]
    assert len(found) == 3
    for gradients in found[1:]:  # those of the first are its own
        assert [gradient.data_ptr() for gradient in gradients if gradient is not None] == sums
