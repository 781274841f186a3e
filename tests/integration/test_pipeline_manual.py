"""What a training step may do with a pipelined module besides one call and one backward."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.helpers.models import plain_sgd
from tests.helpers.pipelines import (
    Batch,
    Classification,
    assert_like_one_process,
    batches,
    fit_alone,
    fit_stages,
    layered,
)

_LOAD = partial(batches, 12, 12, 3)


class _Manual(Classification):
    """Optimises by hand."""

    def __init__(self, net: nn.Module | None = None) -> None:
        super().__init__(net)
        self.automatic_optimization = False

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.optimise(batch)
        optimizer.step()

    def optimise(self, batch: Batch) -> None:
        """Everything between ``zero_grad`` and ``step``."""
        raise NotImplementedError


class _PlainBackward(_Manual):
    def optimise(self, batch: Batch) -> None:
        torch.autograd.backward(self.loss(batch))  # not Lightning's


class _TwoBackwards(_Manual):
    def optimise(self, batch: Batch) -> None:
        self.manual_backward(self.loss(batch))
        self.manual_backward(self.net(batch[0]).square().mean())


class _OneGraphTwice(_Manual):
    def optimise(self, batch: Batch) -> None:
        loss = self.loss(batch)
        torch.autograd.backward(loss, retain_graph=True)
        self.manual_backward(loss * 0.5)


class _GradientsByName(_Manual):
    """Asks autograd for the gradients of what it trains, rather than have it put them into ``.grad``."""

    def optimise(self, batch: Batch) -> None:
        held = [parameter for parameter in self.parameters() if not parameter.is_meta]
        for parameter, gradient in zip(held, torch.autograd.grad(self.loss(batch), held), strict=True):
            parameter.grad = gradient


class _OwnAccumulation(_Manual):
    def training_step(self, batch: Batch, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        self.manual_backward(self.loss(batch) / 2)
        if batch_idx % 2 == 1:
            optimizer.step()
            optimizer.zero_grad()


class _TwoOptimizers(_Manual):
    """One optimizer for the first layer, one for the others, which take turns."""

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        optimizers: Any = self.optimizers()
        optimizer = optimizers[batch_idx % 2]
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()

    def configure_optimizers(self) -> Any:
        first, *others = self.net.children()
        return [plain_sgd(first.parameters()), torch.optim.AdamW([p for o in others for p in o.parameters()], lr=0.01)]


_STEPS = [_PlainBackward, _TwoBackwards, _OneGraphTwice, _GradientsByName, _OwnAccumulation, _TwoOptimizers]


@pytest.mark.parametrize("build", _STEPS)
@pytest.mark.parametrize("stages", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("checkpoint", ["except_last", pytest.param("never", marks=pytest.mark.slow)])
def test_manual_optimization(checkpoint: str, stages: int, build: type[_Manual]) -> None:
    """Symptom: only the last stage's gradients are there when the optimizer steps, or the first backward's alone."""
    ranks = fit_stages(stages, build, _LOAD, chunks=4, checkpoint=checkpoint)
    assert_like_one_process(ranks, fit_alone(build, _LOAD))


class _Gan(Classification):
    """The generator's loss goes through the discriminator, which does not train then; then the other way round."""

    def __init__(self) -> None:
        super().__init__(nn.Identity())
        self.automatic_optimization = False
        self.generator = nn.Sequential(*layered(2)[:3])
        self.discriminator = nn.Sequential(*layered(3), nn.Tanh(), nn.Linear(4, 1, bias=False, dtype=torch.float64))
        nn.init.constant_(self.discriminator.get_parameter("6.weight"), 0.5)

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        optimizers: Any = self.optimizers()
        real = batch[0]
        for optimizer, loss in zip(optimizers, (self._fools, self._tells_apart), strict=True):
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(loss(real))
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def _fools(self, real: Tensor) -> Tensor:
        loss: Tensor = F.softplus(-self.discriminator(self.generator(real.flip(1)))).mean()
        self.log("generator", loss)
        return loss

    def _tells_apart(self, real: Tensor) -> Tensor:
        fake = self.generator(real.flip(1)).detach()
        loss: Tensor = (F.softplus(-self.discriminator(real)) + F.softplus(self.discriminator(fake))).mean()
        self.log("discriminator", loss)
        return loss

    def on_train_end(self) -> None:
        self.record("trains", all(parameter.requires_grad for parameter in self.parameters()))

    def configure_optimizers(self) -> Any:
        return [plain_sgd(self.generator.parameters()), plain_sgd(self.discriminator.parameters())]

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        pass


