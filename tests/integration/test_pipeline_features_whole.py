"""What a module is good for during training and after it, under a pipeline."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, WeightAveraging
from torch import nn

from tests.helpers.compare import Result, result_of
from tests.helpers.features import feature
from tests.helpers.pipelines import (
    Classification,
    Pipelined,
    assert_like_one_process,
    batches,
    layered,
    run_alone,
    run_stages,
)

_GROUP = "The module during and after training"
pytestmark = pytest.mark.slow  # the whole table takes minutes

_TOLERANCE = 1e-9


def _use(module: Classification) -> dict[str, Any]:
    """All that people do with a trained module."""
    module.zero_grad()
    inputs = torch.ones(3, 8, dtype=torch.float64)
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    network = layered(seed=9)
    network.load_state_dict({name[4:]: tensor for name, tensor in torch.load(file, weights_only=True).items()})
    duplicate, unpickled = copy.deepcopy(module), pickle.loads(pickle.dumps(module))
    outputs = [model(inputs) for model in (module.net, network, duplicate.net, unpickled.net)]
    torch.autograd.backward(outputs[0].sum())
    gradients = {name: parameter.grad for name, parameter in module.named_parameters()}
    return {"outputs": outputs, "gradients": gradients, "kinds": len({type(p) for p in module.parameters()})}


def _momentum(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True)


def _use_between_fits(place: Pipelined, folder: Path) -> tuple[dict[str, Any], Result]:
    """Two fits of one module with one Trainer, and one with another, evaluated and used in between."""
    module = Classification(optimizer=_momentum)
    first, second = place.trainer(), place.trainer()
    untrained = first.validate(module, batches(12, 5), verbose=False)
    first.fit(module, batches(12, 12, 12))
    used = _use(module)
    tested = first.test(module, batches(12, 5), verbose=False)
    first.save_checkpoint(folder / f"{place.world_size}.ckpt")
    first.fit_loop.max_epochs = 3
    first.fit(module, batches(12, 12, 12))
    predicted = first.predict(module, batches(12, 5))
    second.fit(module, batches(12, 12, 12), batches(12, 5))
    found = {"evaluated": [untrained, tested, predicted], "used": [used, _use(module)]}
    return found, result_of(second, module)


@feature(
    _GROUP,
    "The module after `fit`",
    tried="called, differentiated, saved, copied, pickled, evaluated, asked for predictions, trained on by the same "
    "Trainer and by another, both schedules",
    outcome="whole on every rank; like one process, with the checkpoint of one process",
)
@pytest.mark.parametrize("schedule", ["gpipe", pytest.param("1f1b", marks=pytest.mark.slow)])
def test_a_module_is_whole_between_fits(schedule: str, tmp_path: Path) -> None:
    """Symptom: after training the module computes with other stages' layers, or cannot be saved, copied or pickled."""
    ranks = run_stages(_use_between_fits, 2, tmp_path, chunks=3, schedule=schedule)
    expected, alone = run_alone(_use_between_fits, tmp_path)
    assert_like_one_process([result for _, result in ranks], alone)
    for found, _ in ranks:
        torch.testing.assert_close(found, expected, rtol=0, atol=_TOLERANCE)
    ours, theirs = (torch.load(tmp_path / name, weights_only=True) for name in ("2.ckpt", "0.ckpt"))
    for key in ("state_dict", "optimizer_states"):
        torch.testing.assert_close(ours[key], theirs[key], rtol=0, atol=_TOLERANCE)


