"""``RingMonitor``: what communication costs, in the logs and as a table; who waits for whom; a trace of all ranks."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities import rank_zero_info
from typing_extensions import override

from ringstrategy import _lightning
from ringstrategy.communication import Communication
from ringstrategy.monitor.costs import EpochRecord, RankCosts, StepCosts, compare, step_costs
from ringstrategy.monitor.metrics import epoch_metrics, step_metrics
from ringstrategy.monitor.parameter_check import check_parameters
from ringstrategy.monitor.tables import costs_table, plan_table
from ringstrategy.monitor.trace import RankTrace, clock_offsets, write
from ringstrategy.monitor.tracer import Tracer
from ringstrategy.pipeline.table import as_text
from ringstrategy.process_group import Host
from ringstrategy.recorder import Recorder
from ringstrategy.strategies.pipeline import PipelineStrategy
from ringstrategy.strategies.ring_ddp import RingDDPStrategy

__all__ = ["RingMonitor"]

# In the first one the order of gradients is learnt and nothing is hidden, in the second memory is laid out anew.
_WARM_UP_STEPS = 2
_CLOCK_ROUNDS = 5


class RingMonitor(pl.Callback):
    """Shows what communication costs in training.

    Every ``log_every_n_steps`` it logs what a step has cost rank 0, at the end of an epoch what it has cost on the
    average over ranks, and at the end of training it shows a table. A step is a batch; the first two do not count.

    .. code-block:: text

        ring/sent_MiB        sent to other ranks
        ring/buckets         all-reduces
        ring/all_reduce_ms   time in all-reduces
        ring/exposed_ms      what is not hidden behind backward, and waits for stages
        ring/busbw_GBps      bytes sent per second of all-reduce; not in a pipeline
        ring/waited_ms       from the end of the own backward until the last rank was there
        ring/slowest_rank    which that was, most of the time
        ring/bubble          share of a pipeline's time in which stages compute nothing

    with ``_step`` or ``_epoch`` at the end of the name.

    Args:
        trace: file for what all ranks did when, for chrome://tracing or ui.perfetto.dev.
        trace_steps: steps that it shows, from the first one on.
        check_every: compare the parameters of all ranks, bit by bit, after so many optimizer steps, again and again.
        plan: show which parameters travel together, whenever that changes.

    Attributes:
        costs: by rank, of all steps that count so far, as of the last end of an epoch.

    Raises:
        ValueError: an argument has no meaning, or the strategy is another package's.
    """

    def __init__(
        self,
        trace: str | Path | None = None,
        trace_steps: int = 20,
        check_every: int | None = None,
        plan: bool = False,
    ) -> None:
        for name, count in (("trace_steps", trace_steps), ("check_every", check_every)):
            if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
                raise ValueError(f"{name}={count!r} must be a whole number of at least 1.")
        self.costs: tuple[RankCosts, ...] = ()
        self._trace = None if trace is None else Path(trace)
        self._trace_steps = trace_steps
        self._check_every = check_every
        self._plan = plan
        self._strategy: RingDDPStrategy | None = None
        self._forget()

    def _forget(self) -> None:
        self._recorder = Recorder()
        self._tracer: Tracer | None = None
        self._clock_offset = 0.0
        self._begun = 0.0
        self._before = Communication()
        self._count = 0
        self._epoch: list[StepCosts] = []
        self._logged = 0  # steps of the epoch
        self._shown: object = ()
        self._checked = 0

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if not isinstance(trainer.strategy, RingDDPStrategy):
            raise ValueError(
                f"RingMonitor shows what the strategies of ringstrategy count, and this trainer has "
                f"{type(trainer.strategy).__name__}. Use strategy='ring_ddp', 'gpipe' or 'pipeline_1f1b', or leave "
                "RingMonitor out."
            )

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, RingDDPStrategy)
        self._forget()
        self.costs = ()
        self._strategy = strategy
        self._clock_offset = _clock_offset(strategy)
        if self._trace is not None:
            self._tracer = Tracer(self._trace_steps)
        self._checked = trainer.global_step
        strategy.watch(self._recorder)

    # -- steps -------------------------------------------------------------------------------------------------------

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        assert self._strategy is not None
        self._before = self._strategy.communication
        self._begun = time.perf_counter()
        self._turn_to("forward")

    @override
    def on_before_zero_grad(self, *_: Any) -> None:
        self._turn_to("zero_grad")

    @override
    def on_before_backward(self, *_: Any) -> None:
        self._turn_to("backward")

    @override
    def on_after_backward(self, *_: Any) -> None:
        self._turn_to(None)

    @override
    def on_before_optimizer_step(self, *_: Any) -> None:
        self._turn_to("optimizer")

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        assert self._strategy is not None
        self._turn_to("monitor")
        recorded = self._recorder.take()
        if self._tracer is not None:
            self._tracer.end_step(recorded, self._recorder.plan)
        self._count += 1
        if self._count > _WARM_UP_STEPS:
            communication = _difference(self._strategy.communication, self._before)
            self._epoch.append(step_costs(time.perf_counter() - self._begun, communication, recorded))
            if _lightning.logs_now(trainer):
                pl_module.log_dict(step_metrics(self._epoch[self._logged :]), on_step=True, on_epoch=False)
                self._logged = len(self._epoch)
        if self._plan and self._recorder.plan != self._shown:
            self._shown = self._recorder.plan
            rank_zero_info(as_text(plan_table(self._recorder.plan)))
        if self._check_every is not None and trainer.global_step >= self._checked + self._check_every:
            self._checked = trainer.global_step
            self._compare_parameters(trainer, pl_module)
        self._turn_to("next batch")

    def _turn_to(self, what: str | None) -> None:
        if self._tracer is not None:
            self._tracer.turn_to(what)

    @override
    def on_validation_start(self, *_: Any) -> None:
        self._turn_to("validation")

    @override
    def on_validation_end(self, *_: Any) -> None:
        self._turn_to(None)

    def _compare_parameters(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        strategy = self._strategy
        assert strategy is not None
        where = f"epoch {trainer.current_epoch}, step {trainer.global_step}"
        parameters = [(name, parameter) for name, parameter in pl_module.named_parameters() if not parameter.is_meta]
        check_parameters(
            parameters, strategy.global_rank, lambda own: strategy.exchange(own, "checksums of parameters", True), where
        )

    # -- epochs ------------------------------------------------------------------------------------------------------

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        strategy = self._strategy
        assert strategy is not None
        self._turn_to(None)
        records = strategy.exchange(EpochRecord.of(self._epoch, self._clock_offset), "what an epoch has cost")
        self._epoch, self._logged = [], 0
        if not all(record.backwards_ended for record in records):
            return
        costs = compare(records, _stages(strategy))
        pl_module.log_dict(epoch_metrics(costs), sync_dist=True)  # equal on all ranks, but Lightning cannot know
        self.costs = tuple(a.plus(b) for a, b in zip(self.costs, costs, strict=True)) if self.costs else tuple(costs)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        strategy = self._strategy
        assert strategy is not None
        if self.costs:
            ranks = f"{len(self.costs)} rank{'s'[: len(self.costs) > 1]}"
            rank_zero_info(as_text(costs_table(self.costs, f"RingMonitor: {self.costs[0].steps} steps on {ranks}")))
        else:
            rank_zero_info(f"RingMonitor leaves out the first {_WARM_UP_STEPS} steps, and there were no more.")
        if self._tracer is not None:
            assert self._trace is not None
            own = RankTrace(f"rank {strategy.global_rank}", self._tracer.spans(self._clock_offset))
            everyone = strategy.exchange(own, "the traces")
            if trainer.is_global_zero:
                write(self._trace, everyone)
                rank_zero_info(f"RingMonitor wrote {self._trace}; ui.perfetto.dev shows it.")
        self._release()

    @override
    def on_exception(self, *_: Any) -> None:
        self._release()

    def _release(self) -> None:
        if self._strategy is not None:
            self._strategy.watch(None)
        self._strategy = None
        self._forget()


def _difference(now: Communication, before: Communication) -> Communication:
    return Communication(
        now.all_reduces - before.all_reduces,
        now.bytes_sent - before.bytes_sent,
        now.seconds - before.seconds,
        now.exposed_seconds - before.exposed_seconds,
        now.copy_seconds - before.copy_seconds,
    )


def _stages(strategy: RingDDPStrategy) -> int:
    return strategy.num_stages if isinstance(strategy, PipelineStrategy) else 1


def _clock_offset(strategy: RingDDPStrategy) -> float:
    """What this rank's clock is ahead of rank 0's. Collective."""
    hosts = strategy.exchange(Host.here(), "the hosts")
    readings = []
    for _ in range(_CLOCK_ROUNDS if len(set(hosts)) > 1 else 1):
        strategy.barrier("RingMonitor: clocks")
        readings.append(time.perf_counter())
    return clock_offsets(strategy.exchange(readings, "the clocks"), hosts)[strategy.global_rank]
