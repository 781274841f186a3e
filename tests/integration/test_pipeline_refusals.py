"""What cannot be pipelined is refused by name, on every rank, and nobody waits for anybody."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor, nn

from ringstrategy import PipelineStrategy
from tests.helpers.pipelines import Batch, Classification, batches, fit_stages, layered
from tests.helpers.ranks import RanksFailedError
from tests.helpers.trainers import trainer_on_rank

_ARGUMENTS: list[tuple[dict[str, Any], str]] = [
    ({"chunks": 0}, "chunks=0 must be a whole number of at least 1"),
    ({"chunks": 2.5}, "chunks=2.5 must be a whole number"),
    ({"chunks": True}, "chunks=True must be a whole number"),
    ({"num_stages": 0}, "num_stages=0 must be a whole number of at least 1"),
    ({"checkpoint": "sometimes"}, "checkpoint='sometimes' is unknown; choose one of 'always'"),
    ({"schedule": "interleaved"}, "schedule='interleaved' is unknown; choose one of 'gpipe', '1f1b'"),
    ({"balance": "weight"}, "balance='weight' is unknown; choose 'size', 'time', 'memory'"),
    ({"micro_batch_weight": "mean"}, "micro_batch_weight='mean' is unknown; choose 'samples', 'sum'"),
]


@pytest.mark.parametrize(("arguments", "message"), _ARGUMENTS)
def test_arguments_without_meaning(arguments: dict[str, Any], message: str) -> None:
    """Symptom: an assertion deep inside, or a division by zero in the first step."""
    with pytest.raises(ValueError, match=message):
        PipelineStrategy(**arguments)


_PLACES: list[tuple[int, dict[str, Any], list[str]]] = [
    (2, {"balance": [2, 2, 1]}, ["[2, 2, 1]", "3 stages", "2"]),
    (3, {"balance": [2, 3]}, ["[2, 3]", "2 stages", "3"]),
    (2, {"balance": [5, 0]}, ["[5, 0]", "at least 1"]),
    (2, {"balance": [6, -1]}, ["[6, -1]", "at least 1"]),
    (2, {"balance": [2.5, 2.5]}, ["[2.5, 2.5]", "whole"]),
    (2, {"balance": [True, 4]}, ["[True, 4]", "whole"]),
    (4, {"num_stages": 3}, ["num_stages=3", "4 ranks", "multiple"]),
    (2, {"num_stages": 3}, ["num_stages=3", "2 ranks", "multiple"]),
]


@pytest.mark.parametrize(("ranks", "arguments", "parts"), _PLACES)
def test_numbers_that_do_not_fit_the_ranks(
    ranks: int, arguments: dict[str, Any], parts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Symptom: one rank raises, the others wait. Here no other rank exists, so whoever waits for one fails."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # Lightning sets it where it is not set
    trainer = trainer_on_rank(0, ranks, strategy=PipelineStrategy(**arguments))
    with pytest.raises(ValueError, match=r".") as refusal:
        trainer.fit(Classification(), batches(12), batches(12))
    assert all(part in str(refusal.value) for part in parts), refusal.value


class _Untraceable(nn.Module):
    """Decides by values what it does."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = layered()[0], layered()[4]

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.one(inputs)
        if hidden.sum() > 0:
            hidden = -hidden
        output: Tensor = self.two(hidden)
        return output


class _TwoModules(Classification):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(8, 8)


class _NoModule(Classification):
    def __init__(self) -> None:
        super().__init__(nn.Identity())
        self.weight = nn.Parameter(torch.zeros(8, 4))


