"""Where batches come from, under ``ring_ddp``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from tests.helpers.compare import Normalised, Place, Result, assert_same, result_of, run_both
from tests.helpers.features import feature
from tests.helpers.models import data

pytestmark = pytest.mark.slow  # the whole table takes minutes

_GROUP = "Data"


class _Stream(IterableDataset[tuple[Tensor, ...]]):
    def __init__(self, rank: int, world_size: int) -> None:
        self._rows = [tensor[rank::world_size] for tensor in data(24)]

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        return iter(zip(*self._rows, strict=True))


def _fit_stream(place: Place) -> Result:
    module = Normalised(place.rank)
    trainer = place.trainer(max_epochs=2, use_distributed_sampler=True)
    trainer.fit(module, DataLoader(_Stream(place.rank, place.world_size), batch_size=4))
    return result_of(trainer, module)


@feature(_GROUP, "`IterableDataset`", tried="two epochs of a stream without length", outcome="same bits")
def test_a_stream_of_unknown_length() -> None:
    ours, theirs = run_both(_fit_stream)
    assert_same(ours, theirs)
    assert ours[0].global_step == 6


class _TwoSources(Normalised):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        losses = [self.loss(source) for source in batch.values() if source is not None]
        self.record("sources", len(losses))
        return torch.stack(losses).sum()


def _fit_combined(place: Place, mode: Any) -> Result:
    module = _TwoSources(place.rank)
    trainer = place.trainer()
    loaders = {"long": place.shard(24), "short": place.shard(8)}
    trainer.fit(module, CombinedLoader(loaders, mode))
    return result_of(trainer, module)


@feature(
    _GROUP,
    "`CombinedLoader`",
    tried="two loaders of unlike length, `min_size`, `max_size_cycle`, `max_size`",
    outcome="same bits",
)
@pytest.mark.parametrize(("mode", "sources"), [
    ("min_size", [2, 2]),
    ("max_size_cycle", [2, 2, 2, 2, 2, 2]),
    ("max_size", [2, 2, 1, 1, 1, 1]),
])  # fmt: skip
def test_combined_loaders(mode: str, sources: list[int]) -> None:
    ours, theirs = run_both(_fit_combined, mode)
    assert_same(ours, theirs)
    assert [rank.records["sources"] for rank in ours] == [sources] * 2


class _MakesLoaders(Normalised):
    """Brings another part of the data in each epoch."""

    def __init__(self, place: Place) -> None:
        super().__init__(place.rank)
        self._place = place

    def train_dataloader(self) -> DataLoader[Any]:
        rows = [tensor[self.current_epoch * 8 : self.current_epoch * 8 + 8] for tensor in data(24)]
        self.record("loader of epoch", self.current_epoch)
        return DataLoader(TensorDataset(*(tensor[self._place.rank :: self._place.world_size] for tensor in rows)), 2)


def _fit_reloading(place: Place) -> Result:
    module = _MakesLoaders(place)
    trainer = place.trainer(max_epochs=3, reload_dataloaders_every_n_epochs=1)
    trainer.fit(module)
    return result_of(trainer, module)


@feature(_GROUP, "`reload_dataloaders_every_n_epochs`", tried="other data in each of three epochs", outcome="same bits")
def test_loaders_made_anew() -> None:
    ours, theirs = run_both(_fit_reloading)
    assert_same(ours, theirs)
    assert [rank.records["loader of epoch"] for rank in ours] == [[0, 1, 2]] * 2
