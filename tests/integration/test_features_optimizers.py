"""Optimizers, schedules and gradient clipping under ``ring_ddp``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn

from tests.helpers.assertions import assert_ranks_identical
from tests.helpers.compare import Logged, Place, Result, assert_same, fit, fit_alone, fit_under, run_both
from tests.helpers.features import feature
from tests.helpers.models import Batch, Regression

pytestmark = pytest.mark.slow  # the whole table takes minutes

_GROUP = "Optimizers, schedules, clipping"

Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

_OPTIMIZERS: dict[str, Make] = {
    "SGD(nesterov, weight_decay)": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "SGD(fused)": partial(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True),
    "Adam(amsgrad)": partial(torch.optim.Adam, lr=0.01, amsgrad=True),
    "AdamW(foreach)": partial(torch.optim.AdamW, lr=0.01, foreach=True),
    "AdamW(fused)": partial(torch.optim.AdamW, lr=0.01, fused=True),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.1),
    "RMSprop(centered)": partial(torch.optim.RMSprop, lr=0.01, centered=True),
    "Adafactor": partial(torch.optim.Adafactor, lr=0.1),
}


class _NotesNorms(Logged):
    """Logs norms of gradients with Lightning's own function."""

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.log_dict(grad_norm(self, norm_type=2))


def _fit_each_optimizer(place: Place) -> list[Result]:
    return [fit(place, partial(_NotesNorms, optimizer=make), {}) for make in _OPTIMIZERS.values()]


@feature(
    _GROUP,
    ", ".join(f"`{name}`" for name in _OPTIMIZERS),
    tried="six steps each, norms of gradients logged with `grad_norm`",
    outcome="same bits",
)
def test_optimizers() -> None:
    ours, theirs = run_both(_fit_each_optimizer)
    for of_ours, of_theirs in zip(zip(*ours, strict=True), zip(*theirs, strict=True), strict=True):
        assert_same(of_ours, of_theirs)
        assert "grad_2.0_norm_total" in of_ours[0].metrics


def _lbfgs(parameters: Iterable[nn.Parameter], line_search: str | None) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(parameters, lr=0.1, max_iter=4, line_search_fn=line_search)


@feature(
    _GROUP,
    "`LBFGS`",
    tried="four iterations a step, without a line search",
    outcome="ranks identical, within 1e-5 of one process",
)
def test_lbfgs() -> None:
    build = partial(Regression, optimizer=partial(_lbfgs, line_search=None))
    ours = fit_under("ring_ddp", build, limit_val_batches=0)
    assert_same(ours, fit_alone(build, limit_val_batches=0), tolerance=1e-5)


class _NotesLosses(Regression):
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, sync_dist=True)
        return loss


@feature(
    _GROUP,
    "`LBFGS` with `strong_wolfe`",
    tried="ranks must evaluate equally often",
    outcome="ranks identical, last loss within 1e-2 of one process",
)
def test_lbfgs_with_a_line_search() -> None:
    build = partial(_NotesLosses, optimizer=partial(_lbfgs, line_search="strong_wolfe"))
    ours = fit_under("ring_ddp", build, limit_val_batches=0)
    alone = fit_alone(build, limit_val_batches=0)
    assert_ranks_identical([rank.state for rank in ours])
    assert_ranks_identical([rank.metrics for rank in ours])
    torch.testing.assert_close(ours[0].metrics["loss"], alone.metrics["loss"], rtol=0, atol=1e-2)


class _Scheduled(Logged):
    """Notes the learning rate of every step."""

    def __init__(self, rank: int, schedule: Callable[[Any], Any], manual: bool = False) -> None:
        super().__init__(rank)
        self._schedule = schedule
        self.automatic_optimization = not manual

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        self.record("lr", self.trainer.optimizers[0].param_groups[0]["lr"])
        if self.automatic_optimization:
            return super().training_step(batch, batch_idx)
        optimizer: Any = self.optimizers()
        scheduler: Any = self.lr_schedulers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()
        scheduler.step()
        return None

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return {"optimizer": optimizer, "lr_scheduler": self._schedule(optimizer)}


def _step_lr(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)


def _one_cycle(optimizer: Any) -> Any:
    return {"scheduler": torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=30), "interval": "step"}


def _on_plateau(optimizer: Any) -> Any:
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.2)
    return {"scheduler": scheduler, "monitor": "val_loss"}


