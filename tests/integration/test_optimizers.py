"""Optimizers and callbacks that do more than one step on one gradient."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import StochasticWeightAveraging
from torch import Tensor, nn

from tests.helpers.assertions import assert_close_to_single_process, assert_ranks_identical
from tests.helpers.models import Batch, Regression, blocks, data, network, parameters_of, shard, train_single_process
from tests.helpers.ranks import run_ranks
from tests.helpers.trainers import fit_ranks, trainer_on_rank


def _lbfgs(parameters: Iterable[nn.Parameter], line_search: str | None) -> torch.optim.LBFGS:
    return torch.optim.LBFGS(
        parameters, lr=0.1, max_iter=4, tolerance_grad=0, tolerance_change=0, line_search_fn=line_search
    )


class _CountsClosures(Regression):
    def loss(self, batch: Batch) -> Tensor:
        self.record("closure", self.global_step)
        return super().loss(batch)


def _lbfgs_in_one_process(rows: int, size: int, line_search: str | None) -> nn.Module:
    net = network()
    optimizer = _lbfgs(net.parameters(), line_search)
    for inputs, targets in blocks(rows, size):

        def closure(inputs: Tensor = inputs, targets: Tensor = targets) -> float:
            optimizer.zero_grad()
            loss = F.mse_loss(net(inputs), targets)
            torch.autograd.backward(loss)
            return loss.item()

        cast(Any, optimizer).step(closure)  # untyped in torch
    return net


def test_lbfgs_trains_as_in_one_process() -> None:
    """Symptom: weights drift, because each rank iterates on its own loss."""
    build = partial(_CountsClosures, optimizer=partial(_lbfgs, line_search=None))
    ranks = fit_ranks(build, 2, rows=16, batch_size=8)
    assert_ranks_identical([rank.parameters for rank in ranks])
    expected = parameters_of(_lbfgs_in_one_process(16, 16, None), prefix="net.")
    assert_close_to_single_process(ranks[0].parameters, expected, tolerance=1e-5)


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_line_search_evaluates_equally_often_on_every_rank(world_size: int) -> None:
    """Symptom: ranks decide on another number of evaluations from their local losses, and pair other collectives."""
    build = partial(_CountsClosures, optimizer=partial(_lbfgs, line_search="strong_wolfe"))
    ranks = fit_ranks(build, world_size, rows=16 * world_size, batch_size=8)
    assert_ranks_identical([rank.parameters for rank in ranks])
    assert len({len(rank.records["closure"]) for rank in ranks}) == 1
    trained, alone = network(), _lbfgs_in_one_process(16 * world_size, 8 * world_size, "strong_wolfe")
    trained.load_state_dict({name.removeprefix("net."): tensor for name, tensor in ranks[0].parameters.items()})
    inputs, targets = data(16 * world_size)
    # A line search amplifies rounding; the losses agree where the weights may not.
    ours, theirs = (F.mse_loss(net(inputs), targets).item() for net in (trained, alone))
    assert ours == pytest.approx(theirs, abs=1e-2)


def _fast_sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5)


@pytest.mark.parametrize(("algorithm", "clip"), [
    ("norm", lambda parameters: nn.utils.clip_grad_norm_(parameters, 0.05)),
    ("value", lambda parameters: nn.utils.clip_grad_value_(parameters, 0.05)),
])  # fmt: skip
def test_clipping_acts_on_the_gradient_of_all_ranks(algorithm: str, clip: Callable[[Any], Any]) -> None:
    """Symptom: each rank clips its local gradient, and the mean of these is shorter."""
    ranks = fit_ranks(
        partial(Regression, optimizer=_fast_sgd),
        2,
        rows=16,
        batch_size=4,
        gradient_clip_val=0.05,
        gradient_clip_algorithm=algorithm,
    )
    assert_ranks_identical([rank.parameters for rank in ranks])
    net = network()
    optimizer = _fast_sgd(net.parameters())
    for inputs, targets in blocks(16, 8):
        optimizer.zero_grad()
        torch.autograd.backward(F.mse_loss(net(inputs), targets))
        clip(net.parameters())
        optimizer.step()
    assert_close_to_single_process(ranks[0].parameters, parameters_of(net, prefix="net."))


class _Copied(Regression):
    """Copies and pickles itself at the end of each batch, and trains the copy."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        communication = cast(Any, self.trainer.strategy).communication
        sent = communication.bytes_sent
        for duplicate in (copy.deepcopy(self).net, pickle.loads(pickle.dumps(self.net))):
            duplicate.zero_grad()
            torch.autograd.backward(F.mse_loss(duplicate(batch[0]), batch[1]))
            self.record("gradient of copy", duplicate.get_parameter("0.weight").grad)
        assert communication.bytes_sent == sent

        alone = network()
        alone.load_state_dict(self.net.state_dict())
        torch.autograd.backward(F.mse_loss(alone(batch[0]), batch[1]))
        self.record("local gradient", alone.get_parameter("0.weight").grad)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True)


def _average_weights_and_test(
    rank: int, world_size: int, precision: Any
) -> tuple[dict[str, Tensor], float, dict[str, list[Tensor]]]:
    averaging = StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=2)
    trainer = trainer_on_rank(rank, world_size, max_epochs=4, callbacks=[averaging], precision=precision)
    module, loader = _Copied(rank), shard(rank, world_size, rows=16, batch_size=4)
    trainer.fit(module, loader)
    trainer.test(module, loader, verbose=False)
    return parameters_of(module), trainer.callback_metrics["test_loss"].item(), module.records


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_copy_of_the_module_is_free_of_the_strategy(precision: str) -> None:
    """Symptom: weight averaging fails on what the strategy hung on the module, or the test after it does."""
    ranks = run_ranks(_average_weights_and_test, 2, precision)
    assert_ranks_identical([parameters for parameters, _, _ in ranks])
    assert ranks[0][1] == ranks[1][1]
    if precision == "32-true":
        for _, _, records in ranks:
            copies = records["gradient of copy"]
            for index, alone in enumerate(records["local gradient"]):
                torch.testing.assert_close(copies[2 * index], alone)
                torch.testing.assert_close(copies[2 * index + 1], alone)


def _autocast_loss(net: nn.Module, batch: Batch) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return F.mse_loss(net(batch[0]), batch[1])


class _NotesGradientTypes(Regression):
    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.record("dtypes", {parameter.grad.dtype for parameter in self.parameters() if parameter.grad is not None})


def test_bf16_mixed_equals_autocast_in_one_process_with_float32_gradients() -> None:
    """Symptom: mixed precision halves the precision of the gradients' sum."""
    ranks = fit_ranks(_NotesGradientTypes, 2, rows=24, batch_size=4, precision="bf16-mixed")
    assert_ranks_identical([rank.parameters for rank in ranks])
    assert [rank.records["dtypes"] for rank in ranks] == [[{torch.float32}] * 3] * 2
    expected = train_single_process(network(), blocks(24, 8), loss=_autocast_loss)
    assert_close_to_single_process(ranks[0].parameters, expected, tolerance=5e-3)
