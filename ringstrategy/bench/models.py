"""The classifiers that training steps are measured with, on synthetic data in memory."""

from __future__ import annotations

import math
from typing import Literal

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

__all__ = ["SyntheticBatches", "SyntheticClassifier", "build_network", "check_model"]

_CLASSES = 10
_MLP_WIDTH = 1024
_MLP_LAYERS = 10
_CIFAR = "cifar_"
_GROUPS = 32  # of a group norm; Wu and He, "Group Normalization", 2018


def build_network(
    model: str, image_size: int, norm: Literal["batch", "group"] = "batch"
) -> tuple[nn.Module, tuple[int, ...]]:
    """Make a classifier of ten classes.

    Args:
        model: ``"mlp"`` (ten layers of 1024 x 1024 and a head: 10.5 million parameters); ``"cifar_resnet18"``
            (ResNet-18 with the stem for images of 32 x 32: a convolution of 3 x 3 that keeps their size, and no
            pooling; He et al., "Deep Residual Learning for Image Recognition", 2016, section 4.2); or the name of a
            classifier of torchvision, whose ResNets leave 8 x 8 of such an image to their first block.
        image_size: height and width of the images; the MLP takes vectors and has no use for it.
        norm: ``"group"`` puts a group norm of 32 groups in place of every batch norm, so that a sample's output does
            not depend on what other samples are in its batch.

    Returns:
        The network and the shape of one input.

    Raises:
        ValueError: there is no such model, see :func:`check_model`.
    """
    check_model(model)
    if model == "mlp":
        hidden = [m for _ in range(_MLP_LAYERS) for m in (nn.Linear(_MLP_WIDTH, _MLP_WIDTH), nn.ReLU())]
        return nn.Sequential(*hidden, nn.Linear(_MLP_WIDTH, _CLASSES)), (_MLP_WIDTH,)

    from torchvision import models

    network: nn.Module = models.get_model(model.removeprefix(_CIFAR), weights=None, num_classes=_CLASSES)
    if model.startswith(_CIFAR):
        network.conv1 = nn.Conv2d(3, 64, kernel_size=3, padding=1, bias=False)
        network.maxpool = nn.Identity()
    if norm == "group":
        _use_group_norm(network)
    return network, (3, image_size, image_size)


def _use_group_norm(network: nn.Module) -> None:
    for parent in list(network.modules()):
        for name, child in parent.named_children():
            if isinstance(child, nn.BatchNorm2d):
                groups = math.gcd(_GROUPS, child.num_features)
                setattr(parent, name, nn.GroupNorm(groups, child.num_features, eps=child.eps))


def check_model(model: str) -> None:
    """Check that :func:`build_network` knows this model.

    Raises:
        ValueError: it does not, or torchvision, which has it, is not installed.
    """
    if model == "mlp":
        return
    try:
        from torchvision import models
    except ImportError as error:
        raise ValueError(f"the model {model!r} needs torchvision: pip install 'ringstrategy[recipes]'") from error
    names = models.list_models(module=models)
    if model not in (*names, f"{_CIFAR}resnet18"):
        raise ValueError(
            f"there is no model {model!r}; choose mlp, {_CIFAR}resnet18 or a classifier of torchvision:"
            f" {', '.join(names)}"
        )


class SyntheticClassifier(pl.LightningModule):
    """A classifier with cross-entropy and SGD with momentum.

    Args:
        network: maps a batch to logits.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """The loss of one batch."""
        inputs, labels = batch
        outputs = self.network(inputs)
        # GoogLeNet and Inception return their auxiliary heads beside the logits.
        logits = outputs if isinstance(outputs, Tensor) else outputs.logits
        return nn.functional.cross_entropy(logits, labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """SGD with momentum, the optimizer of most image classifiers."""
        return torch.optim.SGD(self.parameters(), lr=1e-3, momentum=0.9)


class SyntheticBatches(Dataset[tuple[Tensor, Tensor]]):
    """A few batches made beforehand, handed out in turn, so that loading costs next to nothing.

    Args:
        shape: of one input.
        batch_size: samples per batch.
        length: number of batches to hand out.
        seed: another one on each rank.
    """

    def __init__(self, shape: tuple[int, ...], batch_size: int, length: int, seed: int, distinct: int = 4) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._batches = [
            (
                torch.randn(batch_size, *shape, generator=generator),
                torch.randint(_CLASSES, (batch_size,), generator=generator),
            )
            for _ in range(min(distinct, length))
        ]
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < self._length:
            raise IndexError(index)
        return self._batches[index % len(self._batches)]

    def loader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        """A DataLoader over the batches as they are."""
        return DataLoader(self, batch_size=None)
