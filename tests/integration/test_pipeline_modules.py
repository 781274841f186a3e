"""Modules of many kinds are cut and trained like any other."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from tests.helpers.pipelines import (
    SCHEDULES,
    Batch,
    Classification,
    assert_like_one_process,
    batches,
    fit_alone,
    fit_stages,
    layered,
)


class _OwnForward(Classification):
    """Has layers of its own and a ``forward``, and no other module that could be pipelined."""

    def __init__(self) -> None:
        super().__init__(nn.Identity())
        self.first, self.second, self.third = layered()[0], layered()[2], layered()[4]

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.third(torch.tanh(self.second(torch.tanh(self.first(inputs)))))
        return output

    def loss(self, batch: Batch) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), batch_size=len(batch[1]))


class _Deep(_OwnForward):
    """The pipelined module lies deep within the LightningModule, and returns what a head outside of it takes."""

    def __init__(self) -> None:
        Classification.__init__(self, nn.Identity())
        self.model = nn.ModuleDict({"backbone": layered(), "head": nn.Linear(4, 4, dtype=torch.float64)})
        nn.init.eye_(self.model["head"].get_parameter("weight"))
        nn.init.zeros_(self.model["head"].get_parameter("bias"))

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.model["head"](self.model["backbone"](inputs))
        return output


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.embedding, self.lstm, self.head = nn.Linear(8, 6), nn.LSTM(6, 5, 2, batch_first=True), nn.Linear(5, 4)
        self.double()

    def forward(self, inputs: Tensor) -> Tensor:
        sequence, (last, _) = self.lstm(self.embedding(inputs[:, None].repeat(1, 3, 1)))
        output: Tensor = self.head(sequence[:, 0]) + last[-1, :, :4]
        return output


class _Sparse(nn.Module):
    """An embedding whose gradient is sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layers = nn.Embedding(6, 8, dtype=torch.float64, sparse=True), layered()
        nn.init.constant_(self.embedding.weight, 0.3)

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.layers(self.embedding((inputs > 0).sum(1).clamp(max=5)) + inputs)
        return output


class _Checkpointed(nn.Module):
    """Recomputes some of its layers by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layered()

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = checkpoint(self.layers[1:3], self.layers[0](inputs), use_reentrant=False)
        output: Tensor = self.layers[4](checkpoint(self.layers[3], hidden, use_reentrant=False))
        return output


def _parametrized() -> nn.Module:
    """Layers whose weights are computed from others, in the new way and in the old one."""
    layers = layered()
    with torch.random.fork_rng(), warnings.catch_warnings():
        torch.manual_seed(1)
        warnings.simplefilter("ignore", FutureWarning)
        old: Any = nn.utils.weight_norm
        return nn.Sequential(
            parametrizations.weight_norm(layers[0]), layers[1], old(layers[2]), layers[3],
            parametrizations.orthogonal(nn.Linear(8, 8, dtype=torch.float64)), layers[4],
        )  # fmt: skip


def _hooked() -> nn.Module:
    """Hooks of the user's change what goes in and out, forwards and backwards."""
    net = layered()
    net.register_forward_pre_hook(_halve)
    net.register_forward_hook(_widen)
    net[2].register_full_backward_hook(_double)
    return net


def _halve(module: nn.Module, args: Any) -> Any:
    return (args[0] * 0.5,)


def _widen(module: nn.Module, args: Any, output: Any) -> Any:
    return output * 1.5


def _double(module: nn.Module, grad_input: Any, grad_output: Any) -> Any:
    return (grad_input[0] * 2,)


_BUILDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "own forward": (_OwnForward, {"balance": [2, 1]}),
    "deep": (_Deep, {"module": "model.backbone"}),
    "recurrent": (_Recurrent, {"balance": [1, 2]}),
    "parametrized": (_parametrized, {"balance": [2, 4]}),
    "sparse": (_Sparse, {"balance": [1, 5]}),
    "checkpointed": (_Checkpointed, {"balance": [2, 3]}),
    "hooked": (_hooked, {"balance": [2, 3]}),
}
_QUICK = [("own forward", "gpipe"), ("recurrent", "gpipe"), ("parametrized", "1f1b"), ("hooked", "1f1b")]


def _build(what: str) -> Classification:
    made = _BUILDS[what][0]()
    return made if isinstance(made, Classification) else Classification(made)


@pytest.mark.parametrize(
    ("what", "schedule"),
    [
        pytest.param(what, schedule, marks=() if (what, schedule) in _QUICK else pytest.mark.slow)
        for what in _BUILDS
        for schedule in SCHEDULES
    ],
)
def test_modules_of_many_kinds(what: str, schedule: str) -> None:
    """Symptom: a module that trains in one process cannot be cut, or trains to other weights."""
    load = partial(batches, 12, 12, 3)
    ranks = fit_stages(2, partial(_build, what), load, chunks=4, schedule=schedule, **_BUILDS[what][1])
    assert_like_one_process(ranks, fit_alone(partial(_build, what), load))


class _Drifting(nn.Module):
    """Divides by a running mean, which it replaces, and counts in place how often."""

    scale: Tensor
    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(1, dtype=torch.float64))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
            self.scale = 0.7 * self.scale + 0.3 * inputs.detach().abs().mean()
        return inputs / self.scale * (1 + 0.1 * self.calls)


def _drifting() -> Classification:
    layers = layered()
    return Classification(
        nn.Sequential(_Drifting(), parametrizations.spectral_norm(layers[0]), layers[1], _Drifting(), *layers[2:])
    )


class _InMicroBatches(Classification):
    """Calls its network for one micro-batch after the other, in one process."""

    def loss(self, batch: Batch) -> Tensor:
        return F.cross_entropy(torch.cat([self.net(part) for part in batch[0].chunk(4)]), batch[1])


def _drifting_in_micro_batches() -> Classification:
    return _InMicroBatches(_drifting().net)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
def test_buffers_that_a_forward_changes_are_the_same_when_it_is_run_again(checkpoint: str, schedule: str) -> None:
    """Symptom: gradients belong to other values than the forward had, and counters count twice."""
    ranks = fit_stages(2, _drifting, chunks=4, balance=[3, 4], checkpoint=checkpoint, schedule=schedule)
    assert_like_one_process(ranks, fit_alone(_drifting_in_micro_batches))
