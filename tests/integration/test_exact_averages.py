"""``average="samples"``: training on any split of the data is training on all of it in one process."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ringstrategy.gradients.weights import Average
from tests.helpers.assertions import assert_close_to_single_process, assert_ranks_identical
from tests.helpers.models import Batch, Regression, network, parameters_of, plain_sgd, sgd
from tests.helpers.ranks import RanksFailedError, run_ranks
from tests.helpers.trainers import strategy_under_test, trainer_on_rank
from tests.helpers.uneven import Pair, as_one, batches_of, loader_of, train_as_one

UNEVEN = [[7, 3, 5, 2, 4], [1, 6, 2, 8, 3], [257, 1, 12, 1, 5]]
EVEN = [[4] * 6, [4] * 6]
Build = Callable[[int], Regression]


def regression(rank: int, cls: type[Regression] = Regression, **arguments: Any) -> Regression:
    """In double precision, without momentum unless told otherwise."""
    defaults: dict[str, Any] = {"net": network(dtype=torch.float64), "optimizer": plain_sgd}
    return cls(rank, **(defaults | arguments))


def _fit(
    rank: int, world_size: int, build: Build, sizes: list[list[int]], average: Average, options: dict[str, Any]
) -> tuple[dict[str, Tensor], dict[str, list[Any]]]:
    module = build(rank)
    strategy = strategy_under_test(average=average, bucket_cap_mb=1e-4)
    trainer_on_rank(rank, world_size, strategy=strategy, **options).fit(module, loader_of(sizes[rank], rank))
    return parameters_of(module), module.records


def fit(
    sizes: list[list[int]], build: Build = regression, average: Average = "samples", **options: Any
) -> list[dict[str, Tensor]]:
    """Every rank's parameters after training, which are the same."""
    states = [state for state, _ in run_ranks(_fit, len(sizes), build, sizes, average, options)]
    assert_ranks_identical(states)
    return states


@pytest.mark.parametrize(("ranks", "window"), [
    (2, 1), (3, 2), (2, 4), *(pytest.param(*p, marks=pytest.mark.slow) for p in [(1, 2), (3, 1), (3, 4), (2, 2)]),
])  # fmt: skip
def test_uneven_batches_on_ranks_and_in_windows(ranks: int, window: int) -> None:
    """Symptom: a rank's last, smaller batch counts as much as a full one; the short last window is divided too much."""
    sizes = UNEVEN[:ranks]
    expected = train_as_one(sizes, window, epochs=2, optimizer=sgd)
    (found, *_) = fit(sizes, partial(regression, optimizer=sgd), accumulate_grad_batches=window, max_epochs=2)
    assert_close_to_single_process(found, expected, tolerance=1e-12)


@pytest.mark.slow
def test_single_precision() -> None:
    build = partial(regression, net=network())
    sizes = UNEVEN[:2]
    states = run_ranks(_fit_single, 2, build, sizes)
    expected = {name: value.float() for name, value in train_as_one(sizes).items()}
    assert_close_to_single_process(states[0], expected, tolerance=1e-6)


def _fit_single(rank: int, world_size: int, build: Build, sizes: list[list[int]]) -> dict[str, Tensor]:
    module = build(rank)
    loader = loader_of(sizes[rank], rank, dtype=torch.float32)
    trainer_on_rank(rank, world_size, strategy=strategy_under_test(average="samples")).fit(module, loader)
    return parameters_of(module)


