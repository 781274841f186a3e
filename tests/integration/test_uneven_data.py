"""Ranks with different numbers of training batches: an error, an early end, or some train on without the others."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import DataLoader, get_worker_info
from torchmetrics import MeanMetric, SumMetric

from tests.helpers.assertions import assert_close_to_single_process, assert_ranks_identical
from tests.helpers.models import Batch, Regression, network, plain_sgd, sgd, state_of
from tests.helpers.ranks import Outcome, RanksFailedError, run_ranks
from tests.helpers.trainers import strategy_under_test, trainer_on_rank
from tests.helpers.uneven import Pair, Stream, batches_of, loader_of, train_as_one

LONG, SHORT = [4] * 16, [4] * 8
Build = Callable[[int], Regression]


class _Watched(Regression):
    """Notes what it trains on, and logs in every way."""

    def __init__(self, rank: int, net: nn.Module | None = None, optimizer: Any = sgd) -> None:
        super().__init__(rank, network(dtype=torch.float64) if net is None else net, optimizer)
        self.rows, self.mean = SumMetric(), MeanMetric()

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss, rows = self.loss(batch), len(batch[0])
        if cast(Any, self.trainer.strategy).has_data:
            self.record("first inputs", batch[0][0, 0])
        self.record("batch_idx", (self.current_epoch, batch_idx))
        self.rows(rows)
        self.mean(loss)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True, batch_size=rows)
        self.log("own", loss, on_step=True, on_epoch=False)
        for name in ("sum", "min", "max"):
            self.log(name, loss, on_step=False, on_epoch=True, sync_dist=True, reduce_fx=name, batch_size=rows)
        self.log_dict({"rows": self.rows, "mean": self.mean}, on_step=False, on_epoch=True)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        batch[0].fill_(float("nan"))  # one may do that to one's batch
        for name in ("loss_step", "own"):
            self.record(name, self.trainer.callback_metrics.get(name))

    def on_train_epoch_end(self) -> None:
        for name in ("loss_epoch", "sum", "min", "max", "rows", "mean"):
            self.record(name, self.trainer.callback_metrics.get(name))

    def on_validation_epoch_end(self) -> None:
        self.record("validated at", self.trainer.global_step)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)


@dataclass(frozen=True)
class _Trained:
    state: dict[str, Tensor]
    records: dict[str, list[Any]]
    global_step: int
    metrics: dict[str, Tensor]


@dataclass(frozen=True)
class _Setting:
    """What is trained on which batches."""

    sizes: tuple[list[int], ...] = (LONG, SHORT)
    stream: bool = True
    validate: bool = False
    strategy: tuple[tuple[str, Any], ...] = ()
    build: Build = _Watched
    folder: str = ""


def _train(rank: int, world_size: int, setting: _Setting, options: dict[str, Any]) -> _Trained:
    module = setting.build(rank)
    if setting.folder:
        options = options | {
            "callbacks": [ModelCheckpoint(setting.folder, every_n_train_steps=3, save_top_k=-1)],
            "enable_checkpointing": True,
        }
    trainer = trainer_on_rank(rank, world_size, strategy=strategy_under_test(**dict(setting.strategy)), **options)
    loader = _Fresh(setting.sizes[rank], rank, setting.stream)
    trainer.fit(module, loader.loader(), _Fresh([4, 3], rank, False).loader() if setting.validate else None)
    return _Trained(state_of(module), module.records, trainer.global_step, dict(trainer.callback_metrics))


@dataclass(frozen=True)
class _Fresh:
    """Batches that are copied before they are handed out."""

    sizes: list[int]
    rank: int
    stream: bool

    def loader(self) -> DataLoader[Pair]:
        loader = loader_of(self.sizes, self.rank, stream=self.stream)
        loader.collate_fn = _copied
        return loader


def _copied(batch: Pair) -> Pair:
    return batch[0].clone(), batch[1].clone()


def train(setting: _Setting, options: dict[str, Any] | None = None, **strategy: Any) -> list[_Trained]:
    """Train on ranks; all end with the same weights."""
    setting = _Setting(**(vars(setting) | {"strategy": tuple(strategy.items())}))
    ranks = run_ranks(_train, len(setting.sizes), setting, options or {})
    weights = [{name: value for name, value in rank.state.items() if name.startswith("net.")} for rank in ranks]
    assert_ranks_identical(weights)
    assert len({rank.global_step for rank in ranks}) == 1
    return ranks


def failing(setting: _Setting, options: dict[str, Any] | None = None, **strategy: Any) -> list[Outcome]:
    """Train on ranks, all of which fail, soon and by themselves."""
    with pytest.raises(RanksFailedError) as failure:
        train(setting, options, **strategy)
    assert not any("still running" in str(outcome.error) for outcome in failure.value.outcomes)
    return failure.value.outcomes


def _weights(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if name.startswith("net.")}


_TWO_EPOCHS = {"max_epochs": 2}
_EACH = pytest.mark.parametrize(("stream", "validate"), [
    (True, True), (False, False),
    *(pytest.param(*p, marks=pytest.mark.slow) for p in [(True, False), (False, True)]),
])  # fmt: skip


@pytest.mark.parametrize("validate", [pytest.param(False, marks=pytest.mark.slow), True])
def test_streams_that_end_apart_end_the_run(validate: bool) -> None:
    """Symptom: one rank is done while the other waits for ever, or meets it in the middle of validation."""
    for outcome in failing(_Setting(validate=validate), _TWO_EPOCHS):
        expected = (
            r"rank 1 ran out of training batches after 8 of them \(train, epoch 0, step \d\), while rank 0 had mo"
        )
        assert re.search(expected, str(outcome.error)), outcome
        assert "uneven='stop'" in str(outcome.error)


def test_lengths_that_differ_are_an_error_before_training() -> None:
    for outcome in failing(_Setting((LONG, SHORT, LONG), stream=False), _TWO_EPOCHS):
        assert outcome.error_type == "UnevenData"
        assert "The train dataloader has 8 (rank 1), 16 (ranks 0, 2) batches" in str(outcome.error)


@_EACH
def test_stop_ends_epochs_with_the_shortest(stream: bool, validate: bool) -> None:
    ranks = train(_Setting(stream=stream, validate=validate), _TWO_EPOCHS, uneven="stop")
    expected = train_as_one([LONG[:8], SHORT], epochs=2, optimizer=sgd)
    for rank in ranks:
        assert rank.global_step == 16
        assert_close_to_single_process(_weights(rank.state), expected, tolerance=1e-12)
        assert rank.records.get("validated at", []) == ([8, 16] if validate else [])


@_EACH
def test_join_goes_on_with_the_longest(stream: bool, validate: bool) -> None:
    ranks = train(_Setting(stream=stream, validate=validate), _TWO_EPOCHS, uneven="join")
    expected = train_as_one([LONG, SHORT], epochs=2, optimizer=sgd)
    for number, rank in enumerate(ranks):
        assert rank.global_step == 32
        assert_close_to_single_process(_weights(rank.state), expected, tolerance=1e-12)
        assert rank.records.get("validated at", []) == ([16, 32] if validate else [])
        own = [batch[0][0, 0] for batch in batches_of((LONG, SHORT)[number], number)]
        assert rank.records["first inputs"] == own * 2
        assert rank.records["batch_idx"] == [(epoch, index) for epoch in range(2) for index in range(16)]
    _assert_logged(ranks)


def _assert_logged(ranks: list[_Trained]) -> None:
    """What is logged are values of real batches alone."""
    net = network(dtype=torch.float64)
    optimizer = sgd(net.parameters())
    steps = []
    for number in range(16):
        batches = [batches_of(sizes, rank)[number] for rank, sizes in enumerate((LONG, SHORT)) if number < len(sizes)]
        losses = [F.mse_loss(net(inputs), targets) for inputs, targets in batches]
        steps.append([loss.item() for loss in losses])
        optimizer.zero_grad()
        torch.autograd.backward(torch.stack(losses).mean())
        optimizer.step()
    every = [loss for step in steps for loss in step]
    for number, rank in enumerate(ranks):
        found = {name: [None if v is None else float(v) for v in values] for name, values in rank.records.items()
                 if name not in ("batch_idx", "first inputs", "validated at")}  # fmt: skip
        assert found["loss_step"][:16] == pytest.approx([sum(step) / len(step) for step in steps])
        own = [step[min(number, len(step) - 1)] for step in steps] if number == 0 else [step[1] for step in steps[:8]]
        assert found["own"][:16] == pytest.approx([*own, *own[-1:] * (16 - len(own))])
        mean, total = sum(every) / len(every), sum(every)
        assert [found["loss_epoch"][0], found["mean"][0]] == pytest.approx([mean, mean])
        assert found["sum"][0] == pytest.approx(total)
        assert (found["min"][0], found["max"][0]) == pytest.approx((min(every), max(every)))
        assert found["rows"][0] == 4 * 24


@pytest.mark.parametrize("stream", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("window", [3, *(pytest.param(w, marks=pytest.mark.slow) for w in (2, 5))])
def test_join_counts_samples_in_windows(window: int, stream: bool) -> None:
    """Uneven ranks, uneven batches and a short last window at once; one rank has the least, none the most of both."""
    sizes = ([7, 3, 5, 2, 4], [1, 6], [9, 1, 4, 2, 5, 3, 8])
    options = {"accumulate_grad_batches": window, "max_epochs": 2}
    ranks = train(_Setting(sizes, stream), options, uneven="join", average="samples")
    expected = train_as_one(sizes, window, epochs=2, optimizer=sgd)
    assert_close_to_single_process(_weights(ranks[0].state), expected, tolerance=1e-12)


@pytest.mark.parametrize(("mode", "stream"), [
    ("join", False),
    *(pytest.param(*p, marks=pytest.mark.slow) for p in [("join", True), ("stop", True), ("stop", False)]),
])  # fmt: skip
def test_validation_and_checkpoints_in_the_middle(mode: Any, stream: bool, tmp_path: Path) -> None:
    """Symptom: ranks validate after different batches, for each knows its own length alone."""
    interval = 3 if stream else 0.25
    options = {"val_check_interval": interval, "limit_train_batches": 10, "max_epochs": 2}
    setting = _Setting(stream=stream, validate=True, folder=str(tmp_path))
    ranks = train(setting, options, uneven=mode)
    steps = 8 if mode == "stop" else 10
    every = 3 if stream else steps // 4
    expected = [epoch * steps + at for epoch in range(2) for at in range(every, steps + 1, every)]
    for rank in ranks:
        assert rank.records["validated at"] == expected
        assert rank.global_step == 2 * steps
    saved = {int(re.findall(r"step=(\d+)", path.name)[0]) for path in tmp_path.iterdir()}
    assert saved == set(range(3, 2 * steps + 1, 3))


def test_equal_lengths_send_nothing_and_change_nothing() -> None:
    """Streams cost a byte per batch, loaders of equal known lengths nothing."""
    ranks = run_ranks(_look_at_loader, 2)
    assert ranks == [("DataLoader", "EvenLoader", "DataLoader")] * 2


def _look_at_loader(rank: int, world_size: int) -> tuple[str, ...]:
    kinds = []
    for sizes, stream, limit in ((SHORT, False, None), (SHORT, True, None), ((LONG, SHORT)[rank], False, 5)):
        trainer = trainer_on_rank(rank, world_size, max_steps=2, limit_train_batches=limit)
        trainer.fit(_Watched(rank), loader_of(list(sizes), rank, stream=stream))
        loader: Any = trainer.train_dataloader
        kinds.append(type(loader).__name__)
        # Whatever it is, it looks like the loader itself, also when training is over.
        assert loader.batch_size is None
        assert len(list(loader)) == len(sizes)
        assert loader.dataset is not None
    return tuple(kinds)


# -- a rank without data leaves no trace -----------------------------------------------------------------------------


class _Remembers(_Watched):
    """Buffers, a batch norm, and losses that are not a number where a rank has no data."""

    def __init__(self, rank: int, automatic: bool = True) -> None:
        super().__init__(rank, nn.Sequential(*network(dtype=torch.float64), nn.BatchNorm1d(3).double()), plain_sgd)
        self.automatic_optimization = automatic
        self.count: Tensor
        self.register_buffer("count", torch.zeros(()))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.count += 1
        loss = self.loss(batch)
        if not cast(Any, self.trainer.strategy).has_data:
            loss = loss * float("nan")
        self.log("loss", loss, sync_dist=True, on_step=True)
        if not self.automatic_optimization:
            optimizer = cast(Any, self.optimizers())
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        norm = self.net.get_submodule("3")
        self.record("mean", norm.running_mean)
        self.record("tracked", norm.num_batches_tracked)
        self.record("count", self.count)


@pytest.mark.parametrize(("short", "average", "automatic"), [
    (0, "samples", True), (1, "ranks", False),
    *(pytest.param(*p, marks=pytest.mark.slow) for p in product((0, 1), ("ranks", "samples"), (True, False))),
])  # fmt: skip
def test_nothing_of_a_rank_without_data_counts(short: int, average: Any, automatic: bool) -> None:
    """Symptom: NaN times zero; a batch norm that has seen the last batch over and over."""
    sizes = ([4] * 2, [4] * 5) if short == 0 else ([4] * 5, [4] * 2)
    build = partial(_Remembers, automatic=automatic)
    ranks = train(_Setting(sizes, build=build), uneven="join", average=average)
    for rank in ranks:
        assert all(torch.isfinite(value).all() for value in rank.state.values())
        assert torch.isfinite(rank.metrics["loss"])
    without = ranks[short].records
    for name in ("mean", "tracked"):
        assert torch.equal(without[name][1], without[name][4])
    # Others buffers are those of the first rank that has data, and were seen by all before each step.
    assert without["count"] == [1, 2, 2, 3, 4]
    assert ranks[1 - short].records["count"] == [1, 2, 3, 4, 5]
    # When training ends, all have the buffers of a rank that had data to the end.
    assert_ranks_identical([rank.state for rank in ranks])
    assert torch.equal(ranks[0].state["net.3.running_mean"], ranks[1 - short].records["mean"][4])


class _Reduces(_Watched):
    """Asks the other ranks in the middle of a step."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        reduce = self.trainer.strategy.reduce
        value = torch.tensor(float(self.rank + 2))
        self.record("reduced", [reduce(value, reduce_op=op).item() for op in ("mean", "sum", "max", "min", "product")])
        self.record("whole", reduce(torch.tensor(self.rank + 2), reduce_op="min"))
        self.record("any", self.trainer.strategy.reduce_boolean_decision(self.rank == 2, all=False))
        return self.loss(batch)


