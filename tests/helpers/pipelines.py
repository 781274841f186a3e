"""One scenario over the stages of a pipeline and in one process."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from ringstrategy import PipelineStrategy
from tests.helpers.assertions import assert_ranks_identical
from tests.helpers.compare import Result, result_of
from tests.helpers.models import plain_sgd
from tests.helpers.ranks import run_ranks
from tests.helpers.trainers import trainer_on_rank

__all__ = [
    "SCHEDULES",
    "Classification",
    "Pipelined",
    "assert_like_one_process",
    "batches",
    "fit",
    "fit_alone",
    "fit_stages",
    "layered",
    "listed",
    "record_messages",
    "rows",
    "run_alone",
    "run_stages",
]

SCHEDULES = ["gpipe", "1f1b"]

T = TypeVar("T")
Batch = tuple[Tensor, Tensor]


def layered(seed: int = 1, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """Five layers, 8 features, 4 classes, with the weights of a seed; the global generator is left alone."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    return net.to(dtype)


class _Listed(Dataset[Any]):
    def __init__(self, items: list[Any]) -> None:
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> Any:
        return self._items[index]


def listed(items: Sequence[Any]) -> DataLoader[Any]:
    """A loader that yields ``items``, each as one batch."""
    return DataLoader(_Listed(list(items)), batch_size=None)


def batches(
    *sizes: int, shape: tuple[int, ...] = (8,), classes: int = 4, dtype: torch.dtype = torch.float64, seed: int = 0
) -> DataLoader[Any]:
    """Batches of the given numbers of rows, always the same: inputs (rows, *shape) and labels (rows,)."""
    generator = torch.Generator().manual_seed(seed)
    items = [
        (
            torch.randn(size, *shape, generator=generator, dtype=torch.float64).to(dtype),
            torch.randint(classes, (size,), generator=generator),
        )
        for size in sizes
    ]
    return listed(items)


def rows(count: int = 24, batch_size: int = 4, start: int = 0) -> DataLoader[Any]:
    """An ordinary loader of some of the rows that :func:`batches` makes: inputs (batch, 8) and labels (batch,)."""
    ((inputs, labels),) = batches(start + count)
    return DataLoader(TensorDataset(inputs[start:], labels[start:]), batch_size=batch_size)


class Classification(pl.LightningModule):
    """An ordinary classifier.

    Args:
        net: its network.
        optimizer: makes the optimizer from the parameters.

    Attributes:
        records: what a test wants to see of a rank.
    """

    def __init__(
        self,
        net: nn.Module | None = None,
        optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = plain_sgd,
    ) -> None:
        super().__init__()
        self.net = layered() if net is None else net
        self.records: dict[str, list[Any]] = {}
        self._optimizer = optimizer

    def record(self, name: str, value: Any) -> None:
        """Append a value, detached and copied if it is a tensor, to ``records[name]``."""
        self.records.setdefault(name, []).append(value.detach().clone() if isinstance(value, Tensor) else value)

    def loss(self, batch: Batch) -> Tensor:
        """Mean cross-entropy of a batch."""
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True, batch_size=len(batch[1]))
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        output = self.net(batch[0])
        rows = len(batch[1])
        self.log("val_loss", F.cross_entropy(output, batch[1]), batch_size=rows)
        self.log("val_accuracy", (output.argmax(1) == batch[1]).double().mean(), batch_size=rows)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("test_loss", F.cross_entropy(self.net(batch[0]), batch[1]), batch_size=len(batch[1]))

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        prediction: Tensor = self.net(batch[0])
        return prediction

    def configure_optimizers(self) -> Any:
        return self._optimizer(self.parameters())


@dataclass(frozen=True)
class Pipelined:
    """Where a scenario runs: one rank of a pipeline, or one process.

    Attributes:
        rank: this rank.
        world_size: 0 in one process.
        arguments: of the strategy.
    """

    rank: int
    world_size: int
    arguments: dict[str, Any]

    def trainer(self, **options: Any) -> pl.Trainer:
        """A Trainer here; see :func:`tests.helpers.trainers.trainer_on_rank`."""
        if self.world_size:
            strategy = PipelineStrategy(**self.arguments)
            return trainer_on_rank(self.rank, self.world_size, **({"strategy": strategy} | options))
        return trainer_on_rank(0, 1, **({"strategy": "auto"} | options))


