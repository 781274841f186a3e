"""Training over stages: losses, gradients, clipping and random numbers are those of one process."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.helpers.assertions import assert_ranks_identical
from tests.helpers.compare import Result, result_of
from tests.helpers.models import sgd
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
    run_stages,
)

_LOAD = partial(batches, 12, 12, 3)


class _Summed(Classification):
    def loss(self, batch: Batch) -> Tensor:
        loss = F.cross_entropy(self.net(batch[0]), batch[1], reduction="sum")
        self.log("number", loss.item(), batch_size=len(batch[1]))
        return loss


class _PartlyLabelled(Classification):
    """Labels single positions of sequences."""

    def loss(self, batch: Batch) -> Tensor:
        loss = F.cross_entropy(self.net(batch[0]).flatten(0, 1), batch[1].flatten())
        self.log("number", loss.item(), batch_size=len(batch[1]))
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        pass


def _positions() -> DataLoader[Any]:
    """Sequences of five positions, few of which count: none in the first rows, all in the last ones."""
    generator = torch.Generator().manual_seed(4)
    items = []
    for inputs, _ in batches(12, 12, 3, shape=(5, 8)):
        labels = torch.randint(4, inputs.shape[:2], generator=generator)
        rows = torch.linspace(0, 1, len(inputs))[:, None]
        ignored = torch.rand(labels.shape, generator=generator) > 2 * rows - 0.7
        items.append((inputs, labels.masked_fill(ignored, -100)))
    return listed(items)


def _labelled(micro_batch: Batch) -> float:
    return float((micro_batch[1] != -100).sum())


@pytest.mark.parametrize(
    ("schedule", "arguments"), [("gpipe", {}), ("1f1b", {"micro_batch_weight": "sum"})], ids=SCHEDULES
)
@pytest.mark.parametrize("stages", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_loss_that_is_a_sum(stages: int, schedule: str, arguments: dict[str, Any]) -> None:
    """Symptom: gradients too small by the number of micro-batches."""
    ranks = fit_stages(stages, _Summed, _LOAD, chunks=4, schedule=schedule, **arguments)
    assert_like_one_process(ranks, fit_alone(_Summed, _LOAD))


@pytest.mark.parametrize(
    ("schedule", "arguments"), [("gpipe", {}), ("1f1b", {"micro_batch_weight": _labelled})], ids=SCHEDULES
)
@pytest.mark.parametrize("stages", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_mean_over_positions_that_count(stages: int, schedule: str, arguments: dict[str, Any]) -> None:
    """Symptom: a mean of means of micro-batches, which weighs their labels unevenly."""
    counts = [[_labelled((inputs, labels)) for inputs, labels in zip(*(torch.split(t, 3) for t in batch), strict=True)]
              for batch in _positions()]  # fmt: skip
    assert counts[0][0] == 0, "one micro-batch is to have no label"
    assert len(set(counts[0])) == 4, "micro-batches are to have different numbers of labels"
    ranks = fit_stages(stages, _PartlyLabelled, _positions, chunks=4, schedule=schedule, **arguments)
    assert_like_one_process(ranks, fit_alone(_PartlyLabelled, _positions))


class _Unseeded(Classification):
    """Every rank makes another network."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)))

    def on_train_start(self) -> None:
        self.records["held"] = [{name: p.detach().clone() for name, p in self.named_parameters() if not p.is_meta}]


def _start(place: Pipelined, seed: int) -> tuple[dict[str, Tensor], list[str]]:
    """Build the module after a seed that differs between ranks, but for rank 0; what is held when training starts."""
    pl.seed_everything(seed + place.rank, verbose=False)
    module = _Unseeded()
    place.trainer(max_steps=1).fit(module, batches(6, dtype=torch.float32))
    (held,) = module.records["held"]
    return held, list(held)


def test_training_starts_from_the_weights_of_the_unpartitioned_module() -> None:
    """Symptom: every stage has initial weights of its own making."""
    ranks = run_stages(_start, 2, 17, balance=[2, 1])
    with torch.random.fork_rng():
        torch.manual_seed(17)
        whole = {name: p.detach() for name, p in _Unseeded().named_parameters()}
    assert [names for _, names in ranks] == [["net.0.weight", "net.0.bias"], ["net.2.weight", "net.2.bias"]]
    assert_ranks_identical([{**ranks[0][0], **ranks[1][0]}, whole])


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("stages", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_accumulation_over_batches_and_micro_batches(stages: int, schedule: str) -> None:
    """Symptom: gradients are rescaled at every accumulated batch, or summed."""
    options = {"accumulate_grad_batches": 3}
    load = partial(batches, 8, 8, 8, 8, 8, 8, 3)
    build = partial(Classification, optimizer=sgd)
    ranks = fit_stages(stages, build, load, options=options, chunks=2, schedule=schedule)
    assert_like_one_process(ranks, fit_alone(build, load, options=options))
    assert ranks[0].global_step == 3


def _momentum_and_decay(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)


def _adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.02, weight_decay=0.05)