def test_values_combined_in_a_step_are_those_of_ranks_with_data() -> None:
    sizes = ([4] * 3, [4] * 2, [4])
    ranks = train(_Setting(sizes, build=_Reduces), uneven="join")
    for rank in ranks:
        assert rank.records["reduced"] == [[3, 9, 4, 2, 24], [2.5, 5, 3, 2, 6], [2, 2, 2, 2, 2]]
        assert rank.records["whole"] == [2, 2, 2]
        assert rank.records["any"] == [True] * 3


# -- special loaders -------------------------------------------------------------------------------------------------


class _Resumable:
    """A loader that says where it is, and can start there; lengths differ between ranks."""

    def __init__(self, sizes: list[int], rank: int) -> None:
        self._batches = batches_of(sizes, rank)
        self._next = 0

    def __iter__(self) -> Iterator[Pair]:
        while self._next < len(self._batches):
            self._next += 1
            yield self._batches[self._next - 1]
        self._next = 0

    def __len__(self) -> int:
        return len(self._batches)

    def state_dict(self) -> dict[str, int]:
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._next = state["next"]


def _resume(rank: int, world_size: int, folder: Path, mode: Any, save_at: int) -> tuple[dict[str, Tensor], int]:
    sizes = [[4] * 7, [4] * 5][rank]
    build = partial(Regression, rank, network(dtype=torch.float64), sgd)
    saving = ModelCheckpoint(folder, every_n_train_steps=save_at, save_top_k=-1, filename="{step}")
    first = trainer_on_rank(
        rank, world_size, strategy=strategy_under_test(uneven=mode), max_steps=save_at, max_epochs=-1,
        callbacks=[saving], enable_checkpointing=True,
    )  # fmt: skip
    first.fit(build(), _Resumable(sizes, rank))
    module = build()
    second = trainer_on_rank(rank, world_size, strategy=strategy_under_test(uneven=mode))
    second.fit(module, _Resumable(sizes, rank), ckpt_path=str(folder / f"step={save_at}.ckpt"), weights_only=False)
    return state_of(module), second.global_step