@pytest.mark.parametrize("module", ["discriminator", "generator"])
@pytest.mark.parametrize("stages", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_adversaries_of_which_one_is_pipelined(stages: int, module: str) -> None:
    """Symptom: no gradient comes through a pipelined module that does not train itself."""
    ranks = fit_stages(stages, _Gan, _LOAD, module=module, chunks=4)
    assert_like_one_process(ranks, fit_alone(_Gan, _LOAD))
    assert [rank.records["trains"] for rank in ranks] == [[True]] * stages


class _TwoViews(Classification):
    """Two calls, of which one has fewer rows; one loss over both."""

    def loss(self, batch: Batch) -> Tensor:
        inputs, labels = batch
        first, second = self.net(inputs), self.net(inputs[: len(inputs) // 2 + 1].flip(1))
        agreement = F.mse_loss(first[: len(second)], second)
        return F.cross_entropy(first, labels) + 0.3 * agreement


class _Unused(Classification):
    """The outcome of a call is thrown away, and that of another one is not differentiated."""

    def loss(self, batch: Batch) -> Tensor:
        self.net(batch[0] * 2)
        offset: Tensor = self.net(batch[0] * 3).detach().mean()
        return super().loss(batch) + 0.1 * offset


class _PseudoLabels(Classification):
    """Labels from a call without gradients, in evaluation mode."""

    def loss(self, batch: Batch) -> Tensor:
        self.net.eval()
        with torch.no_grad():
            targets = self.net(batch[0].flip(1))
        self.net.train()
        assert not targets.requires_grad
        return super().loss(batch) + F.cross_entropy(self.net(batch[0]), targets.softmax(1))


class _Adversarial(Classification):
    """Moves the inputs along their gradient (Goodfellow et al., 2015)."""

    def loss(self, batch: Batch) -> Tensor:
        inputs = batch[0].clone().requires_grad_()
        first = F.cross_entropy(self.net(inputs), batch[1])
        (gradient,) = torch.autograd.grad(first, inputs)
        self.record("gradient", gradient)
        return F.cross_entropy(self.net(inputs + 0.1 * gradient.sign()), batch[1])


class _Saliency(Classification):
    """Asks for the gradient of the inputs, and differentiates the same graph again."""

    def loss(self, batch: Batch) -> Tensor:
        inputs = batch[0].clone().requires_grad_()
        loss = F.cross_entropy(self.net(inputs), batch[1])
        (gradient,) = torch.autograd.grad(loss, inputs, retain_graph=True)
        self.record("gradient", gradient)
        return loss * (1 + gradient.abs().mean())


@pytest.mark.parametrize("build", [_TwoViews, _Unused, _PseudoLabels, _Adversarial, _Saliency])
@pytest.mark.parametrize("stages", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("checkpoint", ["except_last", pytest.param("always", marks=pytest.mark.slow)])
def test_other_calls_in_a_training_step(checkpoint: str, stages: int, build: type[Classification]) -> None:
    """Symptom: stages mix up the calls of one step, or lose the gradient of the inputs."""
    ranks = fit_stages(stages, build, _LOAD, chunks=4, checkpoint=checkpoint)
    alone = fit_alone(build, _LOAD)
    assert_like_one_process(ranks, alone)
    for rank in ranks:
        torch.testing.assert_close(rank.records, alone.records, rtol=0.0, atol=1e-9)
