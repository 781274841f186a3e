"""Exact averages and uneven data over the replicas of a pipeline, and within one."""

from __future__ import annotations

import re
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.helpers.assertions import assert_close_to_single_process, assert_ranks_identical
from tests.helpers.models import Batch, Regression, network, sgd, state_of
from tests.helpers.pipelines import SCHEDULES, Pipelined, run_stages
from tests.helpers.ranks import RanksFailedError
from tests.helpers.uneven import loader_of, train_as_one

# By replica; a stage trains on the batches of its replica.
SIZES = [[7, 3, 5, 2, 4], [2, 6, 2, 8, 3]]
APART = [[4] * 6, [3] * 3]


class _Watched(Regression):
    """Not a number where a replica has no data; counts in a buffer and in what it logs."""

    def __init__(self) -> None:
        super().__init__(0, network(dtype=torch.float64), sgd)
        self.count: Tensor
        self.register_buffer("count", torch.zeros(()))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.count += 1
        loss = F.mse_loss(self.net(batch[0]), batch[1])
        has_data = cast(Any, self.trainer.strategy).has_data
        loss = loss if has_data else loss * float("nan")
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True, batch_size=len(batch[0]))
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.record("has data", cast(Any, self.trainer.strategy).has_data)
        self.record("count", self.count)
        self.record("loss", self.trainer.callback_metrics["loss_step"])

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("val_loss", F.mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)


def _fit(
    place: Pipelined, sizes: list[list[int]], stream: bool, options: dict[str, Any]
) -> tuple[dict[str, Tensor], dict[str, list[Any]], int]:
    module, trainer = _Watched(), place.trainer(**options)
    replica = place.rank // 2
    loader = loader_of(sizes[min(replica, len(sizes) - 1)], replica, stream=stream)
    trainer.fit(module, loader, loader_of([4, 3], replica))
    return state_of(module), module.records, trainer.global_step


def _weights(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if name.startswith("net.")}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("window", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_samples_of_all_replicas_count_alike(window: int, schedule: str) -> None:
    options = {"accumulate_grad_batches": window, "gradient_clip_val": 0.3}
    ranks = run_stages(
        _fit, 4, SIZES, False, options, num_stages=2, balance=[2, 1], chunks=2, schedule=schedule, average="samples"
    )
    assert_ranks_identical([_weights(state) for state, _, _ in ranks])
    expected = train_as_one(SIZES, window, optimizer=sgd, clip=0.3)
    assert_close_to_single_process(_weights(ranks[0][0]), expected, tolerance=1e-12)


@pytest.mark.parametrize("schedule", [SCHEDULES[0], *(pytest.param(s, marks=pytest.mark.slow) for s in SCHEDULES[1:])])
def test_samples_in_windows_of_one_pipeline(schedule: str) -> None:
    """No other rank has samples of its own: nothing needs to be sent, and the window counts all the same."""
    ranks = run_stages(
        _fit, 2, SIZES[:1], False, {"accumulate_grad_batches": 3}, balance=[2, 1], chunks=2, schedule=schedule,
        average="samples",
    )  # fmt: skip
    expected = train_as_one(SIZES[:1], window=3, optimizer=sgd)
    assert_close_to_single_process(_weights(ranks[0][0]), expected, tolerance=1e-12)


@pytest.mark.parametrize("stream", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["stream", "known lengths"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("average", [pytest.param("ranks", marks=pytest.mark.slow), "samples"])
def test_join_goes_on_with_the_replicas_that_have_data(average: Any, schedule: str, stream: bool) -> None:
    ranks = run_stages(
        _fit, 4, APART, stream, {"max_epochs": 2}, num_stages=2, balance=[2, 1], chunks=2, schedule=schedule,
        average=average, uneven="join",
    )  # fmt: skip
    assert_ranks_identical([_weights(state) for state, _, _ in ranks])
    expected = train_as_one(APART, epochs=2, optimizer=sgd, mean_of_means=average == "ranks")
    assert_close_to_single_process(_weights(ranks[0][0]), expected, tolerance=1e-12)
    for rank, (_, records, steps) in enumerate(ranks):
        assert steps == 12
        assert records["has data"] == ([True] * 12 if rank < 2 else ([True] * 3 + [False] * 3) * 2)
        assert all(torch.isfinite(loss) for loss in records["loss"])
        # Before each step, all have the buffers of the first replica that has data.
        counts = range(1, 13) if rank < 2 else (1, 2, 3, 3, 4, 5, 7, 8, 9, 9, 10, 11)
        if schedule == "gpipe":  # else each micro-batch counts
            assert [int(count) for count in records["count"]] == list(counts)


@pytest.mark.parametrize("stream", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["stream", "known lengths"])
def test_stop_and_error(stream: bool) -> None:
    strategy: dict[str, Any] = {"num_stages": 2, "balance": [2, 1], "chunks": 2}
    ranks = run_stages(_fit, 4, APART, stream, {"max_epochs": 2}, uneven="stop", **strategy)
    expected = train_as_one([APART[0][:3], APART[1]], epochs=2, optimizer=sgd, mean_of_means=True)
    assert_close_to_single_process(_weights(ranks[0][0]), expected, tolerance=1e-12)
    with pytest.raises(RanksFailedError) as failure:
        run_stages(_fit, 4, APART, stream, {}, **strategy)
    for outcome in failure.value.outcomes:
        found = "[Rr]anks 2, 3 ran out of training batches after 3 of them"
        known = r"The train dataloader has 3 \(ranks 2, 3\), 6 \(ranks 0, 1\) batches"
        assert re.search(found if stream else known, str(outcome.error)), outcome


def _fit_apart(place: Pipelined) -> int:
    """Stages of one pipeline whose loaders differ."""
    trainer = place.trainer()
    trainer.fit(_Watched(), loader_of([4] * (5 - 2 * place.rank), 0, stream=True))
    return trainer.global_step


@pytest.mark.slow
@pytest.mark.parametrize(("uneven", "steps"), [("stop", 3), ("join", 5)])
def test_stages_of_one_pipeline_that_differ(uneven: str, steps: int) -> None:
    """The batches of the first stage are the ones that count."""
    assert run_stages(_fit_apart, 2, balance=[2, 1], uneven=uneven) == [steps] * 2


class _Norm(Regression):
    """With a batch norm in the module that is cut."""

    def __init__(self) -> None:
        super().__init__(0, nn.Sequential(*network(dtype=torch.float64), nn.BatchNorm1d(3).double()), sgd)


def _fit_norm(place: Pipelined) -> list[list[Tensor]]:
    module, trainer = _Norm(), place.trainer()
    seen: list[list[Tensor]] = []

    def note(*_: Any) -> None:
        norm = module.net.get_submodule("3")
        seen.append([buffer.clone() for buffer in norm.buffers() if not buffer.is_meta])

    module.on_train_batch_end = note  # type: ignore[method-assign, assignment]
    replica = place.rank // 2
    trainer.fit(module, loader_of(APART[replica], replica, stream=True))
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_batch_norms_of_a_replica_without_data_stay(schedule: str) -> None:
    *_, last = run_stages(_fit_norm, 4, num_stages=2, balance=[2, 2], chunks=2, schedule=schedule, uneven="join")
    assert len(last[0]) == 3
    assert all(torch.equal(one, other) for one, other in zip(last[2], last[5], strict=True))
    assert not torch.equal(last[1][0], last[2][0])
