"""Modules that share, repeat, recompute, reorder or freeze their parts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.helpers.assertions import assert_close_to_single_process, assert_ranks_identical
from tests.helpers.models import (
    Batch,
    Regression,
    blocks,
    network,
    parameters_of,
    plain_sgd,
    sgd,
    train_single_process,
)
from tests.helpers.trainers import fit_ranks


class _Blocks(nn.Module):
    """An encoder, a square layer that may run several times, and a head; made from one seed."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.encoder, self.middle, self.head = nn.Linear(8, 6), nn.Linear(6, 6), nn.Linear(6, 3)


class _UsedTwice(_Blocks):
    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.encoder(inputs))
        output: Tensor = self.head(torch.tanh(self.middle(torch.tanh(self.middle(hidden)))))
        return output


class _Tied(_Blocks):
    """The second linear layer has the transposed weight of the first."""

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.encoder(inputs))
        back = hidden @ self.encoder.weight
        output: Tensor = self.head(torch.tanh(self.middle(torch.tanh(self.encoder(back)))))
        return output


class _Recomputed(_Blocks):
    """Every block is recomputed in backward, one of them twice, so that its hooks fire twice."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def forward(self, inputs: Tensor) -> Tensor:
        # A reentrant segment needs an input that requires a gradient.
        hidden = inputs.detach().requires_grad_()
        for block in (self.encoder, self.middle, self.middle, self.head):
            hidden = torch.tanh(checkpoint(block, hidden, use_reentrant=self.reentrant))
        return hidden


class _ChannelsLast(nn.Module):
    """A convolution whose weight and gradient are not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.conv, self.head = nn.Conv2d(2, 4, 2), nn.Linear(4, 3)
        self.to(memory_format=torch.channels_last)

    def forward(self, inputs: Tensor) -> Tensor:
        image = inputs.view(-1, 2, 2, 2).contiguous(memory_format=torch.channels_last)
        output: Tensor = self.head(torch.tanh(self.conv(image)).flatten(1))
        return output


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    "make",
    [_UsedTwice, _Tied, partial(_Recomputed, reentrant=True), partial(_Recomputed, reentrant=False), _ChannelsLast],
    ids=["used twice", "tied", "recomputed (reentrant)", "recomputed", "channels last"],
)
def test_it_trains_as_in_one_process(make: Callable[[], nn.Module], world_size: int) -> None:
    """Symptom: a parameter that gets its gradient in parts, or in another layout, is averaged too early or wrongly."""
    ranks = fit_ranks(partial(_Module, make=make), world_size, rows=16 * world_size, batch_size=4)
    assert_ranks_identical([rank.parameters for rank in ranks])
    expected = train_single_process(make(), blocks(16 * world_size, 4 * world_size))
    assert_close_to_single_process(ranks[0].parameters, expected)


class _Module(Regression):
    def __init__(self, rank: int, make: Callable[[], nn.Module]) -> None:
        super().__init__(rank, make())


class _OtherOrderOnRank1(Regression):
    """Two branches, called in another order on rank 1, so that their gradients arrive in another order."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank, nn.ModuleList(network(seed) for seed in (1, 2, 3)))

    def loss(self, batch: Batch) -> Tensor:
        assert isinstance(self.net, nn.ModuleList)
        branches = list(self.net) if self.rank == 0 else list(reversed(self.net))
        return F.mse_loss(sum((branch(batch[0]) for branch in branches), start=torch.zeros(())), batch[1])


def _sum_of_branches(net: nn.Module, batch: Batch) -> Tensor:
    return F.mse_loss(sum((branch(batch[0]) for branch in net.children()), start=torch.zeros(())), batch[1])


def test_gradients_may_arrive_in_another_order_on_each_rank() -> None:
    """Symptom: ranks pair different buckets: a hang, or silently the wrong sums."""
    ranks = fit_ranks(_OtherOrderOnRank1, 2, rows=32, batch_size=4)
    assert_ranks_identical([rank.parameters for rank in ranks])
    net = nn.ModuleList(network(seed) for seed in (1, 2, 3))
    expected = train_single_process(net, blocks(32, 8), loss=_sum_of_branches)
    assert_close_to_single_process(ranks[0].parameters, expected)


class _Thaws(Regression):
    """Its first layer is frozen in the first epoch, its last one in the third."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank, optimizer=plain_sgd)
        _freeze(self.net, epoch=0)

    def on_train_epoch_start(self) -> None:
        _freeze(self.net, self.current_epoch)


def _freeze(net: nn.Module, epoch: int) -> None:
    net.get_submodule("0").requires_grad_(epoch != 0)
    net.get_submodule("2").requires_grad_(epoch != 2)


@pytest.mark.parametrize("world_size", [2, 3])
def test_layers_may_be_frozen_and_thawed_while_training(world_size: int) -> None:
    """Symptom: a layer that is unfrozen in the middle of training is never synchronised."""
    ranks = fit_ranks(_Thaws, world_size, rows=8 * world_size, batch_size=4, max_epochs=3)
    assert_ranks_identical([rank.parameters for rank in ranks])
    net = network()
    optimizer = plain_sgd(net.parameters())
    for epoch in range(3):
        _freeze(net, epoch)
        for inputs, targets in blocks(8 * world_size, 4 * world_size):
            optimizer.zero_grad()
            torch.autograd.backward(F.mse_loss(net(inputs), targets))
            optimizer.step()
    assert_close_to_single_process(ranks[0].parameters, parameters_of(net, prefix="net."))


class _Switches(Regression):
    """Uses other layers every few batches, and not the same on every rank."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank, nn.ModuleList(nn.Linear(8, 3, bias=False) for _ in range(3)), sgd)
        for index, layer in enumerate(self.net.children()):
            nn.init.constant_(layer.weight, 0.1 * index)  # type: ignore[arg-type]

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        layer = list(self.net.children())[(batch_idx + self.rank) % 3]
        return F.mse_loss(layer(batch[0]), batch[1])


def test_what_a_rank_uses_may_change_from_batch_to_batch() -> None:
    """Symptom: the set of used parameters is learnt in the first step and wrong afterwards."""
    ranks = fit_ranks(_Switches, 2, rows=48, batch_size=4)
    assert_ranks_identical([rank.parameters for rank in ranks])
    alone = _Switches(rank=0)
    layers, optimizer = list(alone.net.children()), sgd(alone.net.parameters())
    for index, (inputs, targets) in enumerate(blocks(48, 8)):
        optimizer.zero_grad()
        for rank in range(2):
            loss = F.mse_loss(layers[(index + rank) % 3](inputs[rank::2]), targets[rank::2])
            torch.autograd.backward(loss / 2)
        optimizer.step()
    assert_close_to_single_process(ranks[0].parameters, parameters_of(alone))
