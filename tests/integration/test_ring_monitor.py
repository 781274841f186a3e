"""RingMonitor in training: what it logs, whom it blames, what it traces, and what it compares."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import Logger
from torch import Tensor

from ringstrategy import PipelineStrategy, RingDDPStrategy, RingMonitor
from ringstrategy.communication import Communication
from ringstrategy.gradients.buckets import MIB
from ringstrategy.monitor.costs import RankCosts, bubble
from tests.helpers.models import Batch, Regression, shard
from tests.helpers.pipelines import Classification, rows
from tests.helpers.ranks import RanksFailedError, run_ranks
from tests.helpers.trainers import trainer_on_rank

_STEPS = 6


class _Records(Logger):
    """Keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.logged: list[tuple[int | None, dict[str, float]]] = []

    @property
    def name(self) -> str:
        return "records"

    @property
    def version(self) -> int:
        return 0

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.logged.append((step, metrics))

    def log_hyperparams(self, *_: Any) -> None:
        """Nothing to keep."""


class _Module(Regression):
    """Slow on one rank, and with a parameter that leaves the others at a step of one rank."""

    def __init__(self, rank: int, slow: int | None = None, strays: int | None = None) -> None:
        super().__init__(rank)
        self.slow, self.strays = slow, strays

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        if self.rank == self.slow:
            time.sleep(0.05)
        return self.loss(batch)

    def on_train_batch_start(self, *_: Any) -> None:
        if self.rank == 1 and self.global_step == self.strays:
            with torch.no_grad():
                self.get_parameter("net.2.weight")[0, 0] += 1e-6


def _train(
    rank: int,
    world_size: int,
    monitor: dict[str, Any],
    strategy: dict[str, Any],
    module: dict[str, Any],
    trainer: dict[str, Any],
) -> tuple[tuple[RankCosts, ...], Communication, list[tuple[int | None, dict[str, float]]], list[str]]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("lightning.fabric").addHandler(handler)
    logging.getLogger("lightning.pytorch").addHandler(handler)
    logging.getLogger("lightning.fabric.utilities.rank_zero").addHandler(handler)
    logger, watching = _Records(), RingMonitor(**monitor)
    fitting = trainer_on_rank(
        rank,
        world_size,
        strategy=RingDDPStrategy(bucket_cap_mb=1e-4, **strategy),
        callbacks=[watching],
        logger=logger,
        log_every_n_steps=2,
        **trainer,
    )
    fitting.fit(_Module(rank, **module), shard(rank, world_size, rows=4 * _STEPS * world_size, batch_size=4))
    assert isinstance(fitting.strategy, RingDDPStrategy)
    return watching.costs, fitting.strategy.communication, logger.logged, said


def _run(
    world_size: int = 2,
    strategy: dict[str, Any] | None = None,
    module: dict[str, Any] | None = None,
    trainer: dict[str, Any] | None = None,
    **monitor: Any,
) -> list[Any]:
    return run_ranks(_train, world_size, monitor, strategy or {}, module or {}, trainer or {})


@pytest.mark.parametrize("transport", ["auto", "backend"])
def test_numbers_are_those_that_the_strategy_counts(transport: str) -> None:
    """Symptom: the monitor counts other steps, or each step twice."""
    ranks = _run(strategy={"transport": transport}, trainer={"max_epochs": 2})
    for costs, spent, logged, _ in ranks:
        assert costs == ranks[0][0], "every rank knows all"
        assert [rank.steps for rank in costs] == [2 * _STEPS - 2] * 2
        buckets = spent.all_reduces // (2 * _STEPS)
        assert buckets > 1
        assert all(rank.communication.all_reduces == buckets * rank.steps for rank in costs)
        of_steps = [metrics for _, metrics in logged if "ring/buckets_step" in metrics]
        assert [step for step, metrics in logged if "ring/buckets_step" in metrics] == [3, 5, 7, 9, 11]
        assert all(metrics["ring/buckets_step"] == buckets for metrics in of_steps)
        of_epochs = [metrics for _, metrics in logged if "ring/buckets_epoch" in metrics]
        assert len(of_epochs) == 2
        assert of_epochs[0]["ring/buckets_epoch"] == buckets
    sent = sum(spent.bytes_sent for _, spent, _, _ in ranks) / (2 * 2 * _STEPS) / MIB
    assert of_epochs[1]["ring/sent_MiB_epoch"] == pytest.approx(sent, rel=0.02)
    for name in ("exposed_ms", "all_reduce_ms", "busbw_GBps", "waited_ms"):
        assert of_epochs[1][f"ring/{name}_epoch"] > 0.0
    assert ("ring/waited_ms_step" in of_steps[0]) == (transport == "auto"), "only our own tell per step"


