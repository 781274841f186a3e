"""One ``Trainer.fit`` in fresh processes: ``python -m ringstrategy.bench.train_worker FOLDER``.

The folder holds ``run.json``, a :class:`TrainRun`; each rank writes ``rank-<n>.json``, a :class:`RankResult`, there.
Lightning starts the other ranks with the same command.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy

from ringstrategy import RingDDPStrategy
from ringstrategy.allocator import keep_freed_memory
from ringstrategy.bench.memory import PeakPss
from ringstrategy.bench.models import SyntheticBatches, SyntheticClassifier, build_network
from ringstrategy.collectives.choose import Transport
from ringstrategy.collectives.half_precision import Compression
from ringstrategy.communication import Communication

__all__ = ["NoSyncStrategy", "RankResult", "TrainRun", "main"]

_MEMORY_STEPS = 5  # after the timed ones, for the sampler of memory


@dataclass(frozen=True)
class TrainRun:
    """One run: ``steps`` timed training steps of one strategy after ``warmup`` others.

    Attributes:
        strategy: ``"ring_ddp"``, ``"ddp"`` or ``"none"``.
        keep_freed_memory: what ``RingDDPStrategy`` gets as its argument of this name; for the others the process is
            set up in the same way.
        transport: likewise, of ``RingDDPStrategy``.
        compression: likewise.
        hosts: over which the ranks are divided.
        timeout_s: how long a rank waits for another before it gives up.
    """

    strategy: str
    keep_freed_memory: bool
    transport: str
    compression: str | None
    hosts: int
    model: str
    batch_size: int
    image_size: int
    ranks: int
    steps: int
    warmup: int
    timeout_s: float


@dataclass(frozen=True)
class RankResult:
    """What one rank saw.

    Attributes:
        median_s: median time of a timed step, from one batch's start to the next one's.
        peak_pss_MiB: largest proportional set size.
        parameters: digest of the parameters after the last step.
        all_reduce_s: time per step that the collective was busy, where the strategy counts it.
        exposed_s: time per step that training waited for it, where the strategy counts it.
        copy_s: time per step that copying gradients into buckets added to backward, where the strategy counts it.
    """

    median_s: float
    peak_pss_MiB: float
    parameters: str
    all_reduce_s: float | None
    exposed_s: float | None
    copy_s: float | None


class NoSyncStrategy(DDPStrategy):
    """As many processes as ``ddp``, with the same launcher, and no gradient ever leaves its rank: the floor."""

    def configure_ddp(self) -> None:
        """Leave the model as it is."""


class _Watch(pl.Callback):
    """Times the steps, and samples memory beside those that are not timed."""

    def __init__(self, run: TrainRun, pss: PeakPss) -> None:
        self.starts: list[float] = []
        self._run = run
        self._pss = pss
        self._communication: list[Communication | None] = []

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        step = len(self.starts)
        if step == self._run.warmup:
            self._pss.stop()
            self._communication.append(_communication(trainer))
        elif step == self._run.warmup + self._run.steps:
            self._pss.start()
            self._communication.append(_communication(trainer))
        self.starts.append(time.perf_counter())

    def median_s(self) -> float:
        timed = self.starts[self._run.warmup : self._run.warmup + self._run.steps + 1]
        return statistics.median(end - start for start, end in pairwise(timed))

    def communication_s(self) -> tuple[float | None, float | None, float | None]:
        """All-reduce, exposed and copy time per timed step."""
        before, after = self._communication
        if before is None or after is None:
            return None, None, None
        return (
            # The process group's own all-reduce does not say how long it takes.
            (after.seconds - before.seconds) / self._run.steps or None,
            (after.exposed_seconds - before.exposed_seconds) / self._run.steps,
            (after.copy_seconds - before.copy_seconds) / self._run.steps,
        )


def _communication(trainer: pl.Trainer) -> Communication | None:
    return trainer.strategy.communication if isinstance(trainer.strategy, RingDDPStrategy) else None


def _build_strategy(run: TrainRun) -> DDPStrategy:
    timeout = timedelta(seconds=run.timeout_s)
    if run.strategy == "ring_ddp":
        return RingDDPStrategy(
            timeout=timeout,
            keep_freed_memory=run.keep_freed_memory,
            transport=cast(Transport, run.transport),
            compression=cast("Compression | None", run.compression),
        )
    if run.keep_freed_memory and not keep_freed_memory():
        raise RuntimeError("freed memory can be kept with glibc only; leave out +keep")
    if run.strategy == "none":
        return NoSyncStrategy(timeout=timeout)
    # The settings of users who know their model.
    return DDPStrategy(timeout=timeout, static_graph=True, gradient_as_bucket_view=True)


def main(folder: Path) -> None:
    """Train as ``folder/run.json`` says and write down what this rank saw."""
    run = TrainRun(**json.loads((folder / "run.json").read_text()))
    torch.set_num_threads(1)
    pl.seed_everything(0, verbose=False)
    network, shape = build_network(run.model, run.image_size)
    pss = PeakPss()
    watch = _Watch(run, pss)
    length = run.warmup + run.steps + _MEMORY_STEPS
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=run.ranks // run.hosts,
        num_nodes=run.hosts,
        strategy=_build_strategy(run),
        callbacks=[watch],
        max_epochs=1,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    # Known only now: Lightning has set the environment of this rank.
    batches = SyntheticBatches(shape, run.batch_size, length, seed=trainer.global_rank)
    pss.start()
    module = SyntheticClassifier(network)
    trainer.fit(module, batches.loader())
    pss.stop()

    digest = hashlib.sha256()
    for parameter in module.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    result = RankResult(watch.median_s(), pss.mebibytes, digest.hexdigest(), *watch.communication_s())
    (folder / f"rank-{trainer.global_rank}.json").write_text(json.dumps(asdict(result)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
