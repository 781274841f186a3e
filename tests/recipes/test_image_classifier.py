from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from digits_data import DigitsDataModule
from image_classifier import ImageClassifier
from synthetic_data import SyntheticDataModule
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers.ranks import run_ranks


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


def test_a_run_without_an_end_cannot_be_scheduled(tmp_path: Path) -> None:
    trainer = _trainer(tmp_path, max_epochs=-1)
    with pytest.raises(ValueError, match="set the Trainer's max_epochs or max_steps"):
        trainer.fit(ImageClassifier(), datamodule=DigitsDataModule())


@pytest.mark.parametrize(("optimizer", "learning_rate"), [("adamw", 3e-3), ("sgd", 0.05)])
def test_the_loss_falls(tmp_path: Path, optimizer: str, learning_rate: float) -> None:
    pl.seed_everything(0)
    history = _History()
    arguments = {"momentum": 0.9, "nesterov": True} if optimizer == "sgd" else None
    model = ImageClassifier(optimizer=optimizer, optimizer_args=arguments, learning_rate=learning_rate)
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
    assert tested["test_top5_accuracy"] > tested["test_accuracy"]
    assert 0.0 < tested["test_calibration_error"] < 1.0
    assert int(model.test_confusion.compute().diag().sum()) == right


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


def test_the_learning_rate_is_scaled_only_if_that_is_asked_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for per, rate, told in ((None, 0.25, "0.25, not scaled"), (16, 0.75, "0.25 x 48/16 = 0.75")):
        history = _History()
        model = ImageClassifier(learning_rate=0.25, learning_rate_per=per, warmup_fraction=0.0, schedule="constant")
        trainer = _trainer(tmp_path, max_steps=1, limit_val_batches=0, callbacks=[history], accumulate_grad_batches=2)
        with caplog.at_level("INFO"):
            trainer.fit(model, datamodule=DigitsDataModule(batch_size=24))
        assert history.rates == [pytest.approx(rate)] * len(history.rates) != []
        assert f"batch: 24 images per rank x 1 x 2 accumulated = 48 in total; learning rate: {told}" in caplog.text


def test_scaling_without_a_data_module_is_an_error(tmp_path: Path) -> None:
    loader = DataLoader(TensorDataset(torch.randn(4, 1, 8, 8), torch.arange(4)), batch_size=4)
    with pytest.raises(ValueError, match="learning_rate_per needs to know the images of a step"):
        _trainer(tmp_path, max_steps=1).fit(ImageClassifier(learning_rate_per=16), loader)


def test_mixed_labels_are_learnt_from(tmp_path: Path) -> None:
    trainer = _trainer(tmp_path, max_steps=2, limit_val_batches=0)
    trainer.fit(ImageClassifier(), datamodule=DigitsDataModule(mixup_alpha=1.0, cutmix_alpha=1.0))
    assert trainer.callback_metrics["train_loss"].isfinite()


def test_images_that_the_model_was_not_built_for_are_refused(tmp_path: Path) -> None:
    data = SyntheticDataModule(num_classes=3, channels=3)
    refused: list[tuple[dict[str, Any], str]] = [
        ({"in_channels": 3}, "the images have num_classes=3, the model 10: --model.num_classes"),
        ({"num_classes": 3}, "the images have in_channels=3, the model 1: --model.in_channels"),
    ]
    for arguments, message in refused:
        with pytest.raises(ValueError, match=message):
            _trainer(tmp_path, max_steps=1).fit(ImageClassifier(**arguments), datamodule=data)


def test_channels_last_changes_the_layout_and_no_result() -> None:
    torch.manual_seed(0)
    usual = ImageClassifier().eval()
    last = ImageClassifier(channels_last=True).eval()
    last.load_state_dict(usual.state_dict())
    images = torch.randn(4, 1, 8, 8)
    torch.testing.assert_close(last(images), usual(images))
    filters = [p for p in last.network.parameters() if p.ndim == 4 and p.shape[1] > 1]
    assert filters
    assert all(p.is_contiguous(memory_format=torch.channels_last) for p in filters)


def _train_compiled(rank: int, world_size: int, folder: Path) -> float:
    model = ImageClassifier(compile=True)
    _fit(model, folder, 2).save_checkpoint(folder / "model.ckpt")
    loaded = ImageClassifier.load_from_checkpoint(folder / "model.ckpt").eval()
    images = torch.randn(4, 1, 8, 8)
    return float((loaded(images) - model.eval()(images)).abs().max())


@pytest.mark.slow
def test_a_compiled_network_trains_and_its_checkpoint_is_ordinary(tmp_path: Path) -> None:
    (difference,) = run_ranks(_train_compiled, 1, tmp_path, init=False, timeout=110.0)
    assert difference < 1e-5


def test_a_checkpoint_knows_its_images_and_not_where_its_first_weights_were(tmp_path: Path) -> None:
    first = ImageClassifier()
    torch.save(first.network.state_dict(), tmp_path / "weights.pth")
    model = ImageClassifier(weights=str(tmp_path / "weights.pth"))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), model.parameters(), strict=True))
    _fit(model, tmp_path, 1).save_checkpoint(tmp_path / "model.ckpt")
    (tmp_path / "weights.pth").unlink()
    loaded = ImageClassifier.load_from_checkpoint(tmp_path / "model.ckpt", weights_only=True)
    assert loaded.image_format == model.image_format
    assert loaded.image_format is not None
    assert loaded.image_format.classes == tuple("0123456789")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"network": "resnet19"}, "unknown network 'resnet19': use 'small_cnn' or a name of torchvision"),
        ({"optimizer": "adamv"}, "unknown optimizer 'adamv'"),
        ({"warmup_fraction": 1.0}, "warmup_fraction must be at least 0 and below 1, got 1.0"),
        ({"label_smoothing": -0.1}, "label_smoothing must be at least 0 and below 1, got -0.1"),
    ],
)
def test_a_wrong_argument_is_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ImageClassifier(**arguments)
