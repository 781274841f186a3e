"""Accumulated gradients are sent when they are due, and only then."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.helpers.assertions import assert_close_to_single_process, assert_ranks_identical
from tests.helpers.models import Batch, Regression, blocks, network, parameters_of, sgd
from tests.helpers.trainers import fit_ranks


class _CountsBytes(Regression):
    """Notes the bytes of gradients that each batch sent."""

    def on_train_start(self) -> None:
        self.seen = self.sent()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.record("bytes", self.sent() - self.seen)
        self.seen = self.sent()

    def sent(self) -> int:
        sent: int = cast(Any, self.trainer.strategy).communication.bytes_sent
        return sent


def _accumulated_in_one_process(rows: int, size: int, window: int) -> dict[str, Tensor]:
    """Each loss is divided by the window, in a last one that is shorter as well."""
    net = network()
    optimizer = sgd(net.parameters())
    steps = list(blocks(rows, size))
    for first in range(0, len(steps), window):
        for inputs, targets in steps[first : first + window]:
            torch.autograd.backward(F.mse_loss(net(inputs), targets) / window)
        optimizer.step()
        optimizer.zero_grad()
    return parameters_of(net, prefix="net.")


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_last_short_window_counts_and_only_due_batches_send(world_size: int) -> None:
    """Symptom: the last short window is lost or not reduced; or every micro-step communicates."""
    ranks = fit_ranks(_CountsBytes, world_size, rows=20 * world_size, batch_size=4, accumulate_grad_batches=2)
    assert [rank.global_step for rank in ranks] == [3] * world_size
    assert_ranks_identical([rank.parameters for rank in ranks])
    expected = _accumulated_in_one_process(20 * world_size, 4 * world_size, window=2)
    assert_close_to_single_process(ranks[0].parameters, expected)
    for rank in ranks:
        blocked, due = ([rank.records["bytes"][index] for index in indices] for indices in ((0, 2), (1, 3, 4)))
        assert blocked == [0, 0]
        assert min(due) > 0


def test_accumulating_over_eight_batches_sends_an_eighth_of_the_bytes() -> None:
    """Symptom: accumulation saves memory and no traffic."""
    each, eighth = (
        fit_ranks(_CountsBytes, 2, rows=64, batch_size=2, accumulate_grad_batches=window) for window in (1, 8)
    )
    for often, seldom in zip(each, eighth, strict=True):
        assert sum(often.records["bytes"]) == 8 * sum(seldom.records["bytes"]) > 0


class _NotesGradients(Regression):
    """Notes the first weight's gradient at both hooks around the step."""

    def on_after_backward(self) -> None:
        self.record("after backward", self.net.get_parameter("0.weight").grad)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.record("before step", self.net.get_parameter("0.weight").grad)


def _first_gradient(*batches: Batch, divisor: int = 1) -> Tensor:
    net = network()
    for inputs, targets in batches:
        torch.autograd.backward(F.mse_loss(net(inputs), targets) / divisor)
    gradient = net.get_parameter("0.weight").grad
    assert gradient is not None
    return gradient


def test_hooks_see_the_gradient_of_all_ranks() -> None:
    """Symptom: clipping or norm logging acts on local gradients."""
    ranks = fit_ranks(_NotesGradients, 2, rows=8, batch_size=4)
    expected = _first_gradient(*blocks(8, 8))
    for hook in ("after backward", "before step"):
        (first,), (second,) = (rank.records[hook] for rank in ranks)
        assert torch.equal(first, second)
        torch.testing.assert_close(first, expected, rtol=0, atol=1e-6)


def test_hooks_see_the_local_gradient_until_the_window_is_full() -> None:
    """Symptom: nobody knows which gradient a hook sees while gradients accumulate."""
    ranks = fit_ranks(_NotesGradients, 2, rows=16, batch_size=4, accumulate_grad_batches=2)
    first, second = blocks(16, 8)
    for rank, (local, full) in enumerate(rank.records["after backward"] for rank in ranks):
        own_rows = tuple(tensor[rank::2] for tensor in first)
        torch.testing.assert_close(local, _first_gradient(own_rows, divisor=2), rtol=0, atol=1e-6)  # type: ignore[arg-type]
        torch.testing.assert_close(full, _first_gradient(first, second, divisor=2), rtol=0, atol=1e-6)
        assert torch.equal(full, ranks[0].records["before step"][0])