def run_stages(
    scenario: Callable[..., T], world_size: int, *args: Any, timeout: float = 60.0, **strategy: Any
) -> list[T]:
    """Run ``scenario(place, *args)`` on the ranks of a :class:`PipelineStrategy`; results by rank."""
    return run_ranks(_run, world_size, strategy, scenario, args, timeout=timeout)


def run_alone(scenario: Callable[..., T], *args: Any, timeout: float = 60.0) -> T:
    """Run ``scenario(place, *args)`` in one process without any strategy."""
    results: list[T] = run_ranks(_run, 1, None, scenario, args, init=False, timeout=timeout)
    return results[0]


def _run(
    rank: int, world_size: int, strategy: dict[str, Any] | None, scenario: Callable[..., T], args: tuple[Any, ...]
) -> T:
    pl.seed_everything(3, verbose=False)
    place = Pipelined(rank, 0 if strategy is None else world_size, strategy or {})
    return scenario(place, *args)


def fit(
    place: Pipelined, build: Callable[[], pl.LightningModule], load: Callable[[], Any], options: dict[str, Any]
) -> Result:
    """Train, validating on the same batches."""
    module = build()
    trainer = place.trainer(**options)
    trainer.fit(module, load(), load())
    return result_of(trainer, module)


_LOAD = partial(batches, 12, 12, 12)


def fit_stages(
    world_size: int,
    build: Callable[[], pl.LightningModule] = Classification,
    load: Callable[[], Any] = _LOAD,
    *,
    options: dict[str, Any] | None = None,
    timeout: float = 60.0,
    **strategy: Any,
) -> list[Result]:
    """Train on the ranks of a :class:`PipelineStrategy`; see :func:`fit` and :func:`run_stages`."""
    return run_stages(fit, world_size, build, load, options or {}, timeout=timeout, **strategy)


def fit_alone(
    build: Callable[[], pl.LightningModule] = Classification,
    load: Callable[[], Any] = _LOAD,
    *,
    options: dict[str, Any] | None = None,
    timeout: float = 60.0,
) -> Result:
    """Train in one process; see :func:`fit`. What was trained before is not trained again."""
    return _fit_alone(pickle.dumps((build, load, options or {})), timeout)


@functools.cache
def _fit_alone(arguments: bytes, timeout: float) -> Result:
    return run_alone(fit, *pickle.loads(arguments), timeout=timeout)


def record_messages(module: pl.LightningModule) -> list[tuple[int, str]]:
    """A list that grows with every message this stage sends: to which stage, and what for. Call it once it trains.

    In one process the list stays empty.
    """
    sent: list[tuple[int, str]] = []
    engine = getattr(module.trainer.strategy, "_engine", None)
    for stage, channel in ({} if engine is None else engine.channels).items():

        def send(values: Any, tag: str, stage: int = stage, send: Callable[..., None] = channel.send) -> None:
            sent.append((stage, tag))
            send(values, tag)

        channel.send = send
    return sent


def assert_like_one_process(ranks: Sequence[Result], alone: Result, tolerance: float = 1e-9) -> None:
    """All ranks hold the same whole module, and trained and logged what one process does.

    Args:
        ranks: results by rank.
        alone: the result of one process.
        tolerance: absolute.
    """
    assert_ranks_identical([rank.state for rank in ranks])
    assert alone.global_step > 0, "nothing was trained"
    for rank in ranks:
        assert (rank.global_step, rank.epoch) == (alone.global_step, alone.epoch)
        torch.testing.assert_close(rank.state, alone.state, rtol=0.0, atol=tolerance)
        torch.testing.assert_close(rank.metrics, alone.metrics, rtol=0.0, atol=tolerance)
