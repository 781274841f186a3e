"""What is around the pipelined module: layers of its own, shared weights, hooks, batches that differ between ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.helpers.compare import result_of
from tests.helpers.pipelines import (
    SCHEDULES,
    Batch,
    Classification,
    Pipelined,
    assert_like_one_process,
    batches,
    fit_alone,
    fit_stages,
    layered,
    listed,
    run_alone,
    run_stages,
)

_LOAD = partial(batches, 12, 12, 3)


class _Surrounded(Classification):
    """Trains a layer before the pipelined module and one after it.

    Args:
        before: whether the first one trains.
        dropout: share of the pipelined module's outputs that is dropped.
    """

    def __init__(self, before: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        self.before = layered(2)[0].requires_grad_(before)
        self.after = nn.Sequential(nn.Dropout(dropout), nn.Tanh(), nn.Linear(4, 4, dtype=torch.float64))
        nn.init.eye_(self.after.get_parameter("2.weight"))
        nn.init.zeros_(self.after.get_parameter("2.bias"))
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))

    def loss(self, batch: Batch) -> Tensor:
        logits = self.after(self.net(self.before(batch[0]))) * self.scale
        return F.cross_entropy(logits, batch[1]) + 0.01 * self.before.get_parameter("bias").square().sum()

    def on_train_start(self) -> None:
        torch.manual_seed(5)  # where ranks meet, Lightning goes back to the seed that all began with


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("stages", "before", "checkpoint"),
    [
        (2, True, "except_last"),
        (3, True, "never"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [(2, False, "except_last"), (3, True, "always"), (3, False, "never"), (1, True, "never")]
        ),
    ],
)
def test_layers_before_and_after_the_pipelined_module_train(
    stages: int, before: bool, checkpoint: str, schedule: str
) -> None:
    """Symptom: they get the gradient of one stage, or that of all stages added up."""
    build = partial(_Surrounded, before)
    ranks = fit_stages(stages, build, _LOAD, module="net", chunks=4, schedule=schedule, checkpoint=checkpoint)
    assert_like_one_process(ranks, fit_alone(build, _LOAD))


def test_random_numbers_outside_of_the_pipelined_module() -> None:
    """Symptom: stages draw other dropout masks for the same rows, or other ones than one process."""
    build = partial(_Surrounded, dropout=0.4)
    ranks = fit_stages(3, build, _LOAD, module="net", chunks=4)
    assert_like_one_process(ranks, fit_alone(build, _LOAD))


@pytest.mark.parametrize("stages", [3, pytest.param(2, marks=pytest.mark.slow)])
def test_random_numbers_outside_of_the_pipelined_module_under_1f1b(stages: int) -> None:
    """Symptom: the same, where each micro-batch draws its own."""
    ranks = fit_stages(stages, partial(_Surrounded, dropout=0.4), _LOAD, module="net", chunks=4, schedule="1f1b")
    one = fit_stages(1, partial(_Surrounded, dropout=0.4), _LOAD, module="net", chunks=4, schedule="1f1b")
    assert_like_one_process(ranks, one[0])


class _NormalisesInputs(Classification):
    """A batch norm outside of the pipelined module."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8, dtype=torch.float64)

    def loss(self, batch: Batch) -> Tensor:
        return F.cross_entropy(self.net(self.norm(batch[0])), batch[1])

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), batch_size=len(batch[1]))


def test_a_batch_norm_outside_of_the_pipelined_module() -> None:
    """Symptom: its statistics are those of micro-batches."""
    ranks = fit_stages(2, _NormalisesInputs, _LOAD, module="net", chunks=4)
    assert_like_one_process(ranks, fit_alone(_NormalisesInputs, _LOAD))


@pytest.mark.parametrize("stages", [3, pytest.param(2, marks=pytest.mark.slow)])
def test_buffers_outside_of_the_pipelined_module_under_1f1b(stages: int) -> None:
    """Symptom: stages that run a training step only in part are left with statistics of their own."""
    ranks = fit_stages(stages, _NormalisesInputs, _LOAD, module="net", chunks=4, schedule="1f1b")
    one = fit_stages(1, _NormalisesInputs, _LOAD, module="net", chunks=4, schedule="1f1b")
    assert_like_one_process(ranks, one[0])


