"""Image classification networks by name: one small bundled network, and those of torchvision."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

import torchvision
from torch import Tensor, nn

__all__ = ["build_network", "find_head"]

# Heads in the middle of the network that help to train it from scratch. Their outputs are no logits of the network.
_NO_AUXILIARY_HEADS = {
    "googlenet": {"aux_logits": False, "init_weights": True},
    "inception_v3": {"aux_logits": False, "init_weights": True},
}


def build_network(
    name: str,
    in_channels: int,
    num_classes: int,
    small_images: bool = False,
    arguments: Mapping[str, Any] | None = None,
) -> nn.Module:
    """A freshly initialised network that maps images (N, in_channels, H, W) to logits (N, num_classes).

    Args:
        name: ``"small_cnn"``, or the name of a torchvision classifier, e.g. ``"resnet18"``.
        in_channels: channels of the images. torchvision's networks want 3; grey images are repeated for them.
        num_classes: number of logits.
        small_images: for images of about 32x32 pixels: the first convolution of a torchvision network becomes 3x3 with
            stride 1, and a pooling right behind it is left out.
        arguments: more arguments of torchvision's builder, e.g. ``{"dropout": 0.3}``.

    Raises:
        ValueError: no network has that name, or it cannot be built like that.
    """
    if name == "small_cnn":
        if arguments:
            raise ValueError(f"small_cnn takes no arguments, got {dict(arguments)}")
        return _small_cnn(in_channels, num_classes)
    known = torchvision.models.list_models(module=torchvision.models)
    if name not in known:
        close = difflib.get_close_matches(name, known)
        hint = f"; did you mean {' or '.join(close)}?" if close else ""
        raise ValueError(
            f"unknown network {name!r}: use 'small_cnn' or a name of "
            f"torchvision.models.list_models(torchvision.models){hint}"
        )
    if in_channels not in (1, 3):
        raise ValueError(f"{name} takes images of 1 or 3 channels, got in_channels={in_channels}; use 'small_cnn'")
    given = {**_NO_AUXILIARY_HEADS.get(name, {}), **(arguments or {})}
    try:
        network: nn.Module = torchvision.models.get_model(name, weights=None, num_classes=num_classes, **given)
    except TypeError as error:
        raise ValueError(f"{name} cannot be built with {given}: {error}") from error
    if small_images:
        _fit_to_small_images(name, network)
    return network if in_channels == 3 else nn.Sequential(_GreyToRGB(), network)


def find_head(network: nn.Module, num_classes: int) -> str:
    """Name of the layer that makes the logits: the last one with that many outputs.

    Raises:
        ValueError: there is none.
    """
    found = [
        name
        for name, module in network.named_modules()
        if (isinstance(module, nn.Linear) and module.out_features == num_classes)
        or (isinstance(module, nn.Conv2d) and module.out_channels == num_classes)
    ]
    if not found:
        raise ValueError(f"{type(network).__name__} has no linear layer or convolution with {num_classes} outputs")
    return str(found[-1])


def _fit_to_small_images(name: str, network: nn.Module) -> None:
    """Keep the resolution of the images up to the first block, as is usual for CIFAR."""
    layers = [
        (path, module)
        for path, module in network.named_modules()
        if isinstance(module, (nn.Conv2d, nn.MaxPool2d, nn.Linear))
    ]
    path, first = layers[0]
    if not isinstance(first, nn.Conv2d) or first.kernel_size == first.stride:
        raise ValueError(f"{name} cuts images into patches, small_images is for networks that begin with a convolution")
    stem = nn.Conv2d(first.in_channels, first.out_channels, 3, padding=1, bias=first.bias is not None)
    nn.init.kaiming_normal_(stem.weight, mode="fan_out", nonlinearity="relu")  # as torchvision's networks
    network.set_submodule(path, stem)
    path, second = layers[1]
    if isinstance(second, nn.MaxPool2d):
        network.set_submodule(path, nn.Identity())


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
