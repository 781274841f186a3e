"""One ordinary checkpoint, whatever wrote it and whatever goes on from it."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.helpers.models import state_of
from tests.helpers.pipelines import Batch, Classification, Pipelined, batches, layered, run_alone, run_stages

_TOLERANCE = 1e-9


@dataclass(frozen=True)
class _Kind:
    """What trains.

    Attributes:
        ranks: how many; 0 for one process without a strategy.
        replicas: ranks, or pipelines, that see different rows of a batch.
        pipeline: arguments of PipelineStrategy.
        strategy: another strategy's name.
    """

    ranks: int
    replicas: int = 1
    pipeline: dict[str, Any] = field(default_factory=dict)
    strategy: str | None = None


_KINDS = {
    "one process": _Kind(0),
    "ring_ddp": _Kind(2, replicas=2, strategy="ring_ddp"),
    "ddp": _Kind(2, replicas=2, strategy="ddp"),
    "gpipe, 2 stages": _Kind(2, pipeline={"chunks": 3}),
    "gpipe, 3 stages": _Kind(3, pipeline={"chunks": 2, "balance": [1, 1, 3]}),
    "1f1b, 2 stages": _Kind(2, pipeline={"chunks": 3, "schedule": "1f1b"}),
    "2 stages x 2 replicas": _Kind(4, replicas=2, pipeline={"num_stages": 2, "chunks": 2}),
}
_QUICK = ["one process", "gpipe, 2 stages", "1f1b, 2 stages"]
_PIPELINES = [name for name, kind in _KINDS.items() if kind.pipeline]


class _Scheduled(Classification):
    """AdamW, whose rate changes with every step."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02, weight_decay=0.1)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=12)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.record("lr", optimizer.param_groups[0]["lr"])


class _Rows:
    """This replica's rows of every batch, so that all replicas together see what one process sees."""

    def __init__(self, replica: int, replicas: int) -> None:
        self._batches = [tuple(part[replica::replicas] for part in batch) for batch in batches(12, 12, 12)]

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: int) -> Any:
        return self._batches[index]


@dataclass(frozen=True)
class _Trained:
    """A rank after training: weights, the optimizer's state, and the rates of all steps."""

    state: dict[str, Tensor]
    optimizer: dict[str, Any]
    rates: list[float]
    global_step: int


def _train(
    place: Pipelined, kind: _Kind, epochs: int, seed: int, save: Path | None = None, resume: Path | None = None
) -> _Trained:
    module = _Scheduled(layered(seed))
    options = {} if kind.strategy is None else {"strategy": kind.strategy}
    trainer = place.trainer(max_epochs=epochs, **options)
    # Ranks count stage by stage, then replica by replica.
    replica = place.rank * kind.replicas // max(1, kind.ranks)
    rows: Any = _Rows(replica, kind.replicas)
    trainer.fit(module, DataLoader(rows, batch_size=None), ckpt_path=resume)
    if save is not None:
        trainer.save_checkpoint(save)
    return _Trained(state_of(module), trainer.optimizers[0].state_dict(), module.records["lr"], trainer.global_step)


def _train_each(place: Pipelined, kind: _Kind, resume: list[Path]) -> list[_Trained]:
    return [_train(place, kind, 4, 7, resume=path) for path in resume]


def _run(name: str, scenario: Any, *args: Any) -> list[Any]:
    kind = _KINDS[name]
    if not kind.ranks:
        return [run_alone(scenario, kind, *args)]
    return run_stages(scenario, kind.ranks, kind, *args, **kind.pipeline)