@pytest.mark.parametrize("window", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_equal_batches_train_to_the_bits_of_the_default(window: int) -> None:
    build = partial(regression, optimizer=sgd)
    samples, ranks = (fit(EVEN, build, average, accumulate_grad_batches=window) for average in ("samples", "ranks"))
    assert_ranks_identical([samples[0], ranks[0]])


@pytest.mark.slow
def test_the_default_counts_ranks() -> None:
    found = fit(UNEVEN[:2], average="ranks")[0]
    assert_close_to_single_process(found, train_as_one(UNEVEN[:2], mean_of_means=True), tolerance=1e-12)


@pytest.mark.slow
def test_clipping_sees_the_mean_over_samples() -> None:
    found = fit(UNEVEN[:2], gradient_clip_val=0.05)[0]
    assert_close_to_single_process(found, train_as_one(UNEVEN[:2], clip=0.05), tolerance=1e-9)


def _rows(batch: Pair) -> float:
    return 0.5 * len(batch[0])


@pytest.mark.slow
def test_a_function_of_the_batch_weighs_it() -> None:
    """Only how weights compare matters, not their size."""
    assert_close_to_single_process(fit(UNEVEN[:2], average=_rows)[0], train_as_one(UNEVEN[:2]), tolerance=1e-12)


class _Ignores(Regression):
    """The mean over rows with a positive target; not a number if a batch has none."""

    def loss(self, batch: Batch) -> Tensor:
        inputs, targets = batch
        counted = targets[:, 0] > 0
        return F.mse_loss(self.net(inputs)[counted], targets[counted])


def _positive(batch: Pair) -> int:
    return int((batch[1][:, 0] > 0).sum())


@pytest.mark.parametrize("window", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_a_batch_without_weight_counts_for_nothing(window: int) -> None:
    """Symptom: NaN of a batch without labels, times zero, is NaN."""
    sizes = [[2, 1, 1, 2, 1, 3], [1, 1, 2, 1, 1, 1]]
    counts = [[_positive(batch) for batch in batches_of(mine, rank)] for rank, mine in enumerate(sizes)]
    assert 0 in counts[0]
    assert 0 in counts[1]
    found = fit(sizes, partial(regression, cls=_Ignores), average=_positive, accumulate_grad_batches=window)[0]
    net = network(dtype=torch.float64)
    optimizer = plain_sgd(net.parameters())
    for first in range(0, 6, window):
        inputs, targets = as_one(b for rank in (0, 1) for b in batches_of(sizes[rank], rank)[first : first + window])
        optimizer.zero_grad()
        torch.autograd.backward(_Ignores(net=net).loss((inputs, targets)))
        optimizer.step()
    assert_close_to_single_process(found, parameters_of(net, prefix="net."), tolerance=1e-12)


class _Branches(Regression):
    """The second layer is used by rank 0 alone, the third by nobody."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank, network(dtype=torch.float64), plain_sgd)
        self.some, self.unused = (network(seed, torch.float64) for seed in (5, 6))

    def loss(self, batch: Batch) -> Tensor:
        inputs, targets = batch
        outputs = self.net(inputs) + (self.some(inputs) if self.rank == 0 else 0.0)
        return F.mse_loss(outputs, targets)


def test_parameters_that_some_ranks_do_not_use() -> None:
    found = fit(UNEVEN[:2], _Branches)[0]
    alone = _Branches(0)
    optimizer = plain_sgd(alone.parameters())
    for first, second in zip(batches_of(UNEVEN[0], 0), batches_of(UNEVEN[1], 1), strict=True):
        optimizer.zero_grad()
        sums = []
        for alone.rank, batch in ((0, first), (1, second)):
            sums.append(alone.loss(batch) * len(batch[0]))
        torch.autograd.backward(torch.stack(sums).sum() / (len(first[0]) + len(second[0])))
        optimizer.step()
    assert_close_to_single_process(found, parameters_of(alone), tolerance=1e-12)


class _Words(Regression):
    """Rows of a table, chosen by the inputs; its gradients are sparse."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank, nn.Embedding(6, 3, sparse=True).double(), plain_sgd)
        with torch.no_grad():
            self.net.get_parameter("weight").copy_(torch.arange(18.0).view(6, 3) / 18)

    def loss(self, batch: Batch) -> Tensor:
        return F.mse_loss(self.net((batch[0][:, 0].abs() * 4).long().clamp(max=5)), batch[1])


@pytest.mark.slow
@pytest.mark.parametrize("window", [1, 2])
def test_sparse_gradients(window: int) -> None:
    found = fit(UNEVEN[:2], _Words, accumulate_grad_batches=window)[0]
    alone = _Words(0)
    optimizer = plain_sgd(alone.parameters())
    for first in range(0, 5, window):
        optimizer.zero_grad()
        whole = as_one(b for rank in (0, 1) for b in batches_of(UNEVEN[rank], rank)[first : first + window])
        torch.autograd.backward(alone.loss(whole))
        optimizer.step()
    assert_close_to_single_process(found, parameters_of(alone), tolerance=1e-12)


# -- manual optimization ---------------------------------------------------------------------------------------------


class _Manual(Regression):
    def __init__(self, rank: int, step: Callable[..., None], optimizer: Any = plain_sgd) -> None:
        super().__init__(rank, network(dtype=torch.float64), optimizer)
        self.automatic_optimization = False
        self.step = step

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        self.step(self, batch, batch_idx)


def _two_losses(module: _Manual, batch: Batch, index: int) -> None:
    """The second backward finds the mean of the first in ``.grad``."""
    optimizer = cast(Any, module.optimizers())
    optimizer.zero_grad()
    module.manual_backward(module.loss(batch))
    module.manual_backward(module.net(batch[0]).square().mean())
    optimizer.step()


def _own_window(module: _Manual, batch: Batch, index: int) -> None:
    """Two batches per step, of which only the second sends; the losses are divided by hand."""
    optimizer = cast(Any, module.optimizers())
    loss = module.loss(batch) / 2
    if index % 2 == 0:
        optimizer.zero_grad()
        with module.trainer.strategy.block_backward_sync():  # type: ignore[attr-defined]
            module.manual_backward(loss)
    else:
        module.manual_backward(loss)
        optimizer.step()


def _two_losses_of(net: nn.Module, batch: Pair) -> Tensor:
    loss: Tensor = F.mse_loss(net(batch[0]), batch[1]) + net(batch[0]).square().mean()
    return loss


def _loss_of(net: nn.Module, batch: Pair) -> Tensor:
    return F.mse_loss(net(batch[0]), batch[1])


@pytest.mark.parametrize(("step", "loss", "window"), [(_two_losses, _two_losses_of, 1), (_own_window, _loss_of, 2)])
def test_manual_optimization(step: Any, loss: Callable[[nn.Module, Pair], Tensor], window: int) -> None:
    sizes = [mine[:4] for mine in UNEVEN]
    found = fit(sizes, partial(_Manual, step=step))[0]
    net = network(dtype=torch.float64)
    optimizer = plain_sgd(net.parameters())
    for first in range(0, 4, window):
        whole = as_one(b for rank in range(3) for b in batches_of(sizes[rank], rank)[first : first + window])
        optimizer.zero_grad()
        torch.autograd.backward(loss(net, whole))
        optimizer.step()
    assert_close_to_single_process(found, parameters_of(net, prefix="net."), tolerance=1e-12)


class _TwoPlayers(Regression):
    """Two optimizers that take turns; each finds the other's gradients."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank, network(dtype=torch.float64))
        self.critic = network(4, torch.float64)
        self.automatic_optimization = False

    def losses(self, batch: Batch) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
        return (
            lambda: F.mse_loss(self.net(batch[0]), batch[1]) + self.critic(batch[0]).mean(),
            lambda: (self.critic(batch[0]) - self.net(batch[0]).detach()).square().mean(),
        )

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        for optimizer, loss in zip(cast(Any, self.optimizers()), self.losses(batch), strict=True):
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(loss())
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return plain_sgd(self.net.parameters()), plain_sgd(self.critic.parameters())


def test_several_optimizers() -> None:
    found = fit(UNEVEN[:2], _TwoPlayers)[0]
    alone = _TwoPlayers(0)
    optimizers = alone.configure_optimizers()
    for batches in zip(batches_of(UNEVEN[0], 0), batches_of(UNEVEN[1], 1), strict=True):
        for optimizer, loss in zip(optimizers, alone.losses(as_one(batches)), strict=True):
            optimizer.zero_grad()
            torch.autograd.backward(loss())
            optimizer.step()
    assert_close_to_single_process(found, parameters_of(alone), tolerance=1e-12)


@pytest.mark.slow
def test_lbfgs_decides_on_the_loss_of_all_samples() -> None:
    optimizer = partial(torch.optim.LBFGS, lr=0.1, max_iter=4, line_search_fn="strong_wolfe")
    sizes = [[7, 3], [1, 6]]
    found = fit(sizes, partial(regression, optimizer=optimizer))[0]
    net = network(dtype=torch.float64)
    stepper = optimizer(net.parameters())
    for batches in zip(batches_of(sizes[0], 0), batches_of(sizes[1], 1), strict=True):
        whole = as_one(batches)

        def closure(whole: Pair = whole) -> float:
            stepper.zero_grad()
            loss = _loss_of(net, whole)
            torch.autograd.backward(loss)
            return loss.item()

        stepper.step(closure)  # type: ignore[no-untyped-call]
    assert_close_to_single_process(found, parameters_of(net, prefix="net."), tolerance=1e-9)


# -- what cannot be right --------------------------------------------------------------------------------------------


def _plain(module: _Manual, batch: Batch, index: int) -> None:
    torch.autograd.backward(module.loss(batch))


class _TakesIterator(Regression):
    def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
        return self.loss(next(dataloader_iter)[0])


@pytest.mark.parametrize(("build", "error"), [
    (partial(_Manual, step=_plain), r"Parameter 'net\.2\.\w+' received a gradient .*self\.manual_backward\(loss\)"),
    (_TakesIterator, "training_step takes a dataloader_iter. Have it take the batch"),
])  # fmt: skip
def test_what_would_not_be_weighted_is_refused(build: Build, error: str) -> None:
    with pytest.raises(RanksFailedError) as failure:
        fit(UNEVEN[:2], build)
    for outcome in failure.value.outcomes:
        assert re.search(error, str(outcome.error)), outcome