class _LikeTheBenchmark(pl.Callback):
    """Reads what the strategy counts as the benchmark of training steps does."""

    def __init__(self) -> None:
        self.read: list[Communication] = []

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self.read.append(trainer.strategy.communication)  # type: ignore[attr-defined]

    def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.read.append(trainer.strategy.communication)  # type: ignore[attr-defined]


def _measure(rank: int, world_size: int) -> tuple[RankCosts, list[Communication]]:
    monitor, benchmark = RingMonitor(), _LikeTheBenchmark()
    trainer = trainer_on_rank(rank, world_size, callbacks=[monitor, benchmark])
    trainer.fit(_Module(rank), shard(rank, world_size, rows=4 * _STEPS * world_size, batch_size=4))
    return monitor.costs[rank], benchmark.read


def test_numbers_are_those_of_the_benchmark() -> None:
    """Symptom: two tools of one package tell two stories."""
    for costs, (before, after) in run_ranks(_measure, 2):
        measured = [late - early for early, late in zip(before, after, strict=True)]
        assert list(costs.communication) == pytest.approx(measured)
        assert costs.all_reduce_seconds == pytest.approx(after.seconds - before.seconds)
        assert costs.steps == _STEPS - 2


@pytest.mark.parametrize("transport", ["auto", "backend"])
def test_the_slow_rank_is_named(transport: str) -> None:
    """Symptom: all ranks show waiting, and nobody knows for whom."""
    costs, _, logged, said = _run(3, strategy={"transport": transport}, module={"slow": 1})[0]
    compared = costs[0].compared
    assert compared == _STEPS - 2
    assert [rank.slowest for rank in costs] == [0, compared, 0]
    assert costs[1].waited_seconds == 0.0
    assert min(costs[rank].waited_seconds for rank in (0, 2)) > 0.02 * compared
    of_epoch = next(metrics for _, metrics in logged if "ring/slowest_rank_epoch" in metrics)
    assert of_epoch["ring/slowest_rank_epoch"] == 1.0
    if transport == "auto":
        of_step = [metrics for _, metrics in logged if "ring/slowest_rank_step" in metrics]
        assert {metrics["ring/slowest_rank_step"] for metrics in of_step} == {1.0}
        assert min(metrics["ring/waited_ms_step"] for metrics in of_step) > 10.0
    assert any("slowest: rank 1, in 100% of 4 steps" in text for text in said)


def test_the_plan_is_shown_when_it_changes() -> None:
    """Symptom: it is shown at every step, or as it was before the order was learnt."""
    first, other = _run(plan=True)
    plans = [text for text in first[3] if "Gradient buckets" in text]
    assert len(plans) == 1, "gradients arrive in the order in which they are expected"
    assert all(f"net.{layer}.{kind}" in plans[0] for layer in (0, 2) for kind in ("weight", "bias"))
    assert not [text for text in other[3] if "Gradient buckets" in text]


def _events(path: Path) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return events


@pytest.mark.parametrize("transport", ["auto", pytest.param("backend", marks=pytest.mark.slow)])
def test_a_trace_shows_all_ranks_on_one_clock(transport: str, tmp_path: Path) -> None:
    """Symptom: ranks overwrite each other's file, or their times do not fit together."""
    path = tmp_path / "traces" / "trace.json"
    ranks = _run(strategy={"transport": transport}, trace=str(path), trace_steps=4)
    buckets = ranks[0][1].all_reduces // _STEPS
    spans = [event for event in _events(path) if event["ph"] == "X"]
    for rank in (0, 1):
        mine = [event for event in spans if event["pid"] == rank]
        for phase in ("forward", "backward", "wait for gradients", "optimizer"):
            assert [event["args"]["step"] for event in mine if event["name"] == phase] == [0, 1, 2, 3]
        reduced = [event for event in mine if event["name"].startswith("bucket")]
        assert len(reduced) >= 3 * buckets, "the first step has buckets of its own"
        assert all(event["args"]["parameters"] for event in reduced)
        backward = next(e for e in mine if e["name"] == "backward" and e["args"]["step"] == 3)
        last = [event for event in reduced if event["args"]["step"] == 3]
        assert len(last) == buckets
        for event in last:
            assert backward["ts"] <= event["ts"]
            assert event["ts"] + event["dur"] <= backward["ts"] + backward["dur"]
    if transport == "auto":
        waits = [event for event in spans if event["name"].startswith("wait for rank")]
        assert {(event["pid"], event["name"]) for event in waits} == {(0, "wait for rank 1"), (1, "wait for rank 0")}
    # An all-reduce ends on all ranks only after all have begun it.
    by_bucket = zip(*([e for e in spans if e["pid"] == rank and "bucket" in e["name"]] for rank in (0, 1)), strict=True)
    for pair in by_bucket:
        assert max(event["ts"] for event in pair) <= min(event["ts"] + event["dur"] for event in pair) + 1.0