class _CopiesInTheMiddle(Callback):
    """Copies the module during training, and tries to use the copies."""

    def __init__(self) -> None:
        self.found: list[dict[str, Any]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        absent = [name for name, parameter in pl_module.named_parameters() if parameter.is_meta]
        for duplicate in (copy.deepcopy(pl_module), pickle.loads(pickle.dumps(pl_module))):
            error = None
            try:
                duplicate.net(torch.ones(3, 8, dtype=torch.float64))
            except RuntimeError as refusal:
                error = str(refusal)
            held = {name: p for name, p in duplicate.named_parameters() if not p.is_meta}
            self.found.append(
                {
                    "absent": absent,
                    "absent in the copy": [name for name, p in duplicate.named_parameters() if p.is_meta],
                    "equal": all(torch.equal(tensor, pl_module.get_parameter(name)) for name, tensor in held.items()),
                    "own memory": all(p is not pl_module.get_parameter(name) for name, p in held.items()),
                    "forward": duplicate.net.forward.__func__ is nn.Sequential.forward,
                    "error": error,
                }
            )


def _copy_in_the_middle(place: Pipelined) -> tuple[list[dict[str, Any]], Result]:
    module, copies = Classification(), _CopiesInTheMiddle()
    trainer = place.trainer(callbacks=[copies])
    trainer.fit(module, batches(12, 12))
    return copies.found, result_of(trainer, module)


@feature(
    _GROUP,
    "`copy.deepcopy` and pickle of the module in a callback",
    tried="after every batch, both schedules",
    outcome="a copy has what this stage holds; calling it is an error that says so; training is not disturbed",
)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_copies_in_the_middle_of_training(schedule: str) -> None:
    """Symptom: a copy talks to the other stages when it is called, or computes with layers that it does not have."""
    ranks = run_stages(_copy_in_the_middle, 2, chunks=2, schedule=schedule, balance=[2, 3])
    assert_like_one_process([result for _, result in ranks], run_alone(_copy_in_the_middle)[1])
    layers = [["net.2.weight", "net.2.bias", "net.4.weight", "net.4.bias"], ["net.0.weight", "net.0.bias"]]
    for (found, _), absent in zip(ranks, layers, strict=True):
        assert len(found) == 4
        for of_copy in found:
            assert of_copy["absent"] == of_copy["absent in the copy"] == absent
            assert of_copy["equal"]
            assert of_copy["own memory"]
            assert of_copy["forward"]
            assert f"does not hold parameter '{absent[0]}'" in of_copy["error"]


def _fit_for_rank_zero(place: Pipelined, path: Path) -> dict[str, Any]:
    module = Classification(optimizer=_momentum)
    trainer = place.trainer(callbacks=[WeightAveraging()])
    trainer.fit(module, batches(12, 12, 12))
    whole = {name: tensor.is_meta for name, tensor in module.state_dict().items()}
    trainer.save_checkpoint(path)
    tested = trainer.test(module, batches(12, 5), verbose=False)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, batches(12, 12, 12))
    return {
        "absent": [name for name, absent in whole.items() if absent],
        "tested": tested,
        "state": module.state_dict(),
    }


@feature(
    _GROUP,
    '`whole_after_fit="rank_zero"`',
    tried="training with averaged weights, a checkpoint, `test`, training on",
    outcome="other ranks are without the layers of other stages between the runs; like one process",
)
def test_whole_on_the_first_rank_alone(tmp_path: Path) -> None:
    """Symptom: other ranks get what they have no room for; or nothing can follow, for they have no values to share."""
    ranks = run_stages(
        _fit_for_rank_zero, 2, tmp_path / "stages.ckpt", chunks=2, balance=[2, 3], whole_after_fit="rank_zero"
    )
    alone = run_alone(_fit_for_rank_zero, tmp_path / "alone.ckpt")
    assert [rank["absent"] for rank in ranks] == [[], ["net.0.weight", "net.0.bias"]]
    torch.testing.assert_close(ranks[0]["state"], alone["state"], rtol=0, atol=_TOLERANCE)
    for rank in ranks:
        torch.testing.assert_close(rank["tested"], alone["tested"], rtol=0, atol=_TOLERANCE)
    ours, theirs = (torch.load(tmp_path / name, weights_only=True) for name in ("stages.ckpt", "alone.ckpt"))
    for key in ("state_dict", "optimizer_states"):
        torch.testing.assert_close(ours[key], theirs[key], rtol=0, atol=_TOLERANCE)