def _file(name: str) -> str:
    return f"{name}.ckpt"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint of every kind after two of four epochs."""
    folder = tmp_path_factory.mktemp("saved")
    for name in _KINDS:
        _run(name, _train, 2, 1, folder / _file(name))
    return folder


@pytest.fixture(scope="module")
def unbroken() -> _Trained:
    """Four epochs of one process in one go."""
    trained: _Trained = _run("one process", _train, 4, 1)[0]
    return trained


@pytest.mark.parametrize(
    "kind", [pytest.param(name, marks=() if name in _QUICK else pytest.mark.slow) for name in _KINDS]
)
def test_a_run_goes_on_from_the_checkpoint_of_any_other(kind: str, saved: Path, unbroken: _Trained) -> None:
    """Symptom: a checkpoint asks for the number of stages that wrote it, or moments land at other parameters."""
    assert unbroken.global_step == 12
    assert len(set(unbroken.rates)) == 12
    for rank in _run(kind, _train_each, [saved / _file(name) for name in _KINDS]):
        for saver, resumed in zip(_KINDS, rank, strict=True):
            assert resumed.global_step == 12, saver
            assert resumed.rates == pytest.approx(unbroken.rates[6:], abs=1e-12), saver
            torch.testing.assert_close(resumed.state, unbroken.state, rtol=0, atol=_TOLERANCE, msg=saver)
            torch.testing.assert_close(resumed.optimizer, unbroken.optimizer, rtol=0, atol=_TOLERANCE, msg=saver)


@pytest.mark.parametrize("kind", _PIPELINES)
def test_the_checkpoint_is_that_of_one_process(kind: str, saved: Path) -> None:
    """Symptom: keys in the order of stages, prefixes, or a state per stage."""
    ours, theirs = (torch.load(saved / _file(name), weights_only=True) for name in (kind, "one process"))
    assert list(ours) == list(theirs)
    assert list(ours["state_dict"]) == list(theirs["state_dict"])
    for name, tensor in theirs["state_dict"].items():
        torch.testing.assert_close(ours["state_dict"][name], tensor, rtol=0, atol=_TOLERANCE)
    ((our,), (their,)) = (checkpoint["optimizer_states"] for checkpoint in (ours, theirs))
    assert list(our) == list(their)
    assert our["param_groups"] == their["param_groups"]
    assert list(our["state"]) == list(their["state"])
    for index, state in their["state"].items():
        assert list(our["state"][index]) == list(state)
    torch.testing.assert_close(our["state"], their["state"], rtol=0, atol=_TOLERANCE)
    for key in ("epoch", "global_step", "loops", "lr_schedulers"):
        assert ours[key] == theirs[key], key
    with zipfile.ZipFile(saved / _file(kind)) as archive:
        (pickled,) = (archive.read(name) for name in archive.namelist() if name.endswith("data.pkl"))
    assert b"ringstrategy" not in pickled, "it must load where this package is not installed"


_WITHOUT_THE_PACKAGE = """
import sys
sys.modules["ringstrategy"] = None  # importing it would be an error
import lightning.pytorch as pl
import torch
from torch import nn

class Classification(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)).double()

module = Classification.load_from_checkpoint({path!r}, weights_only=True)
torch.save(module.net(torch.ones(2, 8).double()), {output!r})
"""


@pytest.mark.slow
def test_it_loads_where_the_package_is_not_installed(saved: Path, tmp_path: Path) -> None:
    """Symptom: classes of the package in the pickle."""
    path, output = saved / _file("gpipe, 3 stages"), tmp_path / "output.pt"
    script = _WITHOUT_THE_PACKAGE.format(path=str(path), output=str(output))
    subprocess.run([sys.executable, "-c", script], check=True, timeout=100)
    net = layered(5)
    state = torch.load(path, weights_only=True)["state_dict"]
    net.load_state_dict({name.removeprefix("net."): tensor for name, tensor in state.items()})
    torch.testing.assert_close(torch.load(output), net(torch.ones(2, 8).double()), rtol=0, atol=1e-15)


class _TwoOptimizers(Classification):
    """Optimizers over parts of the network, each with momentum, one of them on one stage alone."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        optimizers: Any = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        for optimizer in optimizers:
            optimizer.step()

    def configure_optimizers(self) -> Any:
        def momentum(parameters: Iterable[nn.Parameter], lr: float) -> torch.optim.Optimizer:
            return torch.optim.SGD(parameters, lr, momentum=0.9, nesterov=True)

        layers = list(self.net.children())
        return [
            momentum(layers[4].parameters(), 0.1),
            momentum([*layers[2].parameters(), *layers[0].parameters()], 0.2),
        ]


def _train_twice(place: Pipelined, path: Path) -> tuple[dict[str, Tensor], Any]:
    """Three epochs: one, a checkpoint, two more in another Trainer."""
    first = place.trainer()
    first.fit(_TwoOptimizers(), batches(12, 12, 12))
    first.save_checkpoint(path)
    module = _TwoOptimizers()
    second = place.trainer(max_epochs=3)
    second.fit(module, batches(12, 12, 12), ckpt_path=path)
    return state_of(module), [optimizer.state_dict() for optimizer in second.optimizers]


def test_several_optimizers(tmp_path: Path) -> None:
    """Symptom: indices of parameters that count through the stage alone."""
    ranks = run_stages(_train_twice, 2, tmp_path / "stages.ckpt", chunks=2, balance=[2, 3])
    state, optimizers = run_alone(_train_twice, tmp_path / "alone.ckpt")
    for ours, of_ours in ranks:
        torch.testing.assert_close(ours, state, rtol=0, atol=_TOLERANCE)
        torch.testing.assert_close(of_ours, optimizers, rtol=0, atol=_TOLERANCE)
    saved, expected = (torch.load(tmp_path / name, weights_only=True) for name in ("stages.ckpt", "alone.ckpt"))
    torch.testing.assert_close(saved["optimizer_states"], expected["optimizer_states"], rtol=0, atol=_TOLERANCE)
