"""The ranks that evaluate together, each other batches."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import lightning.pytorch as pl
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors

from ringstrategy import _lightning
from ringstrategy.control import Control
from ringstrategy.evaluation.logged import complete, describe
from ringstrategy.failure import FailureMonitor
from ringstrategy.process_group import RankGroup

__all__ = ["EvaluatingRanks"]

T = TypeVar("T")


class EvaluatingRanks:
    """What ranks tell each other in an evaluation.

    Args:
        trainer: of the run.
        group: the ranks that evaluate other batches than this one.
        control: the strategy's collectives.
        monitor: knows of failures.
        begin: what the strategy does together with the other ranks in the first step of an evaluation; once it is
            done, another call does nothing.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        group: RankGroup,
        control: Control,
        monitor: FailureMonitor,
        begin: Callable[[], None],
    ) -> None:
        self._trainer = trainer
        self._group = group
        self._control = control
        self._monitor = monitor
        self.begin = begin
        self._uneven: Sequence[float] = ()  # batches by rank, of a dataloader where they differ

    @contextlib.contextmanager
    def empty_loaders_allowed(self) -> Iterator[None]:
        """Within, Lightning does not refuse a dataloader that has no batch for this rank."""
        module = self._trainer.lightning_module
        before = module.allow_zero_length_dataloader_with_multiple_devices
        module.allow_zero_length_dataloader_with_multiple_devices = True
        try:
            yield
        finally:
            module.allow_zero_length_dataloader_with_multiple_devices = before

    def agree_on_batches(self, mine: Sequence[int | float]) -> list[int | float]:
        """Learn how many batches every rank has. Collective.

        Args:
            mine: this rank's, by dataloader.

        Returns:
            The same, but 1 instead of 0 where another rank has some. Lightning's loop leaves out all of an evaluation
            without a batch, also what ranks do together; it finds out that there is none when it asks for it.
        """
        by_loader = list(zip(*self.gather(list(mine), "the number of batches"), strict=True))
        self._uneven = next((counts for counts in by_loader if len(set(counts)) > 1), ())
        return [own or 1 if any(counts) else own for own, counts in zip(mine, by_loader, strict=True)]

    @contextlib.contextmanager
    def batch(self, step: str) -> Iterator[None]:
        """Around a batch: where ranks do not have as many, whatever needs all of them is an error, as it would hang."""
        if not self._uneven:
            yield
            return
        counts = [f"{count:g} on rank {rank.rank}" for rank, count in zip(self._group.ranks, self._uneven, strict=True)]
        why = (
            f"{step}, or a hook around it, needs all ranks in every batch, but they have different numbers of batches "
            f"({', '.join(counts)}), so that they would wait for ever. Log with on_step=False, gather at the end of "
            "the epoch and not per batch, or set exact_evaluation=False."
        )
        with self._control.refusing(why), _metrics_refusing(self._trainer.lightning_module, self._control):
            yield

    def complete(self, results: _lightning.LoggedValues) -> None:
        """Make sure that all ranks have logged the same, at the end of a dataloader. Collective."""
        self.begin()
        module = self._trainer.lightning_module
        everyone = self.gather(describe(results, module), "what the other ranks have logged")
        complete(results, module, everyone, self._trainer.strategy.reduce)

    def gather(self, value: T, what: str) -> list[T]:
        """The values of all ranks. Collective.

        Args:
            value: this rank's; picklable.
            what: it is, for errors.
        """
        with self._monitor.waiting(what):
            return self._group.exchange(value)


@dataclass(frozen=True)
class _CheckedGather:
    """How a metric puts its states together, if it may."""

    control: Control
    gather: Callable[..., Any]

    def __call__(self, state: Tensor, group: Any = None) -> Any:
        self.control.check_allowed()
        return self.gather(state, group)


@contextlib.contextmanager
def _metrics_refusing(module: pl.LightningModule, control: Control) -> Iterator[None]:
    """Within, metrics obey ``control``; they gather without asking the strategy."""
    metrics = [child for child in module.modules() if isinstance(child, Metric)]
    before = [metric.dist_sync_fn for metric in metrics]
    for metric in metrics:
        metric.dist_sync_fn = _CheckedGather(control, metric.dist_sync_fn or gather_all_tensors)
    try:
        yield
    finally:
        for metric, gather in zip(metrics, before, strict=True):
            metric.dist_sync_fn = gather
