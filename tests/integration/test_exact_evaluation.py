"""Evaluation counts every sample once, whatever the number of ranks."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import BasePredictionWriter, EarlyStopping
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, SubsetRandomSampler, TensorDataset
from torchmetrics import CatMetric, MeanMetric
from torchmetrics.classification import MulticlassAUROC

from ringstrategy import PipelineStrategy, RingDDPStrategy
from tests.helpers.models import Regression, data, network
from tests.helpers.ranks import RanksFailedError, run_ranks
from tests.helpers.trainers import trainer_on_rank

Metrics = Sequence[Mapping[str, float]]


class _Evaluated(pl.LightningModule):
    """Logs all that can be logged of the numbers it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.net: nn.Module = nn.Linear(1, 3)
        self.mean, self.cat, self.auroc = MeanMetric(), CatMetric(), MulticlassAUROC(3)
        self.register_buffer("seen", torch.zeros(2, dtype=torch.int64), persistent=False)
        self.rows: list[float] = []

    def validation_step(self, batch: list[Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        (values,) = batch
        self.rows += values.tolist()
        self.log("mean", values.mean(), sync_dist=True)
        self.log("double", values.double().mean() / 3, sync_dist=True)
        for fx in ("sum", "min", "max"):
            self.log(fx, getattr(values, fx)(), sync_dist=True, reduce_fx=fx)
        self.mean.update(values)
        self.cat.update(values if len(values) > 1 else values[0])
        self.auroc.update(_logits(values), values.long() % 3)
        self.log("metric", self.mean)
        if values[-1] > 2:  # not in every batch, and not on every rank
            self.log("late", values.mean(), sync_dist=True)

    def test_step(self, batch: list[Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        self.validation_step(batch, batch_idx)

    def at_the_end(self) -> None:
        """Log what it makes of the values of all ranks."""
        self.log("auroc", self.auroc.compute(), sync_dist=False)
        self.log("all", self.cat.compute().sum(), sync_dist=False)
        self.auroc.reset()
        self.cat.reset()

    def on_validation_epoch_end(self) -> None:
        self.at_the_end()

    def on_test_epoch_end(self) -> None:
        self.at_the_end()

    def predict_step(self, batch: list[Tensor], batch_idx: int, dataloader_idx: int = 0) -> dict[str, Any]:
        return {"twice": 2 * batch[0], "names": [f"row {value:g}" for value in batch[0]]}


def _logits(values: Tensor) -> Tensor:
    """Of three classes, some right."""
    return torch.stack([torch.sin(values * 5 + k) for k in range(3)], dim=1).softmax(1)


def _loader(samples: int, batch_size: int, **options: Any) -> DataLoader[Any]:
    values = torch.arange(samples, dtype=torch.float32) ** 2 / 7 + 1
    return DataLoader(TensorDataset(values), batch_size=batch_size, **options)


def _trainer(rank: int, world_size: int, exact: bool = True, **options: Any) -> pl.Trainer:
    if world_size == 0:
        return pl.Trainer(
            accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False
        )
    strategy = RingDDPStrategy(exact_evaluation=exact)
    return trainer_on_rank(rank, world_size, strategy=strategy, use_distributed_sampler=True, **options)


def _plain(predictions: Any) -> Any:
    """Predictions that can be compared."""
    if isinstance(predictions, list):
        return [_plain(of_batch) for of_batch in predictions]
    return predictions["twice"].tolist(), predictions["names"]


def _evaluate(rank: int, world_size: int, loaders: list[Any]) -> list[tuple[Metrics, Metrics, Any]]:
    """Everything a trainer evaluates with, for several dataloaders; in one process if ``world_size`` is 0."""
    results: list[tuple[Metrics, Metrics, Any]] = []
    for make in loaders:
        module, trainer = _Evaluated(), _trainer(rank, world_size)
        measured = trainer.validate(module, make(), verbose=False)
        tested = trainer.test(module, make(), verbose=False)
        results.append((measured, tested, _plain(trainer.predict(module, make()))))
    return results


def _as_alone(of_ranks: list[Any], alone: list[Any]) -> None:
    """Every rank has the metrics and predictions of one process."""
    for of_rank in of_ranks:
        for (measured, tested, predicted), (measured_alone, tested_alone, predicted_alone) in zip(
            of_rank, alone, strict=True
        ):
            torch.testing.assert_close(measured, measured_alone, rtol=1e-6, atol=1e-7)
            torch.testing.assert_close(tested, tested_alone, rtol=1e-6, atol=1e-7)
            assert predicted == predicted_alone


_SIZES = [(5, 1), (1, 1), (5, 2)]
_MORE_SIZES = [(7, 3), (4, 2), (9, 4), (12, 2), (3, 8)]


@pytest.mark.parametrize(
    ("world_size", "sizes"),
    [
        (2, _SIZES),
        (3, _SIZES),
        *(pytest.param(ranks, _MORE_SIZES, marks=pytest.mark.slow) for ranks in (2, 3)),
        pytest.param(4, _SIZES + _MORE_SIZES, marks=pytest.mark.slow),
    ],
)
def test_metrics_and_predictions_are_those_of_one_process(world_size: int, sizes: list[tuple[int, int]]) -> None:
    """Symptom: the metric depends on the number of processes, because the last samples count twice."""
    loaders = [partial(_loader, *size) for size in sizes]
    _as_alone(run_ranks(_evaluate, world_size, loaders), _evaluate(0, 0, loaders))


def _several(*sizes: int) -> list[DataLoader[Any]]:
    return [_loader(samples, 2) for samples in sizes]


_SEVERAL = [partial(_several, *sizes) for sizes in [(5, 1, 3), (1, 5), (1, 1, 9), (9, 0, 1)]]


@pytest.mark.parametrize("world_size", [3, pytest.param(2, marks=pytest.mark.slow)])
def test_some_ranks_have_no_batch_of_some_dataloaders(world_size: int) -> None:
    """Symptom: a rank ends a dataloader that it has no batch of later than the others, or never."""
    alone = _evaluate(0, 0, _SEVERAL)
    of_ranks = run_ranks(_evaluate, world_size, _SEVERAL)
    _as_alone(of_ranks, alone)
    assert {key for measured, _, _ in alone for metrics in measured for key in metrics} > {"mean/dataloader_idx_2"}


class _Once(_Evaluated):
    """Keeps which rows it was given."""

    def at_the_end(self) -> None:
        """Nothing."""

    def validation_step(self, batch: list[Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        self.rows += batch[0].tolist()


def _seen_in(loader: DataLoader[Any], rank: int, world_size: int) -> list[float]:
    module = _Once()
    _trainer(rank, world_size).validate(module, loader, verbose=False)
    return module.rows


def _seen(rank: int, world_size: int) -> dict[str, list[float]]:
    dataset = _loader(5, 1).dataset
    drawn = SubsetRandomSampler([4, 1, 3], generator=torch.Generator().manual_seed(3))
    own: DistributedSampler[Any] = DistributedSampler(dataset, world_size, rank, shuffle=False)  # repeats one
    loaders: dict[str, DataLoader[Any]] = {
        "shuffled": _loader(5, 2, shuffle=True),
        "drop_last": _loader(5, 2, drop_last=True),
        "unbatched": DataLoader(TensorDataset(torch.arange(5.0)[:, None]), batch_size=None),
        "drawn": DataLoader(dataset, batch_size=1, sampler=drawn),
        "own": DataLoader(dataset, batch_size=2, sampler=own),
    }
    return {name: _seen_in(loader, rank, world_size) for name, loader in loaders.items()}


def test_every_sample_is_seen_once_with_any_sampler_but_a_distributed_one() -> None:
    """Symptom: with a sampler of their own, users get repeated samples, or every rank evaluates all."""
    rows = _loader(5, 1).dataset[:][0].tolist()
    by_rank = run_ranks(_seen, 2)
    seen = {name: list(itertools.chain(*(of_rank[name] for of_rank in by_rank))) for name in by_rank[0]}
    assert sorted(seen["shuffled"]) == rows
    assert seen["shuffled"] != rows
    assert sorted(seen["drop_last"]) == rows[:4]
    assert sorted(seen["unbatched"]) == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert sorted(seen["drawn"]) == [rows[1], rows[3], rows[4]]
    assert seen["own"] == [rows[0], rows[2], rows[4], rows[1], rows[3], rows[0]], "as they are"


class _Fitted(Regression):
    """Validates after every epoch; the metric that could stop training early is each rank's own."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank, nn.Sequential(network(), nn.BatchNorm1d(3)))
        self.positive = MeanMetric()

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        loss = self.loss(batch)
        self.log("own", loss)
        self.log("loss", loss, sync_dist=True)
        self.positive.update(self.net(batch[0]) > 0)
        self.log("positive", self.positive)


def _held_out() -> DataLoader[Any]:
    """Five rows in two batches."""
    inputs, targets = data(5)
    return DataLoader(TensorDataset(inputs / 2, targets + 1), batch_size=4)


def _fit(rank: int, world_size: int) -> tuple[int, dict[str, float], dict[str, float]]:
    module = _Fitted(rank)
    stop = EarlyStopping("own", check_finite=True, patience=5)
    trainer = _trainer(rank, world_size, max_epochs=3, num_sanity_val_steps=2, callbacks=[stop])
    inputs, targets = data(24)
    trainer.fit(module, DataLoader(TensorDataset(inputs, targets), batch_size=4), _held_out())
    fitted = {name: float(value) for name, value in trainer.callback_metrics.items()}
    inputs, targets = _held_out().dataset[:]
    with torch.no_grad():
        outputs = module.eval().net(inputs)
    expected = {"loss": float(F.mse_loss(outputs, targets)), "positive": float((outputs > 0).float().mean())}
    return trainer.current_epoch, fitted, expected


def test_validation_in_training_with_fewer_batches_than_ranks() -> None:
    """Symptom: a rank without a batch does not take part, so that the others wait; or its NaN ends training."""
    ranks = run_ranks(_fit, 3)
    for epochs, fitted, expected in ranks:
        assert epochs == 3
        assert fitted == pytest.approx(expected | {"own": fitted["own"]}, rel=1e-5)
    assert ranks[2][1]["own"] == ranks[0][1]["own"] != ranks[1][1]["own"], "a rank without samples has rank 0's"


class _Gathers(_Once):
    """Needs all ranks in every batch."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def validation_step(self, batch: list[Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        self.gather(batch[0])

    def predict_step(self, batch: list[Tensor], batch_idx: int, dataloader_idx: int = 0) -> Any:
        return self.gather(batch[0])

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        if self.how == "hook":
            self.trainer.strategy.barrier()

    def gather(self, values: Tensor) -> None:
        if self.how == "log":
            self.log("mean", values.mean(), on_step=True, sync_dist=True)
        elif self.how == "all_gather":
            self.all_gather(values.sum())
        elif self.how == "broadcast":
            self.trainer.strategy.broadcast(1)
        elif self.how == "metric":
            self.mean.update(values)
            self.mean.compute()


def _gather(rank: int, world_size: int, how: str, samples: int, predict: bool = False) -> float:
    module, trainer = _Gathers(how), _trainer(rank, world_size)
    if predict:
        trainer.predict(module, _loader(samples, 1))
    else:
        trainer.validate(module, _loader(samples, 1), verbose=False)
    return float(trainer.callback_metrics.get("mean", 0.0))


@pytest.mark.parametrize(
    ("how", "predict"),
    [
        ("log", False),
        ("metric", False),
        ("all_gather", True),
        *(pytest.param(how, False, marks=pytest.mark.slow) for how in ("all_gather", "hook", "broadcast")),
        pytest.param("broadcast", True, marks=pytest.mark.slow),
    ],
)
def test_what_needs_all_ranks_in_every_batch_is_an_error_where_it_would_hang(how: str, predict: bool) -> None:
    """Symptom: the rank with one more batch waits for the others."""
    with pytest.raises(RanksFailedError) as raised:
        run_ranks(_gather, 2, how, 3, predict)
    step = "predict_step" if predict else "validation_step"
    for outcome in raised.value.outcomes:
        assert f"{step}, or a hook around it, needs all ranks in every batch" in str(outcome.error)
        assert "(2 on rank 0, 1 on rank 1)" in str(outcome.error)


def test_what_needs_all_ranks_in_every_batch_works_where_all_have_as_many() -> None:
    """Symptom: what is no problem is forbidden."""
    assert run_ranks(_gather, 2, "log", 4) == [pytest.approx(_loader(4, 1).dataset[:][0].mean())] * 2


class _Writer(BasePredictionWriter):
    def __init__(self) -> None:
        super().__init__("batch_and_epoch")
        self.batches: list[tuple[list[float], Any]] = []
        self.epoch: Any = None

    def write_on_batch_end(
        self, trainer: Any, pl_module: Any, prediction: Any, batch_indices: Any, batch: Any, batch_idx: int, *_: Any
    ) -> None:
        self.batches.append((prediction["twice"].tolist(), list(batch_indices)))

    def write_on_epoch_end(self, trainer: Any, pl_module: Any, predictions: Any, batch_indices: Any) -> None:
        self.epoch = ([made["twice"].tolist() for made in predictions], batch_indices)


def _write(rank: int, world_size: int) -> tuple[Any, Any, Any]:
    writer = _Writer()
    returned = _trainer(rank, world_size, callbacks=[writer]).predict(
        _Evaluated(), _loader(5, 2), return_predictions=False
    )
    return returned, writer.batches, writer.epoch


def test_a_writer_of_predictions_gets_those_of_its_rank() -> None:
    """Symptom: rows are written twice, or under the number of another."""
    twice = (2 * _loader(5, 2).dataset[:][0]).tolist()
    ranks = run_ranks(_write, 4)
    for rank, (returned, batches, (predictions, indices)) in enumerate(ranks):
        mine = [[0, 1], [2, 3], [4]][rank : rank + 1]
        assert returned is None
        assert batches == [([twice[row] for row in rows], rows) for rows in mine]
        assert predictions == [[twice[row] for row in rows] for rows in mine]
        assert indices == [mine]


def _warned(rank: int, world_size: int, samples: int) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = _trainer(rank, world_size, exact=False)
        for evaluate in (trainer.validate, trainer.test, trainer.predict):
            evaluate(_Once(), _loader(samples, 2))
    return [str(warning.message) for warning in caught if "once more" in str(warning.message)]


@pytest.mark.parametrize(("samples", "again"), [(5, "1 sample once more"), (4, None)])
def test_one_warning_says_how_many_samples_are_repeated(samples: int, again: str | None) -> None:
    """Symptom: nobody says that the metric counts samples twice."""
    for found in run_ranks(_warned, 2, samples)[:1]:
        assert len(found) == (again is not None)
        assert all(f"The {samples} samples of val_dataloader" in text and str(again) in text for text in found)


def _evaluate_in_replicas(rank: int, world_size: int) -> list[tuple[Metrics, Metrics, Any]]:
    results: list[tuple[Metrics, Metrics, Any]] = []
    for samples in (5, 1):
        module = _Evaluated()
        module.net = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 3))
        strategy = PipelineStrategy(num_stages=2, exact_evaluation=True, chunks=1)
        trainer = trainer_on_rank(rank, world_size, strategy=strategy, use_distributed_sampler=True)
        measured = trainer.validate(module, _loader(samples, 2), verbose=False)
        tested = trainer.test(module, _loader(samples, 2), verbose=False)
        results.append((measured, tested, _plain(trainer.predict(module, _loader(samples, 2)))))
    return results


def test_replicas_of_a_pipeline_count_each_sample_once() -> None:
    """Symptom: stages are counted as ranks, or a replica waits for one that has no samples."""
    alone = _evaluate(0, 0, [partial(_loader, 5, 2), partial(_loader, 1, 2)])
    _as_alone(run_ranks(_evaluate_in_replicas, 4), alone)


def test_arguments_must_fit() -> None:
    """Symptom: a string that is not a bool counts as true."""
    with pytest.raises(ValueError, match="exact_evaluation"):
        RingDDPStrategy(exact_evaluation="no")  # type: ignore[arg-type]
