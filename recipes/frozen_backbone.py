"""Fine-tuning in two phases: the new head alone, then the whole network."""

from __future__ import annotations

import lightning.pytorch as pl
from image_classifier import ImageClassifier
from lightning.pytorch.utilities import rank_zero_info
from torch import nn

__all__ = ["FrozenBackbone"]


class FrozenBackbone(pl.Callback):
    """Trains only the last layer at first. What is frozen keeps its weights and its BatchNorm statistics.

    The optimizer holds all parameters from the start: one that gets no gradient stays as it is. So the schedule of the
    learning rate needs to know nothing of this, and a run that goes on from a checkpoint is in the right phase.

    Args:
        epochs: number of epochs before the rest trains as well; its learning rate is the model's ``backbone_factor``
            of the head's.

    Raises:
        ValueError: ``epochs`` is negative.
    """

    def __init__(self, epochs: int = 1) -> None:
        if epochs < 0:
            raise ValueError(f"epochs must not be negative, got {epochs}")
        self.epochs = epochs

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Freeze before the summary is made."""
        if stage == "fit":
            self._freeze(trainer, pl_module)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Freeze or thaw."""
        frozen = self._freeze(trainer, pl_module)
        for module in pl_module.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.train(not frozen)
        if trainer.current_epoch == self.epochs > 0:
            rank_zero_info(f"epoch {self.epochs}: the backbone trains from here on")

    def _freeze(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> bool:
        """Whether the backbone is frozen in this epoch; sees to it."""
        assert isinstance(pl_module, ImageClassifier), "the last layer is known of ImageClassifier alone"
        frozen = trainer.current_epoch < self.epochs
        for parameter in pl_module.backbone:
            parameter.requires_grad_(not frozen)
        return frozen
