"""The LightningModule of the image classification recipes. It knows nothing of ranks or strategies."""

from __future__ import annotations

import math
from functools import partial
from typing import Literal

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from networks import build_network
from torch import Tensor
from torchmetrics.classification import MulticlassAccuracy

__all__ = ["ImageClassifier", "warmup_cosine"]

Batch = tuple[Tensor, Tensor]


def warmup_cosine(step: int, warmup_steps: int, total_steps: int) -> float:
    """Factor of the learning rate at an optimizer step: a straight line up to 1, then half a cosine down to 0.

    Args:
        step: optimizer step, from 0.
        warmup_steps: steps before the factor is 1; the first has the factor ``1 / (warmup_steps + 1)``.
        total_steps: the step at which the factor is 0.
    """
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    return 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))


class ImageClassifier(pl.LightningModule):
    """Classifies images with a network of torchvision or the small bundled one.

    Logs ``{train,val,test}_loss`` and ``{train,val,test}_accuracy``.

    Args:
        network: ``small_cnn``, or the name of a torchvision classifier, e.g. ``resnet18``.
        in_channels: channels of the images.
        num_classes: number of classes.
        optimizer: AdamW, or SGD with Nesterov momentum.
        learning_rate: its highest value, at the end of the warm-up. Not scaled by the number of ranks.
        weight_decay: of weight matrices and filters; biases and normalisation layers have none.
        momentum: of SGD.
        warmup_fraction: share of all optimizer steps in which the learning rate rises, in [0, 1).
        label_smoothing: probability mass that training spreads over all classes, in [0, 1).

    Raises:
        ValueError: an argument is outside its range or names no network.
    """

    def __init__(
        self,
        network: str = "small_cnn",
        in_channels: int = 1,
        num_classes: int = 10,
        optimizer: Literal["adamw", "sgd"] = "adamw",
        learning_rate: float = 3e-3,
        weight_decay: float = 0.05,
        momentum: float = 0.9,
        warmup_fraction: float = 0.1,
        label_smoothing: float = 0.1,
    ) -> None:
        super().__init__()
        for name, value in {"warmup_fraction": warmup_fraction, "label_smoothing": label_smoothing}.items():
            if not 0.0 <= value < 1.0:
                raise ValueError(f"{name} must be at least 0 and below 1, got {value}")
        self.save_hyperparameters()
        self.network = build_network(network, in_channels, num_classes)
        self.optimizer_name = optimizer
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.momentum = momentum
        self.warmup_fraction = warmup_fraction
        self.label_smoothing = label_smoothing
        self.train_accuracy = MulticlassAccuracy(num_classes, average="micro")
        self.val_accuracy = MulticlassAccuracy(num_classes, average="micro")
        self.test_accuracy = MulticlassAccuracy(num_classes, average="micro")

    def forward(self, images: Tensor) -> Tensor:
        """Logits (N, num_classes) of images (N, in_channels, H, W)."""
        logits: Tensor = self.network(images)
        return logits

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The smoothed cross-entropy of a batch of images and labels (N,)."""
        images, labels = batch
        logits = self(images)
        loss = F.cross_entropy(logits, labels, label_smoothing=self.label_smoothing)
        self.train_accuracy(logits, labels)
        self.log("train_loss", loss, prog_bar=True)
        self.log("train_accuracy", self.train_accuracy, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Counts the right answers."""
        self._evaluate("val", batch, self.val_accuracy)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Counts the right answers."""
        self._evaluate("test", batch, self.test_accuracy)

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The most likely class (N,) of each image."""
        images, _ = batch
        classes: Tensor = self(images).argmax(dim=1)
        return classes

    def _evaluate(self, stage: str, batch: Batch, accuracy: MulticlassAccuracy) -> None:
        images, labels = batch
        logits = self(images)
        accuracy(logits, labels)
        self.log(f"{stage}_loss", F.cross_entropy(logits, labels), sync_dist=True)
        self.log(f"{stage}_accuracy", accuracy, prog_bar=True)

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """The optimizer, and a learning rate that warms up and decays step by step until the Trainer's last step.

        Raises:
            ValueError: the Trainer has no last step.
        """
        total_steps = self.trainer.estimated_stepping_batches
        if math.isinf(total_steps):
            raise ValueError("the cosine schedule needs an end: set the Trainer's max_epochs or max_steps")
        optimizer = self._build_optimizer()
        factor = partial(
            warmup_cosine, warmup_steps=int(self.warmup_fraction * total_steps), total_steps=int(total_steps)
        )
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def _build_optimizer(self) -> torch.optim.Optimizer:
        parameters = [parameter for parameter in self.parameters() if parameter.requires_grad]
        groups = [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": self.weight_decay},
            {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
        ]
        if self.optimizer_name == "adamw":
            return torch.optim.AdamW(groups, lr=self.learning_rate)
        return torch.optim.SGD(groups, lr=self.learning_rate, momentum=self.momentum, nesterov=self.momentum > 0)
