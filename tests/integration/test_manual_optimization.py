"""Whatever is in ``.grad`` when an optimizer steps is the mean over ranks, averaged once."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.helpers.assertions import assert_close_to_single_process, assert_ranks_identical
from tests.helpers.models import Batch, Regression, blocks, network, parameters_of, sgd
from tests.helpers.trainers import fit_ranks

Backward = Callable[[Tensor], None]
Step = Callable[[nn.Module, Any, Batch, int, Backward], None]


def _plain_backward(net: nn.Module, optimizer: Any, batch: Batch, index: int, backward: Backward) -> None:
    optimizer.zero_grad()
    torch.autograd.backward(F.mse_loss(net(batch[0]), batch[1]))  # not Lightning's
    optimizer.step()


def _two_losses(net: nn.Module, optimizer: Any, batch: Batch, index: int, backward: Backward) -> None:
    optimizer.zero_grad()
    backward(F.mse_loss(net(batch[0]), batch[1]))
    backward(net(batch[0]).square().mean())
    optimizer.step()


def _one_graph_twice(net: nn.Module, optimizer: Any, batch: Batch, index: int, backward: Backward) -> None:
    optimizer.zero_grad()
    loss = F.mse_loss(net(batch[0]), batch[1])
    torch.autograd.backward(loss, retain_graph=True)
    backward(loss * 0.5)
    optimizer.step()


def _disjoint_losses(net: nn.Module, optimizer: Any, batch: Batch, index: int, backward: Backward) -> None:
    optimizer.zero_grad()
    hidden = torch.tanh(net.get_submodule("0")(batch[0]))
    backward(hidden.square().mean())
    backward(F.mse_loss(net.get_submodule("2")(hidden.detach()), batch[1]))
    optimizer.step()


def _own_accumulation(net: nn.Module, optimizer: Any, batch: Batch, index: int, backward: Backward) -> None:
    backward(F.mse_loss(net(batch[0]), batch[1]) / 2)
    if index % 2 == 1:
        optimizer.step()
        optimizer.zero_grad()


def _own_clipping(net: nn.Module, optimizer: Any, batch: Batch, index: int, backward: Backward) -> None:
    optimizer.zero_grad()
    backward(F.mse_loss(net(batch[0]), batch[1]))
    nn.utils.clip_grad_norm_(net.parameters(), 0.1)
    optimizer.step()


class _Manual(Regression):
    def __init__(self, rank: int, step: Step) -> None:
        super().__init__(rank)
        self.automatic_optimization = False
        self.step = step

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        self.step(self.net, self.optimizers(), batch, batch_idx, self.manual_backward)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    "step", [_plain_backward, _two_losses, _one_graph_twice, _disjoint_losses, _own_accumulation, _own_clipping]
)
def test_every_way_to_go_backward_trains_as_in_one_process(step: Step, world_size: int) -> None:
    """Symptom: ``loss.backward()`` in the training step leaves gradients local, and each rank trains its own model."""
    ranks = fit_ranks(partial(_Manual, step=step), world_size, rows=16 * world_size, batch_size=4)
    assert_ranks_identical([rank.parameters for rank in ranks])
    net = network()
    optimizer = sgd(net.parameters())
    for index, batch in enumerate(blocks(16 * world_size, 4 * world_size)):
        step(net, optimizer, batch, index, torch.autograd.backward)
    assert_close_to_single_process(ranks[0].parameters, parameters_of(net, prefix="net."))


def _gan() -> nn.ModuleDict:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        discriminator = nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 1))
        return nn.ModuleDict({"generator": nn.Linear(8, 8), "discriminator": discriminator})


def _gan_step(
    net: nn.ModuleDict,
    optimizers: list[Any],
    batch: Batch,
    backward: Backward,
    only: Callable[[Any], AbstractContextManager[None]],
) -> None:
    """One step of the generator, then one of the discriminator."""
    generator, discriminator = net["generator"], net["discriminator"]
    (of_generator, of_discriminator), real = optimizers, batch[0]
    with only(of_generator):
        of_generator.zero_grad()
        backward(F.softplus(-discriminator(generator(real))).mean())
        of_generator.step()
    with only(of_discriminator):
        of_discriminator.zero_grad()
        fake = generator(real).detach()
        backward(F.softplus(-discriminator(real)).mean() + F.softplus(discriminator(fake)).mean())
        of_discriminator.step()


class _Gan(Regression):
    net: nn.ModuleDict

    def __init__(self, rank: int) -> None:
        super().__init__(rank, _gan())
        self.automatic_optimization = False

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        optimizers: Any = self.optimizers()
        _gan_step(self.net, optimizers, batch, self.manual_backward, self.toggled_optimizer)
        self.record("trainable", all(parameter.requires_grad for parameter in self.parameters()))

    def configure_optimizers(self) -> Any:
        return [sgd(model.parameters()) for model in self.net.values()]


@pytest.mark.parametrize("world_size", [2, 3])
def test_two_optimizers_that_take_turns_train_as_in_one_process(world_size: int) -> None:
    """Symptom: the tutorial GAN stops with an unused-parameter error under multi-process training."""
    ranks = fit_ranks(_Gan, world_size, rows=12 * world_size, batch_size=4)
    assert_ranks_identical([rank.parameters for rank in ranks])
    assert [rank.records["trainable"] for rank in ranks] == [[True] * 3] * world_size
    net = _gan()
    optimizers = [sgd(model.parameters()) for model in net.values()]
    for batch in blocks(12 * world_size, 4 * world_size):
        _gan_step(net, optimizers, batch, torch.autograd.backward, lambda _: nullcontext())
    assert_close_to_single_process(ranks[0].parameters, parameters_of(net, prefix="net."))