class _NeverCalls(Classification):
    """Uses what it trains, but not by calling the pipelined module."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 4, dtype=torch.float64)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.head(batch[0]), batch[1])


class _Manual(Classification):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class _OptimisesMore(Classification):
    """Trains a parameter that is no parameter of the module."""

    def configure_optimizers(self) -> Any:
        self.hidden = [nn.Parameter(torch.ones((), dtype=torch.float64))]
        return torch.optim.SGD([*self.parameters(), *self.hidden], lr=0.1)


def _lbfgs(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(parameters)


def _three_layers() -> Classification:
    return Classification(nn.Sequential(*layered()[:2], layered()[4]))


def _untraceable() -> Classification:
    return Classification(_Untraceable())


_MODULES: dict[str, tuple[int, Any, dict[str, Any], list[str]]] = {
    "too few layers in the balance": (2, Classification, {"balance": [2, 2]}, ["4 layers", "has 5", ": 0, 1, 2, 3, 4"]),
    "too many layers in the balance": (2, Classification, {"balance": [3, 3]}, ["[3, 3]", "6 layers", "has 5"]),
    "more stages than layers": (4, _three_layers, {}, ["3 layers", "4 stages"]),
    "untraceable": (2, _untraceable, {}, ["_Untraceable", "if hidden.sum() > 0", "module="]),
    "no module": (2, _NoModule, {}, ["_NoModule", "module="]),
    "two modules": (2, _TwoModules, {}, ["_TwoModules", "net, other", "module="]),
    "no such module": (2, Classification, {"module": "network"}, ["'network'", "net"]),
    "optimizer over products": (2, partial(Classification, optimizer=_lbfgs), {}, ["LBFGS", "ring_ddp"]),
    "optimizer over other parameters": (2, _OptimisesMore, {}, ["SGD", "no parameter of _OptimisesMore"]),
    "manual optimization": (2, _Manual, {"schedule": "1f1b"}, ["manual optimization", "gpipe"]),
    "never called": (2, _NeverCalls, {"module": "net", "schedule": "1f1b"}, ["_NeverCalls", "'net'", "module="]),
}


_SIMILAR = ("too many layers in the balance", "two modules", "no such module")


@pytest.mark.parametrize(
    "what", [pytest.param(what, marks=pytest.mark.slow if what in _SIMILAR else ()) for what in _MODULES]
)
def test_modules_that_cannot_be_pipelined(what: str) -> None:
    """Symptom: the real error is on rank 0 alone, or nowhere, and the others wait."""
    stages, build, arguments, parts = _MODULES[what]
    with pytest.raises(RanksFailedError) as refusal:
        fit_stages(stages, build, **arguments)
    # A rank that has yet to hear it from rank 0 may hear first that another one has refused, and why.
    for outcome in refusal.value.outcomes:
        assert outcome.error_type in ("ValueError", "UntraceableError", "RankFailure"), outcome.error
        message = str(outcome.error).rpartition("Error: ")[2]
        assert all(part in message for part in parts), message


def test_a_graph_of_the_whole_module_is_refused_before_anything_is_cut(tmp_path: Path) -> None:
    """Symptom: a TypeError out of a tracer, when training has begun."""
    options = {"logger": TensorBoardLogger(tmp_path, log_graph=True)}
    with pytest.raises(RanksFailedError) as refusal:
        fit_stages(2, Classification, options=options)
    for outcome in refusal.value.outcomes:
        assert "ValueError: A logger with log_graph=True" in str(outcome.error), outcome.error


def test_the_logger_of_a_fast_dev_run_is_none_that_draws(tmp_path: Path) -> None:
    """Symptom: refused like a logger that draws the graph, for it answers to every name."""
    options = {"fast_dev_run": 1, "logger": TensorBoardLogger(tmp_path)}
    assert len(fit_stages(2, options=options)) == 2


class _CallsTwice(Classification):
    def loss(self, batch: Batch) -> Tensor:
        return super().loss(batch) + super().loss(batch)


class _SometimesNone(Classification):
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        loss = self.loss(batch)
        return loss if batch[1][0] > 1 else None


class _DifferentiatesTwice(Classification):
    """A penalty on the gradient of the inputs."""

    def loss(self, batch: Batch) -> Tensor:
        inputs = batch[0].clone().requires_grad_()
        loss = F.cross_entropy(self.net(inputs), batch[1])
        (gradient,) = torch.autograd.grad(loss, inputs, create_graph=True)
        return loss + gradient.square().sum()


class _PenalisesGradients(Classification):
    """The same penalty on the gradient of the outputs, which is computed from a constant."""

    def loss(self, batch: Batch) -> Tensor:
        inputs = batch[0].clone().requires_grad_()
        output = self.net(inputs)
        (gradient,) = torch.autograd.grad(output, inputs, torch.ones_like(output), create_graph=True)
        return F.cross_entropy(output, batch[1]) + gradient.square().sum()


class _UsesWeights(Classification):
    """Asks for a weight that another stage holds."""

    def loss(self, batch: Batch) -> Tensor:
        return super().loss(batch) + self.net.get_parameter("0.weight").square().sum()


_STEPS: dict[str, tuple[Any, str, str]] = {
    "two calls": (_CallsTwice, "1f1b", "training_step calls the pipelined module more than once"),
    "a loss for some micro-batches": (_SometimesNone, "1f1b", "a loss for some micro-batches"),
    "a gradient of a gradient": (_DifferentiatesTwice, "gpipe", "differentiate twice"),
    "a gradient penalty": (_PenalisesGradients, "gpipe", "differentiate twice"),
    "weights of other stages": (_UsesWeights, "gpipe", "does not hold parameter 'net.0.weight' (stage 0 does)"),
}


@pytest.mark.parametrize("what", _STEPS)
def test_steps_that_cannot_be_pipelined(what: str) -> None:
    """Symptom: a wrong gradient, or a stage that waits for a message that nobody sends."""
    build, schedule, message = _STEPS[what]
    with pytest.raises(RanksFailedError) as refusal:
        fit_stages(2, build, chunks=4, schedule=schedule)
    for outcome in refusal.value.outcomes:
        assert message in str(outcome.error), outcome.error
