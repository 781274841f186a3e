"""A Lightning Trainer on ranks that exist already, which costs a fraction of a launch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import ClusterEnvironment
from lightning.pytorch.strategies import Strategy
from torch import Tensor

from ringstrategy import RingDDPStrategy
from tests.helpers.models import parameters_of, shard
from tests.helpers.ranks import run_ranks

__all__ = ["STRATEGY", "Fitted", "fit_ranks", "strategy_under_test", "trainer_on_rank"]

STRATEGY = "ring_ddp"


def strategy_under_test(**arguments: Any) -> Strategy:
    """The strategy under test with arguments of its own."""
    return RingDDPStrategy(**arguments)


class _ExistingRanks(ClusterEnvironment):
    """Tells Lightning that the processes exist; their process group is initialised already."""

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__()
        self._rank, self._world_size = rank, world_size

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        raise NotImplementedError("the ranks have met already")

    @property
    def main_port(self) -> int:
        raise NotImplementedError("the ranks have met already")

    @staticmethod
    def detect() -> bool:
        return False

    def world_size(self) -> int:
        return self._world_size

    def set_world_size(self, size: int) -> None:
        assert size == self._world_size

    def global_rank(self) -> int:
        return self._rank

    def set_global_rank(self, rank: int) -> None:
        assert rank == self._rank

    def local_rank(self) -> int:
        return self._rank

    def node_rank(self) -> int:
        return 0


def trainer_on_rank(rank: int, world_size: int, **options: Any) -> pl.Trainer:
    """A Trainer for one of the ranks of :func:`tests.helpers.ranks.run_ranks`.

    Args:
        rank: this rank.
        world_size: number of ranks.
        **options: of the Trainer, over the defaults: the strategy under test, one epoch, no logger, no checkpoints,
            no sanity check, no bar, and the loader's own sampler.
    """
    defaults: dict[str, Any] = {
        "strategy": STRATEGY,
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "use_distributed_sampler": False,
    }
    plugins = [_ExistingRanks(rank, world_size), *options.pop("plugins", [])]
    return pl.Trainer(accelerator="cpu", devices=world_size, plugins=plugins, **(defaults | options))


@dataclass(frozen=True)
class Fitted:
    """A rank after training.

    Attributes:
        parameters: by name.
        buffers: by name.
        global_step: of the Trainer.
        metrics: ``trainer.callback_metrics``.
        records: what the module recorded.
        all_reduces: how often gradients were summed over the ranks, ``None`` if the strategy does not count.
        bytes_sent: bytes of gradients handed to other ranks, likewise.
    """

    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]
    global_step: int
    metrics: dict[str, Tensor]
    records: dict[str, list[Any]]
    all_reduces: int | None
    bytes_sent: int | None


def fit_ranks(
    build: Callable[[int], pl.LightningModule],
    world_size: int,
    *,
    rows: int,
    batch_size: int,
    dtype: torch.dtype = torch.float32,
    strategy: str | Callable[[], Strategy] = STRATEGY,
    timeout: float = 60.0,
    **options: Any,
) -> list[Fitted]:
    """Fit a module on ``world_size`` ranks, each with its share of the data.

    Args:
        build: makes the module of a rank, given the rank; picklable.
        world_size: number of ranks.
        rows: of :func:`tests.helpers.models.data`, over all ranks.
        batch_size: per rank.
        dtype: of the data.
        strategy: name or picklable factory.
        timeout: seconds.
        **options: of the Trainer; see :func:`trainer_on_rank`.

    Returns:
        Every rank's result, by rank.
    """
    return run_ranks(_fit, world_size, build, rows, batch_size, dtype, strategy, options, timeout=timeout)


def _fit(
    rank: int,
    world_size: int,
    build: Callable[[int], pl.LightningModule],
    rows: int,
    batch_size: int,
    dtype: torch.dtype,
    strategy: str | Callable[[], Strategy],
    options: dict[str, Any],
) -> Fitted:
    module = build(rank)
    made = strategy if isinstance(strategy, str) else strategy()
    trainer = trainer_on_rank(rank, world_size, strategy=made, **options)
    trainer.fit(module, shard(rank, world_size, rows, batch_size, dtype))
    communication = getattr(trainer.strategy, "communication", None)
    return Fitted(
        parameters=parameters_of(module),
        buffers={name: buffer.clone() for name, buffer in module.named_buffers()},
        global_step=trainer.global_step,
        metrics=dict(trainer.callback_metrics),
        records=getattr(module, "records", {}),
        all_reduces=getattr(communication, "all_reduces", None),
        bytes_sent=getattr(communication, "bytes_sent", None),
    )
