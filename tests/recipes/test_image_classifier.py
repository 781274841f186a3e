from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from digits_data import DigitsDataModule
from image_classifier import ImageClassifier, warmup_cosine
from networks import build_network
from torch.utils.data import DataLoader, TensorDataset


class _History(pl.Callback):
    """Learning rate and loss of every step."""

    def __init__(self) -> None:
        self.rates: list[float] = []
        self.losses: list[float] = []

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.losses.append(outputs["loss"].item())

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        self.rates.append(optimizer.param_groups[0]["lr"])


def _trainer(folder: Path, **arguments: Any) -> pl.Trainer:
    return pl.Trainer(
        accelerator="cpu",
        devices=1,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **arguments,
    )


def _fit(model: ImageClassifier, folder: Path, steps: int, *callbacks: pl.Callback, **data: Any) -> pl.Trainer:
    trainer = _trainer(folder, max_steps=steps, limit_val_batches=0, callbacks=list(callbacks))
    trainer.fit(model, datamodule=DigitsDataModule(**data))
    return trainer


def test_the_learning_rate_rises_in_a_line_and_falls_in_half_a_cosine(tmp_path: Path) -> None:
    history = _History()
    _fit(ImageClassifier(learning_rate=0.4, warmup_fraction=0.3), tmp_path, 10, history)
    expected = [0.1, 0.2, 0.3] + [0.2 * (1 + math.cos(math.pi * step / 7)) for step in range(7)]
    assert history.rates == pytest.approx(expected)


def test_the_schedule_ends_at_zero_and_stays_there() -> None:
    assert [warmup_cosine(step, 0, 4) for step in (0, 2, 4, 9)] == pytest.approx([1.0, 0.5, 0.0, 0.0])


def test_a_run_without_an_end_cannot_be_scheduled(tmp_path: Path) -> None:
    trainer = _trainer(tmp_path, max_epochs=-1)
    with pytest.raises(ValueError, match="set the Trainer's max_epochs or max_steps"):
        trainer.fit(ImageClassifier(), datamodule=DigitsDataModule())


@pytest.mark.parametrize(("optimizer", "learning_rate"), [("adamw", 3e-3), ("sgd", 0.05)])
def test_the_loss_falls(tmp_path: Path, optimizer: Any, learning_rate: float) -> None:
    pl.seed_everything(0)
    history = _History()
    model = ImageClassifier(optimizer=optimizer, learning_rate=learning_rate)
    _fit(model, tmp_path, 30, history, augment=False)
    assert sum(history.losses[:3]) / 3 > 2.0
    assert sum(history.losses[-3:]) / 3 < 1.2


def test_accuracy_is_logged_for_every_stage(tmp_path: Path) -> None:
    pl.seed_everything(0)
    trainer = _trainer(tmp_path, max_epochs=1, limit_train_batches=3)
    model, data = ImageClassifier(), DigitsDataModule()
    trainer.fit(model, datamodule=data)
    assert {"train_loss", "train_accuracy", "val_loss", "val_accuracy"} <= trainer.callback_metrics.keys()
    (tested,) = trainer.test(model, datamodule=data, verbose=False)
    predicted = torch.cat(trainer.predict(model, datamodule=data))  # type: ignore[arg-type]
    right = sum((predicted == data.test_images.labels).tolist())
    assert tested["test_accuracy"] == pytest.approx(right / 360)


def test_a_perfect_answer_has_a_loss_only_through_label_smoothing() -> None:
    labels = torch.arange(10)
    smoothed, plain = ImageClassifier(label_smoothing=0.1), ImageClassifier(label_smoothing=0.0)
    for model in (smoothed, plain):
        model.log = lambda *_, **__: None  # type: ignore[method-assign]
        model.network = torch.nn.Identity()
    logits = 50.0 * torch.eye(10)
    assert plain.training_step((logits, labels), 0).item() == pytest.approx(0.0, abs=1e-6)
    # The other nine classes have a hundredth of the mass each, and a log-probability of -50.
    assert smoothed.training_step((logits, labels), 0).item() == pytest.approx(0.09 * 50, rel=1e-4)


def test_only_matrices_and_filters_decay(tmp_path: Path) -> None:
    model = ImageClassifier(weight_decay=0.25)
    trainer = _fit(model, tmp_path, 1)
    decays = {
        id(parameter): group["weight_decay"]
        for group in trainer.optimizers[0].param_groups
        for parameter in group["params"]
    }
    assert decays == {id(parameter): 0.25 if parameter.ndim > 1 else 0.0 for parameter in model.parameters()}


def test_a_checkpoint_alone_rebuilds_the_model(tmp_path: Path) -> None:
    model = ImageClassifier(num_classes=7)
    trainer = _trainer(tmp_path, max_steps=1, limit_val_batches=0)
    images, labels = torch.randn(4, 1, 8, 8), torch.arange(4)
    trainer.fit(model, DataLoader(TensorDataset(images, labels), batch_size=4))
    trainer.save_checkpoint(tmp_path / "model.ckpt")
    loaded = ImageClassifier.load_from_checkpoint(tmp_path / "model.ckpt").eval()
    torch.testing.assert_close(loaded(images), model.eval()(images))


@pytest.mark.parametrize(("name", "channels"), [("small_cnn", 1), ("small_cnn", 3), ("resnet18", 1), ("resnet18", 3)])
def test_a_network_maps_images_to_logits(name: str, channels: int) -> None:
    network = build_network(name, in_channels=channels, num_classes=7)
    assert network(torch.randn(2, channels, 16, 16)).shape == (2, 7)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"network": "resnet19"}, "unknown network 'resnet19': use 'small_cnn' or a name of torchvision"),
        ({"network": "fcn_resnet50"}, "unknown network 'fcn_resnet50'"),
        ({"network": "resnet18", "in_channels": 2}, "resnet18 takes images of 1 or 3 channels, got in_channels=2"),
        ({"warmup_fraction": 1.0}, "warmup_fraction must be at least 0 and below 1, got 1.0"),
        ({"label_smoothing": -0.1}, "label_smoothing must be at least 0 and below 1, got -0.1"),
    ],
)
def test_a_wrong_argument_is_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ImageClassifier(**arguments)
