"""Pipelines beside each other: each trains on rows of its own, and their stages stay in step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EarlyStopping
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchmetrics import SumMetric
from torchmetrics.classification import MulticlassAccuracy

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
    listed,
    run_alone,
    run_stages,
)


class _Counts(Classification):
    """Logs means, sums and metrics over all replicas, and what each of them saw."""

    def __init__(self) -> None:
        super().__init__(optimizer=sgd)
        self.rows, self.accuracy = SumMetric(), MulticlassAccuracy(4, average="micro")

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        outputs, labels = self.net(batch[0]), batch[1]
        loss = F.cross_entropy(outputs, labels)
        rows = len(labels)
        self.accuracy(outputs, labels)
        self.rows(rows)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True, batch_size=rows)
        self.log("sum", float(rows), on_step=False, on_epoch=True, sync_dist=True, reduce_fx="sum", batch_size=rows)
        self.log_dict({"rows": self.rows, "accuracy": self.accuracy}, on_step=False, on_epoch=True, batch_size=rows)
        self.record("replica", batch[0][:, 0])
        self.record("loss", loss)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("val_loss", loss, sync_dist=True, batch_size=len(batch[1]))


def _share(place: Pipelined, *sizes: int) -> DataLoader[Any]:
    """This replica's rows, of stages in pairs: every second one; all of them in one process."""
    whole = batches(*sizes)
    if not place.world_size:
        return whole
    replica, replicas = place.rank // 2, place.world_size // 2
    return listed([tuple(tensor[replica::replicas] for tensor in batch) for batch in whole])


def _train(place: Pipelined, options: dict[str, Any]) -> Result:
    module, trainer = _Counts(), place.trainer(**options)
    trainer.fit(module, _share(place, 12, 12, 4), _share(place, 12, 4))
    return result_of(trainer, module)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    "options",
    [{}, *(pytest.param(o, marks=pytest.mark.slow) for o in
    [{"accumulate_grad_batches": 2}, {"gradient_clip_val": 0.05}, {"precision": "bf16-mixed"}])],
)  # fmt: skip
def test_replicas_train_on_their_own_rows(options: dict[str, Any], schedule: str) -> None:
    """Symptom: stages count as replicas: other rows for each stage, sums that are doubled, means of the wrong ranks."""
    ranks = run_stages(_train, 4, options, num_stages=2, chunks=2, schedule=schedule)
    alone = run_alone(_train, options)
    tolerance = 2e-2 if "precision" in options else 1e-6 if schedule == "1f1b" else 1e-9
    assert_like_one_process(ranks, alone, tolerance)
    assert ranks[0].metrics["rows"].item() == ranks[0].metrics["sum"].item() == 28
    if schedule == "gpipe":
        assert_ranks_identical([_numbered(ranks[0].records["replica"]), _numbered(ranks[1].records["replica"])])
        assert_ranks_identical([_numbered(ranks[2].records["loss"]), _numbered(ranks[3].records["loss"])])
        assert not torch.equal(ranks[1].records["loss"][0], ranks[2].records["loss"][0])


def _numbered(values: list[Tensor]) -> dict[str, Tensor]:
    return {str(number): value for number, value in enumerate(values)}


def _with_sampler(place: Pipelined) -> dict[str, Any]:
    """Train and predict with the samplers that Lightning puts in."""

    class Numbers(Classification):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.record("rows", batch[2])
            return self.loss(batch)

        def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
            rows: Tensor = batch[2] + 0 * self.net(batch[0]).sum()
            return rows

    ((inputs, labels),) = batches(16)
    loader = DataLoader(TensorDataset(inputs, labels, torch.arange(16)), batch_size=4, shuffle=True)
    module, trainer = Numbers(), place.trainer(use_distributed_sampler=True)
    trainer.fit(module, loader)
    sampler: Any = trainer.train_dataloader
    predicted: Any = trainer.predict(module, DataLoader(loader.dataset, batch_size=4))
    assert isinstance(sampler.sampler, DistributedSampler)
    return {
        "sampler": (sampler.sampler.num_replicas, sampler.sampler.rank),
        "steps": trainer.global_step,
        "trained": torch.cat(module.records["rows"]).tolist(),
        "predicted": torch.cat(predicted).long().tolist(),
    }


def test_samplers_count_replicas_and_not_ranks() -> None:
    """Symptom: a stage gets other rows than the one before it, or each pipeline gets all of them."""
    ranks = run_stages(_with_sampler, 4, num_stages=2, chunks=2)
    assert [rank["sampler"] for rank in ranks] == [(2, 0), (2, 0), (2, 1), (2, 1)]
    assert [rank["steps"] for rank in ranks] == [2] * 4
    for what in ("trained", "predicted"):
        first, again, second, once_more = (rank[what] for rank in ranks)
        assert (first, second) == (again, once_more)
        assert sorted(first + second) == list(range(16))


class _LosesOnOneReplica(Classification):
    """Its validation loss gets worse on the first replica only."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._worse = rank < 2

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("v", float(self.current_epoch) if self._worse else -float(self.current_epoch))

    def on_train_start(self) -> None:
        strategy = self.trainer.strategy
        for replica in (0, 1):
            mine = self._worse == (replica == 0)
            self.record("all", strategy.reduce_boolean_decision(mine, all=True))
            self.record("any", strategy.reduce_boolean_decision(mine, all=False))
        gathered: Any = self.all_gather(torch.tensor([int(self._worse)]))
        self.record("gathered", gathered.tolist())


def _stop_early(place: Pipelined) -> tuple[int, dict[str, list[Any]]]:
    module = _LosesOnOneReplica(place.rank)
    trainer = place.trainer(max_epochs=8, callbacks=[EarlyStopping("v", patience=2)])
    trainer.fit(module, _share(place, 4), _share(place, 4))
    return trainer.current_epoch, module.records


def test_replicas_decide_together() -> None:
    """Symptom: one pipeline stops and the other one waits for it; two stages outvote a replica."""
    for epoch, records in run_stages(_stop_early, 4, num_stages=2, chunks=2):
        assert epoch == 3
        assert records == {"all": [False, False], "any": [True, True], "gathered": [[[1], [0]]]}