def _every_second_step(optimizer: Any) -> Any:
    return {"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5), "interval": "step", "frequency": 2}


_SCHEDULES = [
    (_step_lr, False, 5),
    (_one_cycle, False, 30),
    (_on_plateau, False, None),
    (_every_second_step, False, 15),
    (_step_lr, True, 30),
]


def _fit_each_schedule(place: Place) -> list[Result]:
    return [
        fit(place, partial(_Scheduled, schedule=schedule, manual=manual), {"max_epochs": 5})
        for schedule, manual, _ in _SCHEDULES
    ]


@feature(
    _GROUP,
    "Learning rate schedules",
    tried="per epoch, per step, every second step, `ReduceLROnPlateau`, by hand",
    outcome="same rates, same bits",
)
def test_learning_rate_schedules() -> None:
    ours, theirs = run_both(_fit_each_schedule)
    for index, (schedule, _, rates) in enumerate(_SCHEDULES):
        of_ours, of_theirs = ([rank[index] for rank in ranks] for ranks in (ours, theirs))
        assert_same(of_ours, of_theirs)
        assert of_ours[0].records == of_ours[1].records == of_theirs[0].records
        distinct = len(set(of_ours[0].records["lr"]))
        assert distinct == rates if rates else distinct > 1, schedule.__name__


class _ClipsByHand(_NotesNorms):
    """Calls ``clip_gradients`` in manual optimisation."""

    def __init__(self, rank: int, value: float, algorithm: str) -> None:
        super().__init__(rank)
        self.automatic_optimization = False
        self._value, self._algorithm = value, algorithm

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        self.clip_gradients(optimizer, gradient_clip_val=self._value, gradient_clip_algorithm=self._algorithm)
        optimizer.step()


class _ClipsInTheHook(_NotesNorms):
    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.025, gradient_clip_algorithm="norm")


def _by_norm(rank: int) -> _ClipsByHand:
    return _ClipsByHand(rank, 0.05, "norm")


def _by_value(rank: int) -> _ClipsByHand:
    return _ClipsByHand(rank, 0.01, "value")


_CLIPPING: list[tuple[Callable[[int], Logged], dict[str, Any]]] = [
    (_NotesNorms, {}),
    (_NotesNorms, {"gradient_clip_val": 0.05}),
    (_NotesNorms, {"gradient_clip_val": 0.05, "precision": "bf16-mixed"}),
    (_NotesNorms, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    (_NotesNorms, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value", "precision": "64-true"}),
    (_NotesNorms, {"gradient_clip_val": 0.05, "accumulate_grad_batches": 2}),
    (_ClipsInTheHook, {}),
    (_by_norm, {}),
    (_by_value, {"precision": "bf16-mixed"}),
]


def _fit_each_clipping(place: Place) -> list[Result]:
    return [fit(place, build, options) for build, options in _CLIPPING]


@feature(
    _GROUP,
    "Gradient clipping",
    tried="by norm and by value, in 32 bit, `bf16-mixed`, `64-true`, after accumulation, in "
    "`configure_gradient_clipping`, with `self.clip_gradients` in manual optimisation",
    outcome="same bits",
)
def test_gradient_clipping() -> None:
    ours, theirs = run_both(_fit_each_clipping)
    for index, (build, options) in enumerate(_CLIPPING):
        of_ours, of_theirs = ([rank[index] for rank in ranks] for ranks in (ours, theirs))
        assert_same(of_ours, of_theirs)
        weights, unclipped = (rank.state["net.0.weight"].double() for rank in (of_ours[0], ours[0][0]))
        assert torch.equal(weights, unclipped) == (index == 0), (build, options)


class _TwoOptimizers(Logged):
    """Two optimizers that step in turn, each with a window of its own."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.automatic_optimization = False

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        optimizers: Any = self.optimizers()
        first, second = optimizers
        self.toggle_optimizer(first)
        self.manual_backward(self.loss(batch))
        first.step()
        first.zero_grad()
        self.untoggle_optimizer(first)
        self.toggle_optimizer(second)
        self.manual_backward(self.loss(batch) / 2)
        self.untoggle_optimizer(second)
        if batch_idx % 2 == 1:
            second.step()
            second.zero_grad()

    def configure_optimizers(self) -> Any:
        first, second = self.net.get_submodule("0"), self.net.get_submodule("2")
        return [torch.optim.SGD(first.parameters(), lr=0.1), torch.optim.Adam(second.parameters(), lr=0.01)]


@feature(
    _GROUP,
    "Several optimizers",
    tried="manual optimisation, toggled, one of them accumulates over two batches",
    outcome="ranks identical, within 1e-6 of one process and of `ddp_find_unused_parameters_true`",
)
def test_several_optimizers() -> None:
    ours, theirs = run_both(fit, _TwoOptimizers, {}, theirs="ddp_find_unused_parameters_true")
    assert_same(ours, fit_alone(_TwoOptimizers), tolerance=1e-6)
    assert_same(ours, theirs, tolerance=1e-6)
