"""Evaluation over stages is exact and sends no gradients; a checkpoint is that of the whole module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.helpers.assertions import assert_ranks_identical
from tests.helpers.compare import Result, result_of
from tests.helpers.models import state_of
from tests.helpers.pipelines import (
    SCHEDULES,
    Batch,
    Classification,
    Pipelined,
    assert_like_one_process,
    batches,
    layered,
    listed,
    record_messages,
    run_alone,
    run_stages,
)


class _Described(Classification):
    """Tests what it validates."""

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)


def _whole_life(place: Pipelined) -> tuple[list[Result], list[Any], list[Tensor]]:
    """Every loop of a trainer, some twice."""
    train, rest = batches(12, 12, 12, 3), batches(10, 10, 3, seed=1)
    module, evaluated, fitted = _Described(), [], []
    trainer = place.trainer(val_check_interval=2, num_sanity_val_steps=2)
    evaluated.append(trainer.validate(module, rest, verbose=False))
    trainer.fit(module, train, rest)
    fitted.append(result_of(trainer, module))
    evaluated.append(trainer.validate(module, rest, verbose=False))
    evaluated.append(trainer.test(module, rest, verbose=False))
    predicted: Any = trainer.predict(module, rest)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, train, rest)
    fitted.append(result_of(trainer, module))
    another = place.trainer(max_epochs=2)
    another.fit(module, train, rest)
    fitted.append(result_of(another, module))
    evaluated.append(another.test(module, rest, verbose=False))
    return fitted, evaluated, predicted


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("stages", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_evaluation_before_between_and_after_training(stages: int, schedule: str) -> None:
    """Symptom: training after an evaluation fails, or an evaluation reuses what training has left behind."""
    ranks = run_stages(_whole_life, stages, chunks=4, schedule=schedule)
    fitted, evaluated, predicted = run_alone(_whole_life)
    for number, alone in enumerate(fitted):
        assert_like_one_process([rank[0][number] for rank in ranks], alone)
    for rank in ranks:
        torch.testing.assert_close(rank[1], evaluated, rtol=0.0, atol=1e-9)
        torch.testing.assert_close(rank[2], predicted, rtol=0.0, atol=1e-9)
        assert rank[1][1] == rank[1][2], "validation and test of the same rows differ"


def _regularised() -> nn.Sequential:
    """With a batch norm whose statistics say something, and a dropout."""
    layers = layered()
    norm = nn.BatchNorm1d(8, dtype=torch.float64)
    norm.get_buffer("running_mean").copy_(torch.linspace(-1, 1, 8))
    norm.get_buffer("running_var").copy_(torch.linspace(0.5, 2, 8))
    return nn.Sequential(layers[0], norm, nn.Dropout(0.5), *layers[1:])


class _Watched(Classification):
    """Records what an evaluation leaves behind."""

    def __init__(self) -> None:
        super().__init__(_regularised())

    def on_validation_start(self) -> None:
        self.records["sent"] = record_messages(self)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.record("differentiable", self.net(batch[0]).requires_grad)

    def on_validation_end(self) -> None:
        self.record("gradients", sum(parameter.grad is not None for parameter in self.parameters()))


def _validate(place: Pipelined, inference_mode: bool) -> tuple[Any, dict[str, list[Any]], dict[str, Tensor]]:
    module, trainer = _Watched(), place.trainer(inference_mode=inference_mode)
    metrics = trainer.validate(module, batches(10, 10, 3), verbose=False)
    return metrics, module.records, state_of(module)


@pytest.mark.parametrize("inference_mode", [True, False])
@pytest.mark.parametrize("schedule", ["gpipe", pytest.param("1f1b", marks=pytest.mark.slow)])
def test_evaluation_is_exact_and_leaves_nothing_behind(schedule: str, inference_mode: bool) -> None:
    """Symptom: a metric is the mean of micro-batches' means; gradients are sent; running statistics move."""
    ranks = run_stages(_validate, 2, inference_mode, chunks=4, schedule=schedule)
    metrics, _, _ = run_alone(_validate, inference_mode)
    forwards = [f"F{number}" for rows in (10, 10, 10, 10, 3, 3) for number in range(min(rows, 4))]  # two calls a step
    for stage, (measured, records, state) in enumerate(ranks):
        torch.testing.assert_close(measured, metrics, rtol=0.0, atol=1e-9)
        assert records["differentiable"] == [False] * 3
        assert records["gradients"] == [0]
        assert_ranks_identical([state, {f"net.{name}": tensor for name, tensor in _regularised().state_dict().items()}])
        kinds = [tag.partition(", ")[2] for _, tag in records["sent"] if tag.startswith("call")]
        assert kinds == (["output"] * 6 if stage else forwards)


