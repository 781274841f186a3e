"""Where batches come from, under a pipeline."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler

from tests.helpers.compare import Result, result_of
from tests.helpers.features import feature
from tests.helpers.pipelines import (
    Batch,
    Classification,
    Pipelined,
    assert_like_one_process,
    batches,
    rows,
    run_alone,
    run_stages,
)

_GROUP = "Data"
pytestmark = pytest.mark.slow  # the whole table takes minutes


class _Stream(IterableDataset[tuple[Tensor, ...]]):
    """Rows of 24, without a length."""

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        return iter(rows().dataset)


def _fit_stream(place: Pipelined) -> Result:
    module = Classification()
    trainer = place.trainer(max_epochs=2, use_distributed_sampler=True)
    trainer.fit(module, DataLoader(_Stream(), batch_size=5))
    return result_of(trainer, module)


@feature(_GROUP, "`IterableDataset`", tried="two epochs of a stream without length", outcome="like one process")
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_stream_of_unknown_length(schedule: str) -> None:
    ranks = run_stages(_fit_stream, 2, chunks=2, schedule=schedule)
    assert_like_one_process(ranks, run_alone(_fit_stream))
    assert ranks[0].global_step == 10


class _TwoSources(Classification):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        losses = [self.loss(source) for source in batch.values() if source is not None]
        self.record("sources", len(losses))
        return torch.stack(losses).sum()


def _fit_combined(place: Pipelined, mode: Any) -> Result:
    module = _TwoSources()
    trainer = place.trainer()
    trainer.fit(module, CombinedLoader({"long": rows(24), "short": rows(8)}, mode))
    return result_of(trainer, module)


@feature(
    _GROUP,
    "`CombinedLoader`",
    tried="two loaders of unlike length, `min_size`, `max_size_cycle`, `max_size`, a call of the network for each",
    outcome="like one process",
)
@pytest.mark.parametrize(("mode", "sources"), [
    ("min_size", [2, 2]),
    ("max_size_cycle", [2, 2, 2, 2, 2, 2]),
    ("max_size", [2, 2, 1, 1, 1, 1]),
])  # fmt: skip
def test_combined_loaders(mode: str, sources: list[int]) -> None:
    ranks = run_stages(_fit_combined, 2, mode, chunks=2)
    assert_like_one_process(ranks, run_alone(_fit_combined, mode))
    assert [rank.records["sources"] for rank in ranks] == [sources] * 2


class _MakesLoaders(Classification):
    """Brings another part of the data in each epoch."""

    def train_dataloader(self) -> DataLoader[Any]:
        self.record("loader of epoch", self.current_epoch)
        return rows(8, start=8 * self.current_epoch)


def _fit_reloading(place: Pipelined) -> Result:
    module = _MakesLoaders()
    trainer = place.trainer(max_epochs=3, reload_dataloaders_every_n_epochs=1)
    trainer.fit(module)
    return result_of(trainer, module)


@feature(
    _GROUP,
    "`reload_dataloaders_every_n_epochs`",
    tried="other data in each of three epochs",
    outcome="like one process",
)
def test_loaders_made_anew() -> None:
    ranks = run_stages(_fit_reloading, 2, chunks=2)
    assert_like_one_process(ranks, run_alone(_fit_reloading))
    assert [rank.records["loader of epoch"] for rank in ranks] == [[0, 1, 2]] * 2


class _NotesRows(Classification):
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        self.record("rows", batch[0][:, 0].tolist())
        return super().training_step(batch, batch_idx)


def _fit_sampled(place: Pipelined, kind: str) -> Result:
    dataset: TensorDataset = rows().dataset  # type: ignore[assignment]
    module = _NotesRows()
    trainer = place.trainer(max_epochs=2, use_distributed_sampler=True)
    generator = torch.Generator().manual_seed(4)
    weights = [1.0] * 12 + [3.0] * 12
    sampler = WeightedRandomSampler(weights, 24, generator=generator) if kind == "weighted" else None
    shuffle = kind == "shuffled"
    trainer.fit(module, DataLoader(dataset, batch_size=4, sampler=sampler, shuffle=shuffle, generator=generator))
    return result_of(trainer, module)


@feature(
    _GROUP,
    "`use_distributed_sampler` with one pipeline",
    tried="loaders in order, shuffled with a generator of their own, and with a `WeightedRandomSampler`",
    outcome="the loader's own sampler stays, for all ranks see all samples; like one process",
)
@pytest.mark.parametrize("kind", ["in order", "shuffled", "weighted"])
def test_samplers_of_one_pipeline(kind: str) -> None:
    ranks = run_stages(_fit_sampled, 2, kind, chunks=2)
    alone = run_alone(_fit_sampled, kind)
    assert_like_one_process(ranks, alone)
    assert [rank.records["rows"] for rank in ranks] == [alone.records["rows"]] * 2
    seen = [value for batch in alone.records["rows"] for value in batch]
    in_order = rows().dataset[:][0][:, 0].tolist()
    assert (seen == in_order * 2) == (kind == "in order")


@feature(
    _GROUP,
    "`use_distributed_sampler` with two pipelines",
    tried="two stages, two pipelines, a shuffled loader",
    outcome="each pipeline gets its half, all its stages the same rows; ranks identical",
)
def test_samplers_of_two_pipelines() -> None:
    ranks = run_stages(_fit_sampled, 4, "shuffled", chunks=2, num_stages=2)
    seen = [rank.records["rows"] for rank in ranks]
    assert seen[0] == seen[1] != seen[2] == seen[3]
    for epoch in (slice(0, 3), slice(3, 6)):
        of_both = [value for pipeline in (seen[0], seen[2]) for batch in pipeline[epoch] for value in batch]
        assert sorted(of_both) == sorted(rows().dataset[:][0][:, 0].tolist())
    for rank in ranks[1:]:
        torch.testing.assert_close(rank.state, ranks[0].state, rtol=0, atol=0)


class _Augments(_NotesRows):
    """Draws other numbers on every rank."""

    def on_before_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Any:
        generator = torch.Generator().manual_seed(self.global_rank)
        return batch[0] + torch.randn(batch[0].shape, generator=generator, dtype=batch[0].dtype), batch[1]


def _fit_augmented(place: Pipelined) -> Result:
    module = _Augments()
    trainer = place.trainer()
    trainer.fit(module, batches(12, 12))
    return result_of(trainer, module)


@feature(
    _GROUP,
    "Augmentation in `on_before_batch_transfer`",
    tried="noise that differs from rank to rank",
    outcome="the first stage's batch counts for all stages; like one process",
)
def test_augmentation_differs_between_ranks() -> None:
    ranks = run_stages(_fit_augmented, 2, chunks=2)
    alone = run_alone(_fit_augmented)
    assert_like_one_process(ranks, alone)
    assert [rank.records["rows"] for rank in ranks] == [alone.records["rows"]] * 2
