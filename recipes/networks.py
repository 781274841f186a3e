"""Image classification networks by name: one small bundled network, and those of torchvision."""

from __future__ import annotations

import torchvision
from torch import Tensor, nn

__all__ = ["build_network"]


def build_network(name: str, in_channels: int, num_classes: int) -> nn.Module:
    """A freshly initialised network that maps images (N, in_channels, H, W) to logits (N, num_classes).

    Args:
        name: ``"small_cnn"``, or the name of a torchvision classifier, e.g. ``"resnet18"``.
        in_channels: channels of the images. torchvision's networks want 3; grey images are repeated for them.
        num_classes: number of logits.

    Raises:
        ValueError: no network has that name, or it cannot take that number of channels.
    """
    if name == "small_cnn":
        return _small_cnn(in_channels, num_classes)
    if name not in torchvision.models.list_models(module=torchvision.models):
        raise ValueError(
            f"unknown network {name!r}: use 'small_cnn' or a name of torchvision.models.list_models(torchvision.models)"
        )
    network: nn.Module = torchvision.models.get_model(name, weights=None, num_classes=num_classes)
    if in_channels == 3:
        return network
    if in_channels == 1:
        return nn.Sequential(_GreyToRGB(), network)
    raise ValueError(f"{name} takes images of 1 or 3 channels, got in_channels={in_channels}; use 'small_cnn'")


def _small_cnn(in_channels: int, num_classes: int) -> nn.Sequential:
    """Three convolutions for images of about 8x8 pixels; any size works, for the last map is averaged."""
    return nn.Sequential(
        *_convolution(in_channels, 32),
        *_convolution(32, 64),
        nn.MaxPool2d(2),
        *_convolution(64, 128),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(128, num_classes),
    )


def _convolution(in_channels: int, out_channels: int) -> list[nn.Module]:
    return [
        nn.Conv2d(in_channels, out_channels, kernel_size=3, padding=1, bias=False),
        nn.BatchNorm2d(out_channels),
        nn.ReLU(inplace=True),
    ]


class _GreyToRGB(nn.Module):
    """Shows a grey image (N, 1, H, W) as (N, 3, H, W)."""

    def forward(self, images: Tensor) -> Tensor:
        return images.expand(-1, 3, -1, -1)