class _Tagged(Classification):
    """Rows know who they are: their first feature is their number, and their label its remainder by four."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[tuple[Tensor, Tensor]] = []

    def on_fit_start(self) -> None:
        self.net.get_submodule("0").register_forward_hook(self._keep)

    def _keep(self, layer: nn.Module, args: Any, output: Tensor) -> None:
        self.kept.append((output, output.detach().clone()))

    def loss(self, batch: Batch) -> Tensor:
        self.record("ids", batch[0][..., 0].round().long().flatten())
        self.record("labels", batch[1])
        outputs = self.net(batch[0])
        return nn.functional.cross_entropy(outputs.flatten(1, -2).mean(1) if outputs.dim() > 2 else outputs, batch[1])

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), batch_size=len(batch[1]))

    def on_train_end(self) -> None:
        self.record("kept", len(self.kept))
        self.record("altered", sum(not torch.equal(now, before) for now, before in self.kept))
        self.kept.clear()


def _tagged(*shapes: tuple[int, ...]) -> DataLoader[Any]:
    """Batches of these shapes, whose rows are numbered."""
    generator, first, items = torch.Generator().manual_seed(2), 0, []
    for rows, *others in shapes:
        inputs = torch.randn(rows, *others, generator=generator, dtype=torch.float64)
        numbers = torch.arange(first, first + rows)
        inputs[..., 0] = numbers.reshape(-1, *[1] * (len(others) - 1))
        items.append((inputs, numbers % 4))
        first += rows
    return listed(items)


_SHAPES = [(4, 8), (6, 8), (4, 5, 8), (4, 9, 8), (4, 8), (1, 2, 8)]


def _train_and_predict(place: Pipelined) -> tuple[Result, Tensor]:
    module, trainer = _Tagged(), place.trainer(val_check_interval=1)
    trainer.fit(module, _tagged(*_SHAPES), _tagged((8, 8)))
    predicted: Any = trainer.predict(module, _tagged((4, 8), (6, 8), (1, 8)))
    return result_of(trainer, module), torch.cat(predicted)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_shapes_change_from_batch_to_batch_and_rows_keep_their_labels(schedule: str) -> None:
    """Symptom: buffers of the first batch's shape are used for all; outputs meet the labels of other rows."""
    ranks = run_stages(_train_and_predict, 2, chunks=2, schedule=schedule, balance=[2, 3])
    alone, predicted = run_alone(_train_and_predict)
    assert_like_one_process([result for result, _ in ranks], alone)
    for result, rows in ranks:
        torch.testing.assert_close(rows, predicted, rtol=0.0, atol=1e-9)
        for ids, labels in zip(result.records["ids"], result.records["labels"], strict=True):
            assert torch.equal(ids.reshape(len(labels), -1) % 4, labels[:, None].expand(-1, len(ids) // len(labels)))
    assert ranks[0][0].records["kept"][0] >= 2 * 5 + 1
    assert ranks[0][0].records["altered"] == [0]


class _Buffered(nn.Module):
    """One buffer that is saved and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.scale: Tensor
        self.shift: Tensor
        self.register_buffer("shift", torch.full((8,), 0.25, dtype=torch.float64), persistent=False)
        self.register_buffer("scale", torch.full((8,), 2.0, dtype=torch.float64))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * self.scale + self.shift


class Saved(Classification):
    """A module that a checkpoint can be loaded into; its names do not follow the alphabet."""

    def __init__(self) -> None:
        layers = layered()
        super().__init__(nn.Sequential(layers[0], _Buffered(), *layers[1:]))
        self.after, self.bias = nn.Identity(), nn.Parameter(torch.zeros(4, dtype=torch.float64))

    def on_train_end(self) -> None:
        tensors = (*self.named_parameters(), *self.named_buffers())
        self.records["held"] = [{name: tensor.detach().clone() for name, tensor in tensors if not tensor.is_meta}]


def _save(place: Pipelined, folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor]:
    """Train and save twice; what the stage held, what the module is afterwards, and what it predicts."""
    module = Saved()
    saving = ModelCheckpoint(folder, filename="callback")
    trainer = place.trainer(callbacks=[saving], enable_checkpointing=True)
    trainer.fit(module, batches(12, 12))
    trainer.save_checkpoint(folder / "method.ckpt")
    predicted: Any = trainer.predict(module, batches(10, 3))
    return module.records["held"][0], state_of(module), torch.cat(predicted)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_checkpoint_is_one_file_with_the_keys_of_the_plain_model(schedule: str, tmp_path: Path) -> None:
    """Symptom: a file per stage, with renumbered layers."""
    ranks = run_stages(_save, 3, tmp_path, module="net", chunks=4, schedule=schedule, balance=[2, 2, 2])
    plain = Saved()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["callback.ckpt", "method.ckpt"]
    for file in tmp_path.iterdir():
        state = torch.load(file, weights_only=True)["state_dict"]
        assert [(n, t.shape, t.dtype) for n, t in state.items()] == [
            (n, t.shape, t.dtype) for n, t in plain.state_dict().items()
        ]
        assert "net.1.shift" not in state
        for held, whole, _ in ranks:
            assert_ranks_identical([whole, state, state | {name: held[name] for name in held.keys() & state.keys()}])
        assert set().union(*(held for held, _, _ in ranks)) == {*state, "net.1.shift"}
        loaded = Saved.load_from_checkpoint(file, weights_only=True).eval()
        plain.load_state_dict(state, strict=True)
        for module in (loaded, plain.eval()):
            with torch.no_grad():
                rows = torch.cat([module.net(inputs) for inputs, _ in batches(10, 3)])
            for _, _, predicted in ranks:
                torch.testing.assert_close(rows, predicted, rtol=0.0, atol=1e-9)
