"""Optimizers, schedules and gradient clipping under a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn

from tests.helpers.compare import Result, result_of
from tests.helpers.features import feature
from tests.helpers.pipelines import (
    Batch,
    Classification,
    Pipelined,
    assert_like_one_process,
    batches,
    fit,
    fit_alone,
    fit_stages,
    run_alone,
    run_stages,
)
from tests.helpers.ranks import RanksFailedError

_GROUP = "Optimizers, schedules, clipping"
pytestmark = pytest.mark.slow  # the whole table takes minutes

_LOAD = partial(batches, 12, 12, 12)

Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

_OPTIMIZERS: dict[str, Make] = {
    "SGD(nesterov, weight_decay)": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "SGD(foreach)": partial(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=True),
    "SGD(fused)": partial(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True),
    "Adam(amsgrad)": partial(torch.optim.Adam, lr=0.01, amsgrad=True),
    "Adam(fused)": partial(torch.optim.Adam, lr=0.01, fused=True),
    "AdamW(foreach)": partial(torch.optim.AdamW, lr=0.01, foreach=True),
    "AdamW(fused)": partial(torch.optim.AdamW, lr=0.01, fused=True),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.1),
    "Adagrad(fused)": partial(torch.optim.Adagrad, lr=0.1, fused=True),
    "Adadelta": partial(torch.optim.Adadelta, lr=0.1),
    "Adafactor": partial(torch.optim.Adafactor, lr=0.1),
    "Adamax": partial(torch.optim.Adamax, lr=0.01),
    "ASGD": partial(torch.optim.ASGD, lr=0.1),
    "NAdam": partial(torch.optim.NAdam, lr=0.01),
    "RAdam": partial(torch.optim.RAdam, lr=0.01),
    "RMSprop(centered)": partial(torch.optim.RMSprop, lr=0.01, centered=True),
    "Rprop": partial(torch.optim.Rprop, lr=0.01),
}


def _fit_each_optimizer(place: Pipelined) -> list[tuple[Result, Any]]:
    results = []
    for make in _OPTIMIZERS.values():
        module = Classification(optimizer=make)
        trainer = place.trainer()
        trainer.fit(module, _LOAD(), _LOAD())
        results.append((result_of(trainer, module), trainer.optimizers[0].state_dict()))
    return results


@feature(
    _GROUP,
    ", ".join(f"`{name}`" for name in _OPTIMIZERS),
    tried="three steps each",
    outcome="like one process, also in the state of the optimizer",
)
def test_optimizers() -> None:
    ranks = run_stages(_fit_each_optimizer, 2, chunks=2, timeout=110.0)
    alone = run_alone(_fit_each_optimizer)
    for name, (expected, state), *of_ranks in zip(_OPTIMIZERS, alone, *ranks, strict=True):
        assert_like_one_process([result for result, _ in of_ranks], expected)
        for _, ours in of_ranks:
            assert ours["param_groups"] == state["param_groups"], name
            torch.testing.assert_close(ours["state"], state["state"], rtol=0, atol=1e-9, msg=name)


def _lbfgs(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(parameters, lr=0.1)


@feature(
    _GROUP, "`LBFGS`", tried="training", outcome="refused: it decides on products over all parameters, and says so"
)
def test_lbfgs_is_refused() -> None:
    with pytest.raises(RanksFailedError, match="ValueError: LBFGS decides on products over all parameters") as raised:
        fit_stages(2, partial(Classification, optimizer=_lbfgs), chunks=2)
    assert all(outcome.error_type in ("ValueError", "RankFailure") for outcome in raised.value.outcomes)


class _Scheduled(Classification):
    """Notes the learning rate of every step."""

    def __init__(self, schedule: Callable[[Any], Any], manual: bool = False) -> None:
        super().__init__()
        self._schedule = schedule
        self.automatic_optimization = not manual

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        if self.automatic_optimization:
            return super().training_step(batch, batch_idx)
        optimizer: Any = self.optimizers()
        scheduler: Any = self.lr_schedulers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()
        scheduler.step()
        return None

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.record("lr", self.trainer.optimizers[0].param_groups[0]["lr"])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return {"optimizer": optimizer, "lr_scheduler": self._schedule(optimizer)}


def _step_lr(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)


def _one_cycle(optimizer: Any) -> Any:
    return {"scheduler": torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=15), "interval": "step"}


def _on_plateau(optimizer: Any) -> Any:
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.05)
    return {"scheduler": scheduler, "monitor": "val_loss"}


def _every_second_step(optimizer: Any) -> Any:
    return {"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5), "interval": "step", "frequency": 2}


_SCHEDULES = [
    (_step_lr, False, 5),
    (_one_cycle, False, 15),
    (_on_plateau, False, None),
    (_every_second_step, False, None),
    (_step_lr, True, 15),
]


def _fit_each(place: Pipelined, runs: list[tuple[Callable[[], Classification], dict[str, Any]]]) -> list[Result]:
    return [fit(place, build, _LOAD, options) for build, options in runs]


@feature(
    _GROUP,
    "Learning rate schedules",
    tried="per epoch, per step, every second step, `ReduceLROnPlateau`, by hand; both schedules of the pipeline",
    outcome="same rates, like one process",
)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_learning_rate_schedules(schedule: str) -> None:
    cases = [case for case in _SCHEDULES if schedule == "gpipe" or not case[1]]  # 1F1B takes no steps by hand
    runs = [(partial(_Scheduled, make, manual), {"max_epochs": 5}) for make, manual, _ in cases]
    ranks = run_stages(_fit_each, 2, runs, chunks=2, schedule=schedule)
    alone = run_alone(_fit_each, runs)
    for (make, _, rates), expected, *of_ranks in zip(cases, alone, *ranks, strict=True):
        assert_like_one_process(of_ranks, expected)
        assert all(rank.records == expected.records for rank in of_ranks)
        distinct = len(set(expected.records["lr"]))
        assert distinct == rates if rates else distinct > 1, make.__name__


class _ClipsByHand(Classification):
    """Calls ``clip_gradients`` in manual optimisation."""

    def __init__(self, value: float, algorithm: str) -> None:
        super().__init__()
        self.automatic_optimization = False
        self._value, self._algorithm = value, algorithm

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        self.clip_gradients(optimizer, gradient_clip_val=self._value, gradient_clip_algorithm=self._algorithm)
        optimizer.step()


class _ClipsInTheHook(Classification):
    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.025, gradient_clip_algorithm="norm")


class _ClipsWithTorch(Classification):
    """By another norm, with the strategy's function where there is one."""

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        clip = getattr(self.trainer.strategy, "clip_grad_norm_", torch.nn.utils.clip_grad_norm_)
        self.record("norm", clip(self.parameters(), 0.02, norm_type=float("inf")))
        self.record("norm", clip(self.net.get_submodule("2").parameters(), 0.01, norm_type=1.0))