class _Scheduled(Classification):
    def configure_optimizers(self) -> Any:
        optimizer = self._optimizer(self.parameters())
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=6)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("optimizer", [pytest.param(_momentum_and_decay, marks=pytest.mark.slow), _adamw])
def test_optimizers_with_a_learning_rate_schedule(optimizer: Any, schedule: str) -> None:
    """Symptom: moments or learning rates differ between stages."""
    build, options = partial(_Scheduled, optimizer=optimizer), {"max_epochs": 2}
    ranks = fit_stages(3, build, _LOAD, options=options, chunks=4, schedule=schedule)
    assert_like_one_process(ranks, fit_alone(build, _LOAD, options=options))


class _Dropout(Classification):
    """Records masks, and the state of the global generator after each batch."""

    def __init__(self) -> None:
        layers = layered()
        super().__init__(nn.Sequential(layers[0], nn.Dropout(0.5), *layers[1:]))

    def on_train_start(self) -> None:
        dropout = self.net.get_submodule("1")
        dropout.register_forward_hook(lambda layer, args, output: self.record("mask", output == 0))

    def on_train_batch_end(self, *args: Any) -> None:
        self.record("generator", torch.get_rng_state())


def _train_in_every_mode(place: Pipelined) -> list[Result]:
    results = []
    for mode in ("never", "never", "except_last", "always"):
        pl.seed_everything(3, verbose=False)
        module = _Dropout()
        trainer = replace(place, arguments={**place.arguments, "checkpoint": mode}).trainer()
        trainer.fit(module, batches(12, 12))
        results.append(result_of(trainer, module))
    return results


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_recomputation_draws_the_same_dropout_masks(schedule: str) -> None:
    """Symptom: the gradient belongs to other masks than the loss."""
    ranks = run_stages(_train_in_every_mode, 2, chunks=4, schedule=schedule, balance=[3, 3])
    runs = [run for rank in ranks for run in rank]
    assert_ranks_identical([run.state for run in runs])
    assert_ranks_identical([run.metrics for run in runs])
    assert_ranks_identical([{str(n): state for n, state in enumerate(run.records["generator"])} for run in runs])
    never, _, except_last, always = (run.records["mask"] for run in ranks[0])
    assert [len(never), len(except_last), len(always)] == [2 * 4, 2 * (4 + 3), 2 * (4 + 4)]
    assert {mask.shape for mask in never} == {(3, 8)}
    # Masks are as different as masks are, and what is computed again has the mask that it had.
    assert all(not torch.equal(one, other) for one, other in itertools.combinations(never, 2))
    assert sorted(map(_bytes, always)) == sorted(2 * list(map(_bytes, never)))


def _bytes(mask: Tensor) -> bytes:
    return bytes(mask.flatten().tolist())


class _ClipsByInfinityNorm(Classification):
    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        clip = getattr(self.trainer.strategy, "clip_grad_norm_", torch.nn.utils.clip_grad_norm_)
        self.record("norm", clip(self.parameters(), 0.02, norm_type=float("inf")))


class _ClipsByHand(Classification):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
        optimizer.step()


_CLIPPING: dict[str, tuple[type[Classification], dict[str, Any]]] = {
    "norm": (Classification, {"gradient_clip_val": 0.1}),
    "value": (Classification, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "inf": (_ClipsByInfinityNorm, {}),
    "by hand": (_ClipsByHand, {}),
}


@pytest.mark.parametrize(
    ("kind", "schedule"),
    [
        pytest.param(*case, marks=() if case[0] == "norm" or case[1] == "gpipe" else pytest.mark.slow)
        for case in itertools.product(_CLIPPING, SCHEDULES)
        if case != ("by hand", "1f1b")
    ],
)
def test_gradients_are_clipped_by_their_norm_over_all_stages(kind: str, schedule: str) -> None:
    """Symptom: each stage clips by its own norm."""
    build, options = _CLIPPING[kind]
    ranks = fit_stages(3, build, _LOAD, options=options, chunks=4, schedule=schedule, balance=[2, 2, 1])
    alone = fit_alone(build, _LOAD, options=options)
    assert_like_one_process(ranks, alone)
    if "norm" in alone.records:
        for rank in ranks:
            torch.testing.assert_close(rank.records["norm"], alone.records["norm"], rtol=0.0, atol=1e-9)


def test_after_clipping_the_whole_gradient_has_the_wanted_norm() -> None:
    """Symptom: with three stages, each of which clips by its own norm, the whole has 1.73 times the wanted norm."""
    load = partial(batches, 12)
    ranks = fit_stages(3, Classification, load, options={"gradient_clip_val": 0.1}, chunks=4, balance=[2, 2, 1])
    before = {f"net.{name}": p for name, p in layered().named_parameters()}
    steps = [(before[name] - after) / 0.1 for name, after in ranks[0].state.items()]
    assert torch.cat([step.flatten() for step in steps]).norm().item() == pytest.approx(0.1, abs=1e-6)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_bfloat16_mixed(schedule: str) -> None:
    """Symptom: stages but the last compute, or differentiate, in another precision."""
    build = partial(Classification, layered(dtype=torch.float32))
    load, options = partial(batches, 12, 12, 3, dtype=torch.float32), {"precision": "bf16-mixed"}
    ranks = fit_stages(3, build, load, options=options, chunks=4, schedule=schedule)
    assert_like_one_process(ranks, fit_alone(build, load, options=options), tolerance=2e-2)
    assert {tensor.dtype for tensor in ranks[0].state.values()} == {torch.float32}