@pytest.mark.parametrize(("mode", "save_at"), [
    ("join", 6), *(pytest.param(*p, marks=pytest.mark.slow) for p in [("stop", 3), ("join", 3)]),
])  # fmt: skip
def test_resuming_in_the_middle_of_an_epoch(mode: Any, save_at: int, tmp_path: Path) -> None:
    """Symptom: the batch that a rank has looked ahead to is lost; a rank that has run out starts again."""
    ranks = run_ranks(_resume, 2, tmp_path, mode, save_at)
    assert_ranks_identical([state for state, _ in ranks])
    lengths = (5, 5) if mode == "stop" else (7, 5)
    assert [steps for _, steps in ranks] == [max(lengths)] * 2
    expected = train_as_one([[4] * length for length in lengths], optimizer=sgd)
    assert_close_to_single_process(ranks[0][0], expected, tolerance=1e-12)


def _combined(rank: int, world_size: int, mode: Any, uneven: Any) -> int:
    class Sums(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return torch.stack([self.loss(part) for part in batch if part is not None]).sum()

    loaders = [loader_of([4] * (6 - rank), rank, stream=True), loader_of([4] * 3, rank, stream=True)]
    module = Sums(rank, network(dtype=torch.float64))
    trainer = trainer_on_rank(rank, world_size, strategy=strategy_under_test(uneven=uneven), max_epochs=2)
    trainer.fit(module, CombinedLoader(loaders, mode))
    return trainer.global_step


@pytest.mark.parametrize(("mode", "steps"), [
    ("max_size_cycle", 10), *(pytest.param(*p, marks=pytest.mark.slow) for p in [("min_size", 6), ("max_size", 10)]),
])  # fmt: skip
def test_stop_with_several_loaders(mode: str, steps: int) -> None:
    assert run_ranks(_combined, 2, mode, "stop") == [steps] * 2


class _WithSyncBatchNorm(_Watched):
    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.norm = nn.SyncBatchNorm(3)


class _TakesIterator(_Watched):
    def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
        return self.loss(next(dataloader_iter)[0])


@pytest.mark.parametrize(("build", "sizes", "error"), [
    (_WithSyncBatchNorm, (LONG, SHORT), "'norm' is a SyncBatchNorm"),
    pytest.param(_TakesIterator, (LONG, SHORT), "training_step takes a dataloader_iter", marks=pytest.mark.slow),
    pytest.param(_Watched, (SHORT, []), "[Rr]ank 1 has no training batch at all", marks=pytest.mark.slow),
])  # fmt: skip
def test_what_cannot_join_is_refused(build: Build, sizes: tuple[list[int], ...], error: str) -> None:
    for outcome in failing(_Setting(sizes, build=build), uneven="join"):
        assert re.search(error, str(outcome.error)), outcome


def test_join_with_several_loaders_is_refused() -> None:
    with pytest.raises(RanksFailedError) as failure:
        run_ranks(_combined, 2, "max_size_cycle", "join")
    for outcome in failure.value.outcomes:
        assert "cannot tell which of the 2 train dataloaders of a CombinedLoader have data" in str(outcome.error)


@pytest.mark.slow
def test_a_stream_without_any_batch_stops_at_once() -> None:
    ranks = train(_Setting((SHORT, [])), _TWO_EPOCHS, uneven="stop")
    assert [rank.global_step for rank in ranks] == [0, 0]


class _Skips(Regression):
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        return None if self.rank == 1 and batch_idx == 1 else self.loss(batch)


def test_a_step_without_a_loss_on_one_rank() -> None:
    """Symptom: the other rank waits for gradients."""
    for outcome in failing(_Setting((SHORT, SHORT), build=partial(_Skips, net=network(dtype=torch.float64)))):
        assert "returning None in distributed training is not supported" in str(outcome.error)
        if outcome.rank == 0:
            assert re.search(r"rank 1 failed first \(pid \d+ on .*, train, epoch 0, step 1\)", str(outcome.error))


# -- in company ------------------------------------------------------------------------------------------------------


class _Sharded(Stream):
    """A stream whose workers share its batches."""

    def __iter__(self) -> Iterator[Pair]:
        worker = get_worker_info()
        assert worker is not None
        return iter(self._batches[worker.id :: worker.num_workers])


def _with_workers(
    rank: int, world_size: int, uneven: Any, persistent: bool
) -> tuple[dict[str, Tensor], int, list[int]]:
    rows = [(7, 2)[rank]] * (5, 3)[rank]
    stream = _Sharded(batches_of(rows, rank))
    # These ranks come from a fork server; workers that do as well would import all anew.
    loader = DataLoader(
        stream, batch_size=None, num_workers=2, persistent_workers=persistent, multiprocessing_context="fork"
    )
    module = Regression(rank, network(dtype=torch.float64), sgd)
    strategy = strategy_under_test(uneven=uneven, average="samples")
    trainer, steps = trainer_on_rank(rank, world_size, strategy=strategy, max_epochs=0), []
    for _ in range(2):
        assert trainer.fit_loop.max_epochs is not None
        trainer.fit_loop.max_epochs += 2
        trainer.fit(module, loader)
        steps.append(trainer.global_step)
    return state_of(module), len(list(loader)), steps


@pytest.mark.parametrize(("uneven", "persistent"), [
    ("join", True), *(pytest.param(*p, marks=pytest.mark.slow) for p in [("join", False), ("stop", True)]),
])  # fmt: skip
def test_workers_and_a_second_fit(uneven: Any, persistent: bool) -> None:
    ranks = run_ranks(_with_workers, 2, uneven, persistent, timeout=90.0)
    assert_ranks_identical([state for state, _, _ in ranks])
    length = 5 if uneven == "join" else 3
    sizes = [[7] * length, [2] * 3]
    assert [(batches, steps) for _, batches, steps in ranks] == [
        (5, [2 * length, 4 * length]),
        (3, [2 * length, 4 * length]),
    ]
    expected = train_as_one(sizes, epochs=2, optimizer=sgd, fits=2)  # two workers take turns: in the old order
    assert_close_to_single_process(ranks[0][0], expected, tolerance=1e-12)


class _Reloads(_Watched):
    """Other lengths in each epoch; in the second they are equal."""

    def train_dataloader(self) -> DataLoader[Pair]:
        lengths = [(4, 2), (3, 3), (2, 5)][self.current_epoch]
        return _Fresh([4] * lengths[self.rank], self.rank, stream=False).loader()


def _fit_reloading(rank: int, world_size: int) -> tuple[dict[str, Tensor], list[bool]]:
    module = _Reloads(rank)
    strategy = strategy_under_test(uneven="join")
    trainer = trainer_on_rank(rank, world_size, strategy=strategy, max_epochs=3, reload_dataloaders_every_n_epochs=1)
    trainer.fit(module)
    return state_of(module), [index for _, index in module.records["batch_idx"]]


def test_lengths_that_change_from_epoch_to_epoch() -> None:
    ranks = run_ranks(_fit_reloading, 2)
    assert ranks[0][1] == ranks[1][1] == [*range(4), *range(3), *range(5)]
    assert_ranks_identical([_weights(state) for state, _ in ranks])


@pytest.mark.slow
def test_join_with_lbfgs_and_mixed_precision() -> None:
    """Closures run more than once per batch, on ranks without data too, and decide alike."""
    optimizer = partial(torch.optim.LBFGS, lr=0.1, max_iter=3, line_search_fn="strong_wolfe")
    for options in ({}, {"precision": "bf16-mixed"}):
        build = partial(Regression, net=network(), optimizer=optimizer)
        ranks = train(_Setting(([4] * 4, [4] * 2), build=_Single(build)), options, uneven="join", average="samples")
        assert all(torch.isfinite(value).all() for value in ranks[0].state.values())


@dataclass(frozen=True)
class _Single:
    """Builds a module that takes batches in double precision to single."""

    build: Callable[..., Regression]

    def __call__(self, rank: int) -> Regression:
        module = self.build(rank)
        loss = module.loss
        module.loss = lambda batch: loss([part.float() for part in batch])  # type: ignore[method-assign]
        return module