_CLIPPING: list[tuple[Callable[[], Classification], dict[str, Any]]] = [
    (Classification, {}),
    (Classification, {"gradient_clip_val": 0.05}),
    (Classification, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    (Classification, {"gradient_clip_val": 0.05, "precision": "64-true"}),
    (Classification, {"gradient_clip_val": 0.05, "accumulate_grad_batches": 2}),
    (_ClipsInTheHook, {}),
    (_ClipsWithTorch, {}),
    (partial(_ClipsByHand, 0.05, "norm"), {}),
    (partial(_ClipsByHand, 0.01, "value"), {"precision": "64-true"}),
]


@feature(
    _GROUP,
    "Gradient clipping",
    tried="by norm and by value, `64-true`, after accumulation, in `configure_gradient_clipping`, with "
    "`self.clip_gradients` in manual optimisation; inf-norm and 1-norm with `strategy.clip_grad_norm_`",
    outcome="by the norm over all stages; like one process",
)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_gradient_clipping(schedule: str) -> None:
    runs = _CLIPPING if schedule == "gpipe" else _CLIPPING[:-2]
    ranks = run_stages(_fit_each, 3, runs, chunks=2, schedule=schedule)
    alone = run_alone(_fit_each, runs)
    for index, (expected, *of_ranks) in enumerate(zip(alone, *ranks, strict=True)):
        assert_like_one_process(of_ranks, expected)
        for rank in of_ranks:
            torch.testing.assert_close(rank.records, expected.records, rtol=0, atol=1e-9)
        unclipped = torch.allclose(expected.state["net.0.weight"], alone[0].state["net.0.weight"], rtol=0, atol=1e-6)
        assert unclipped == (index == 0), runs[index]


class _NotesNorms(Classification):
    """Logs norms of gradients with Lightning's own function."""

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.record("norms", {name: float(norm) for name, norm in grad_norm(self, norm_type=2).items()})


@feature(
    _GROUP,
    "`grad_norm`, `torch.nn.utils.clip_grad_norm_` called by the user",
    tried="norms in `on_before_optimizer_step`",
    outcome="limit: they see the gradients of this stage alone; `self.trainer.strategy.clip_grad_norm_` sees all",
)
def test_norms_that_the_user_computes() -> None:
    ranks = fit_stages(2, _NotesNorms, _LOAD, chunks=2, balance=[2, 3])
    names = [{name for norms in rank.records["norms"] for name in norms if "total" not in name} for rank in ranks]
    assert names == [
        {"grad_2.0_norm/net.0.weight", "grad_2.0_norm/net.0.bias"},
        {f"grad_2.0_norm/net.{layer}.{name}" for layer in (2, 4) for name in ("weight", "bias")},
    ]


class _TwoOptimizers(Classification):
    """Two optimizers that step in turn, each with a window of its own."""

    def __init__(self) -> None:
        super().__init__()
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
        first, second, third = (self.net.get_submodule(name) for name in "024")
        return [
            torch.optim.SGD(first.parameters(), lr=0.1),
            torch.optim.Adam([*second.parameters(), *third.parameters()], lr=0.01),
        ]


@feature(
    _GROUP,
    "Several optimizers, manual optimisation",
    tried="toggled, two calls of the network in a step, one optimizer accumulates over two batches",
    outcome="like one process",
)
def test_several_optimizers() -> None:
    ranks = fit_stages(3, _TwoOptimizers, partial(batches, 12, 12, 12, 12), chunks=2)
    assert_like_one_process(ranks, fit_alone(_TwoOptimizers, partial(batches, 12, 12, 12, 12)))


@feature(
    _GROUP,
    "Manual optimisation under 1F1B",
    tried="two optimizers",
    outcome="refused: it decides when backward runs, which 1F1B does as well; use GPipe",
)
def test_manual_optimisation_is_refused_by_1f1b() -> None:
    with pytest.raises(RanksFailedError, match="ValueError: 1F1B decides when backward runs"):
        fit_stages(2, _TwoOptimizers, chunks=2, schedule="1f1b")
