from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from training_meter import TrainingMeter


class _Run:
    """A Trainer and a module reduced to what the meter asks of them, with a clock that the test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, counts_communication: bool) -> None:
        self.now = 0.0
        self.logged: dict[str, float] = {}
        monkeypatch.setattr("training_meter.time.perf_counter", lambda: self.now)
        self.communication = SimpleNamespace(exposed_seconds=0.0) if counts_communication else None
        strategy = SimpleNamespace(communication=self.communication)
        # Six ranks: three pipelines of two stages.
        self.trainer: Any = SimpleNamespace(
            strategy=strategy, world_size=6, distributed_sampler_kwargs={"num_replicas": 3}, is_last_batch=False
        )
        self.module: Any = SimpleNamespace(log=self._log, device=torch.device("cpu"))
        self.meter = TrainingMeter()

    def _log(self, name: str, value: float, sync_dist: bool) -> None:
        assert sync_dist
        self.logged[name] = value

    def step(self, seconds: float, samples: int = 8, waited: float = 0.0) -> None:
        batch = (torch.zeros(samples, 1), torch.zeros(samples))
        self.meter.on_train_batch_start(self.trainer, self.module, batch, 0)
        self.now += seconds
        if self.communication is not None:
            self.communication.exposed_seconds += waited
        self.meter.on_train_batch_end(self.trainer, self.module, None, batch, 0)

    def end_epoch(self) -> None:
        self.meter.on_train_epoch_end(self.trainer, self.module)


def test_the_first_batch_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    run = _Run(monkeypatch, counts_communication=False)
    run.step(seconds=100.0)
    run.end_epoch()
    assert run.logged == {}
    run.step(seconds=2.0, samples=10)
    run.end_epoch()
    assert run.logged == {"samples_per_s": pytest.approx(3 * 10 / 2.0)}


def test_loading_counts_and_validation_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    run = _Run(monkeypatch, counts_communication=False)
    run.step(seconds=1.0)
    run.now += 0.5  # the next batch is loaded
    run.step(seconds=1.5)
    run.meter.on_validation_start(run.trainer, run.module)
    run.now += 1000.0
    run.step(seconds=2.0)
    run.end_epoch()
    run.now += 1000.0
    run.step(seconds=1.0)
    run.end_epoch()
    assert run.logged["samples_per_s"] == pytest.approx(3 * 24 / 5.0)


def test_the_share_of_waiting_covers_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    run = _Run(monkeypatch, counts_communication=True)
    run.step(seconds=9.0, waited=9.0)
    run.step(seconds=1.0, waited=0.25)
    run.step(seconds=3.0, waited=0.75)
    run.end_epoch()
    assert run.logged["communication_share"] == pytest.approx(0.25)
