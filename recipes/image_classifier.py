"""The LightningModule of the image classification recipes. It knows nothing of ranks or strategies."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from image_format import ImageFormat
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from networks import build_network, find_head
from optimization import Schedule, build_optimizer, find_optimizer, learning_rate_factor, parameter_groups
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassCalibrationError, MulticlassConfusionMatrix
from weights import load_weights

__all__ = ["ImageClassifier"]

Batch = tuple[Tensor, Tensor]


class ImageClassifier(pl.LightningModule):
    """Classifies images with a network of torchvision or the small bundled one.

    Logs ``{train,val,test}_loss`` and ``_accuracy``, and for validation and test ``_top5_accuracy`` (of more than five
    classes) and ``_calibration_error``: by how much the probability of the answers differs from how often they are
    right.

    Args:
        network: ``small_cnn``, or the name of a torchvision classifier, e.g. ``resnet18``.
        network_args: what else torchvision's builder of it takes, e.g. ``{dropout: 0.3}``.
        in_channels: channels of the images.
        num_classes: number of classes.
        small_images: for images of about 32x32 pixels: a first convolution that keeps the resolution, and no pooling
            behind it.
        weights: file to start from, as torchvision publishes it, or a checkpoint of an earlier run. A head for another
            number of classes starts from scratch.
        optimizer: ``adamw``, ``sgd`` or any other class of torch.optim, or the import path of a class.
        optimizer_args: what else it takes, e.g. ``{momentum: 0.9}``.
        learning_rate: its highest value, at the end of the warm-up.
        learning_rate_per: number of images per step that the learning rate is meant for: it is multiplied by all the
            images of a step, of all ranks, over this number (Goyal et al., 2017). None leaves it as it is.
        backbone_factor: share of the learning rate that everything but the last layer has.
        weight_decay: of weight matrices and filters; biases and normalisation layers have none.
        schedule: what follows the warm-up: ``cosine`` down to 0, ``step`` or ``constant``.
        milestones: of ``step``: shares of all optimizer steps after which the learning rate is multiplied by ``gamma``.
        gamma: see there.
        warmup_fraction: share of all optimizer steps in which the learning rate rises, in [0, 1).
        label_smoothing: probability mass that training spreads over all classes, in [0, 1).
        channels_last: keep images and filters in memory with their channels last.
        compile: train the network compiled by ``torch.compile``.

    Raises:
        ValueError: an argument is outside its range, or names nothing that is there.
        FileNotFoundError: there are no weights.
    """

    image_format: ImageFormat | None = None  # of the images it was trained on

    def __init__(
        self,
        network: str = "small_cnn",
        network_args: dict[str, Any] | None = None,
        in_channels: int = 1,
        num_classes: int = 10,
        small_images: bool = False,
        weights: str | None = None,
        optimizer: str = "adamw",
        optimizer_args: dict[str, Any] | None = None,
        learning_rate: float = 3e-3,
        learning_rate_per: int | None = None,
        backbone_factor: float = 1.0,
        weight_decay: float = 0.05,
        schedule: Schedule = "cosine",
        milestones: Sequence[float] = (0.5, 0.75),
        gamma: float = 0.1,
        warmup_fraction: float = 0.1,
        label_smoothing: float = 0.1,
        channels_last: bool = False,
        compile: bool = False,
    ) -> None:
        super().__init__()
        for name, value in {"warmup_fraction": warmup_fraction, "label_smoothing": label_smoothing}.items():
            if not 0.0 <= value < 1.0:
                raise ValueError(f"{name} must be at least 0 and below 1, got {value}")
        find_optimizer(optimizer)  # now rather than when training starts
        self.save_hyperparameters()
        # Where it was loaded from does not matter to whoever loads the checkpoint.
        self.save_hyperparameters({"weights": None})
        self.network = build_network(network, in_channels, num_classes, small_images, network_args)
        self.head = find_head(self.network, num_classes)
        if weights is not None:
            load_weights(self.network, weights, self.head, network)
        if channels_last:
            self.network.to(memory_format=torch.channels_last)
        self.train_accuracy = MulticlassAccuracy(num_classes, average="micro")
        self.val_metrics = _evaluation_metrics(num_classes, prefix="val_")
        self.test_metrics = _evaluation_metrics(num_classes, prefix="test_")
        # For a table and a picture at the end of the test, not for the log.
        self.test_confusion = MulticlassConfusionMatrix(num_classes)

    @property
    def backbone(self) -> list[nn.Parameter]:
        """All parameters but those of the last layer."""
        return [p for name, p in self.network.named_parameters() if not name.startswith(f"{self.head}.")]

    def setup(self, stage: str) -> None:
        """Compare what the data has with what the network was built for.

        Raises:
            ValueError: they differ.
        """
        found = getattr(getattr(self.trainer, "datamodule", None), "image_format", None)
        if found is not None:
            for name, value in {"num_classes": found.num_classes, "in_channels": found.channels}.items():
                if self.hparams[name] != value:
                    raise ValueError(f"the images have {name}={value}, the model {self.hparams[name]}: --model.{name}")
            self.image_format = found
        if stage == "fit" and self.hparams["compile"]:
            self.network.compile()

    def forward(self, images: Tensor) -> Tensor:
        """Logits (N, num_classes) of images (N, in_channels, H, W)."""
        if self.hparams["channels_last"]:
            images = images.to(memory_format=torch.channels_last)
        logits: Tensor = self.network(images)
        return logits

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The smoothed cross-entropy of a batch of images and labels (N,), or probabilities (N, num_classes)."""
        images, labels = batch
        logits = self(images)
        loss = F.cross_entropy(logits, labels, label_smoothing=self.hparams["label_smoothing"])
        self.train_accuracy(logits, labels if labels.ndim == 1 else labels.argmax(dim=1))
        self.log("train_loss", loss, prog_bar=True)
        self.log("train_accuracy", self.train_accuracy, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Compares answers with labels."""
        self._evaluate("val", batch, self.val_metrics)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Compares answers with labels."""
        logits, labels = self._evaluate("test", batch, self.test_metrics)
        self.test_confusion.update(logits, labels)

    def on_test_epoch_start(self) -> None:
        """Forget the test before."""
        self.test_confusion.reset()

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The most likely class (N,) of each image."""
        images, _ = batch
        classes: Tensor = self(images).argmax(dim=1)
        return classes

    def _evaluate(self, stage: str, batch: Batch, metrics: MetricCollection) -> tuple[Tensor, Tensor]:
        images, labels = batch
        logits = self(images)
        metrics(logits, labels)
        self.log(f"{stage}_loss", F.cross_entropy(logits, labels), sync_dist=True)
        for name, metric in metrics.items(copy_state=False):
            self.log(name, metric, prog_bar=name == f"{stage}_accuracy")
        return logits, labels

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """The optimizer, and a learning rate that changes step by step until the Trainer's last step.

        Raises:
            ValueError: the Trainer has no last step.
        """
        total_steps = self.trainer.estimated_stepping_batches
        if math.isinf(total_steps):
            raise ValueError("the schedule needs an end: set the Trainer's max_epochs or max_steps")
        settings: Mapping[str, Any] = self.hparams
        rate = self._learning_rate()
        groups = parameter_groups(self.network, self.head, rate, settings["backbone_factor"], settings["weight_decay"])
        optimizer = build_optimizer(settings["optimizer"], groups, {"lr": rate, **(settings["optimizer_args"] or {})})
        factor = partial(
            learning_rate_factor,
            warmup_steps=int(settings["warmup_fraction"] * total_steps),
            total_steps=int(total_steps),
            schedule=settings["schedule"],
            milestones=tuple(settings["milestones"]),
            gamma=settings["gamma"],
        )
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def _learning_rate(self) -> float:
        """The highest learning rate; says how it came about, and how many images a step has."""
        rate, per = float(self.hparams["learning_rate"]), self.hparams["learning_rate_per"]
        size = getattr(getattr(self.trainer, "datamodule", None), "batch_size", None)
        if size is None:
            if per is not None:
                raise ValueError(
                    "learning_rate_per needs to know the images of a step: a data module with a batch_size"
                )
            return rate
        sampler = self.trainer.distributed_sampler_kwargs
        readers, accumulated = sampler["num_replicas"] if sampler else 1, self.trainer.accumulate_grad_batches
        images = size * readers * accumulated
        scaled = rate if per is None else rate * images / per
        unit = "rank" if readers == self.trainer.world_size else "pipeline"
        rank_zero_info(
            f"batch: {size} images per {unit} x {readers}{f' x {accumulated} accumulated' if accumulated > 1 else ''}"
            f" = {images} in total; learning rate:"
            f" {f'{rate:g}, not scaled' if per is None else f'{rate:g} x {images}/{per} = {scaled:g}'}"
        )
        return scaled

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep what a prediction must know of the images."""
        if self.image_format is not None:
            checkpoint["image_format"] = self.image_format.as_state()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """The counterpart."""
        if "image_format" in checkpoint:
            self.image_format = ImageFormat.from_state(checkpoint["image_format"])


def _evaluation_metrics(num_classes: int, prefix: str) -> MetricCollection:
    metrics: dict[str, Metric | MetricCollection] = {
        "accuracy": MulticlassAccuracy(num_classes, average="micro"),
        "calibration_error": MulticlassCalibrationError(num_classes),
    }
    if num_classes > 5:
        metrics["top5_accuracy"] = MulticlassAccuracy(num_classes, average="micro", top_k=5)
    return MetricCollection(metrics, prefix=prefix)