class _TiedLayers(nn.Module):
    """The last layer has the weight of the first one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = layered()[0], layered()[2]
        self.last = nn.Linear(8, 8, dtype=torch.float64, bias=False)
        self.last.weight = self.first.get_parameter("weight")

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.last(torch.tanh(self.second(torch.tanh(self.first(inputs)))))
        return output


class _Tied(Classification):
    def __init__(self) -> None:
        super().__init__(_TiedLayers())


class _TiedOutside(Classification):
    """A layer outside of the pipelined module has the weight of one inside."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 8, dtype=torch.float64)
        nn.init.constant_(self.head.bias, 0.1)
        self.head.weight = self.net.get_parameter("4.weight")

    def loss(self, batch: Batch) -> Tensor:
        # The head's weight is used transposed, after the module, and as it is, before it.
        inputs = batch[0] + F.linear(batch[0], self.head.weight).repeat(1, 2)
        return F.cross_entropy(F.linear(self.net(inputs), self.head.weight.t(), self.head.bias), batch[1])


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("build", [_Tied, _TiedOutside])
@pytest.mark.parametrize(
    ("stages", "checkpoint"),
    [(2, "except_last"), *(pytest.param(*c, marks=pytest.mark.slow) for c in [(3, "never"), (3, "always")])],
)
def test_tied_weights(stages: int, checkpoint: str, build: type[Classification], schedule: str) -> None:
    """Symptom: two layers that share a weight drift apart, or its gradient lacks one of them."""
    ranks = fit_stages(stages, build, _LOAD, module="net", chunks=4, schedule=schedule, checkpoint=checkpoint)
    assert_like_one_process(ranks, fit_alone(build, _LOAD))


class _Hooked(_Tied):
    """Tensor hooks on the parameters: they record the gradient, and double that of a bias.

    They are there before the module is cut, and are asked for by ``register_hook`` or
    ``register_post_accumulate_grad_hook``.
    """

    def __init__(self) -> None:
        super().__init__()
        for name, parameter in self.named_parameters():
            parameter.register_hook(partial(self.record, f"gradient of {name}"))  # type: ignore[no-untyped-call]
            parameter.register_post_accumulate_grad_hook(partial(self._note, name))  # type: ignore[no-untyped-call]
        bias = self.net.get_parameter("second.bias")
        bias.register_hook(lambda gradient: gradient * 2)  # type: ignore[no-untyped-call]

    def _note(self, name: str, parameter: Tensor) -> None:
        self.record(f"accumulated into {name}", parameter.grad)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_hooks_on_parameters_see_one_gradient_per_batch(schedule: str) -> None:
    """Symptom: hooks run once per micro-batch, on parts of the gradient."""
    ranks = fit_stages(2, _Hooked, _LOAD, chunks=4, schedule=schedule)
    alone = fit_alone(_Hooked, _LOAD)
    assert_like_one_process(ranks, alone)
    for rank in ranks:
        assert rank.records
        for name, seen in rank.records.items():
            torch.testing.assert_close(seen, alone.records[name], rtol=0.0, atol=1e-9)
    assert ranks[0].records.keys() | ranks[1].records.keys() == alone.records.keys()


class _Augmented(Classification):
    """Augments each batch with random numbers, and by something that is another one on each rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank = rank

    def on_train_start(self) -> None:
        torch.manual_seed(5)

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        return batch[0] + 0.1 * torch.randn_like(batch[0]) + 0.3 * self._rank, batch[1]

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        self.record("inputs", batch[0])
        return super().training_step(batch, batch_idx)


def _augmented(place: Pipelined) -> Any:
    """Train on data of which every rank reads a version of its own."""
    module, trainer = _Augmented(place.rank), place.trainer()
    trainer.fit(module, listed([(inputs + place.rank, labels) for inputs, labels in _LOAD()]), _LOAD())
    return result_of(trainer, module)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_all_stages_train_on_the_batch_of_the_first_one(schedule: str) -> None:
    """Symptom: labels and inputs belong to different augmentations."""
    ranks = run_stages(_augmented, 3, chunks=4, schedule=schedule)
    alone = run_alone(_augmented)
    assert_like_one_process(ranks, alone)
    if schedule == "gpipe":
        for rank in ranks:
            torch.testing.assert_close(rank.records, alone.records, rtol=0.0, atol=0.0)