def test_ranks_that_drift_apart_are_found() -> None:
    """Symptom: one rank trains another model, and the run ends as if nothing had happened."""
    for costs, *_ in _run(check_every=2):
        assert costs, "equal parameters are no error"
    with pytest.raises(RanksFailedError) as raised:
        _run(check_every=2, module={"strays": 3})
    for outcome in raised.value.outcomes:
        assert "At epoch 0, step 4, parameter 'net.2.weight' of shape (3, 6) is another one on rank 1" in str(
            outcome.error
        )


def test_another_package_s_strategy_is_refused() -> None:
    """Symptom: an AttributeError in the first step."""
    trainer = pl.Trainer(accelerator="cpu", devices=1, callbacks=[RingMonitor()], logger=False, max_steps=1)
    with pytest.raises(ValueError, match=r"this trainer has SingleDeviceStrategy.*ring_ddp"):
        trainer.fit(Regression(), shard(0, 1, rows=4, batch_size=4))


class _Unwatched(pl.Callback):
    """Looks whether anybody records."""

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, RingDDPStrategy)
        assert strategy._reducer is not None
        assert strategy._reducer.watch is None
        assert strategy._collective is not None
        assert strategy._collective._worker.watch is None  # type: ignore[attr-defined]
        assert strategy._collective._memory.watch is None  # type: ignore[attr-defined]


def _without(rank: int, world_size: int) -> int:
    trainer = trainer_on_rank(rank, world_size, callbacks=[_Unwatched()])
    trainer.fit(_Module(rank), shard(rank, world_size, rows=8 * world_size, batch_size=4))
    return trainer.global_step


def test_without_it_nothing_is_recorded() -> None:
    """Symptom: everybody pays for what few look at."""
    assert run_ranks(_without, 2) == [2, 2]


def _pipeline(rank: int, world_size: int, schedule: Any, stages: int, path: Path) -> tuple[Any, dict[str, float]]:
    monitor = RingMonitor(trace=path, trace_steps=3)
    strategy = PipelineStrategy(schedule=schedule, num_stages=stages, chunks=4, checkpoint="never")
    trainer = trainer_on_rank(rank, world_size, strategy=strategy, callbacks=[monitor], log_every_n_steps=1)
    trainer.fit(Classification(), rows(count=40, batch_size=8))
    return monitor.costs, {name: float(value) for name, value in trainer.callback_metrics.items()}


@pytest.mark.parametrize(
    ("schedule", "world_size"),
    [("gpipe", 2), ("1f1b", 2), pytest.param("gpipe", 4, marks=pytest.mark.slow)],
)
def test_the_bubble_and_micro_batches_of_a_pipeline(schedule: str, world_size: int, tmp_path: Path) -> None:
    """Symptom: waiting of one stage for another is nobody's."""
    path = tmp_path / "trace.json"
    for costs, metrics in run_ranks(_pipeline, world_size, schedule, 2, path):
        idle = bubble(costs)
        assert idle is not None
        assert 0.0 < idle < 1.0
        assert metrics["ring/bubble_epoch"] == pytest.approx(idle)
        assert 0.0 < metrics["ring/bubble_step"] < 1.0
        assert ("ring/buckets_epoch" in metrics) == (world_size > 2)
    spans = [event for event in _events(path) if event["ph"] == "X" and event["cat"] == "pipeline"]
    for rank in range(world_size):
        names = [event["name"] for event in spans if event["pid"] == rank]
        assert sorted(names) == sorted([f"{kind} {n}" for kind in ("forward", "backward") for n in range(4)] * 3)
    first = {event["name"]: event for event in reversed(spans) if event["pid"] == 0}
    second = {event["name"]: event for event in reversed(spans) if event["pid"] == 1}
    for n in range(4):
        assert first[f"forward {n}"]["ts"] + first[f"forward {n}"]["dur"] <= second[f"forward {n}"]["ts"]
        assert second[f"backward {n}"]["ts"] + second[f"backward {n}"]["dur"] <= first[f"backward {n}"]["ts"]
