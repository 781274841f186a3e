"""What a network expects of an image; kept in the checkpoint, so that a prediction prepares images the same way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import v2

__all__ = ["ImageFormat", "read_image"]


@dataclass(frozen=True)
class ImageFormat:
    """Size, channels and scale of the images of a data set, and the names of its classes.

    Attributes:
        classes: a name for each label, in their order.
        channels: 1 for grey, 3 for RGB.
        size: height and width in pixels.
        mean: of each channel of the training images, with pixels in [0, 1].
        std: their standard deviation.
        resize: what the shorter side is scaled to before the middle is cut out; None is ``size``.
    """

    classes: tuple[str, ...]
    channels: int
    size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    resize: int | None = None

    @property
    def num_classes(self) -> int:
        """Number of labels."""
        return len(self.classes)

    @property
    def preparation(self) -> Callable[[Image.Image], Tensor]:
        """From any picture to the normalised image (channels, size, size) in float32, without augmentation."""
        return self.prepare_after(
            v2.Resize(self.resize or self.size, antialias=True), v2.CenterCrop([self.size, self.size])
        )

    def prepare_after(self, *geometry: Callable[[Any], Any]) -> Callable[[Image.Image], Tensor]:
        """The same with other steps between the picture, as a uint8 tensor, and its normalisation."""
        colours = v2.RGB() if self.channels == 3 else v2.Grayscale(1)
        steps = [v2.ToImage(), colours, *geometry, v2.ToDtype(torch.float32, scale=True)]
        compose: Callable[[Image.Image], Tensor] = v2.Compose(
            [*steps, v2.Normalize(self.mean, self.std), v2.ToPureTensor()]
        )
        return compose

    def as_state(self) -> dict[str, Any]:
        """Plain values, for a checkpoint."""
        return asdict(self)

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> ImageFormat:
        """The format that :meth:`as_state` described."""
        values: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in state.items()
        }
        return cls(**values)


def read_image(path: str | Path) -> Image.Image:
    """The picture in a file: grey (mode ``L``) if it is, else RGB, without transparency.

    Raises:
        OSError: the file is missing or holds no picture that can be read; the message names it.
    """
    try:
        with Image.open(path) as image:
            if image.mode.startswith("I;16"):
                return image.point(lambda value: value / 256).convert("L")  # PIL would cut them off at 255
            return image.convert("L" if image.mode in ("1", "L", "LA", "I", "F") else "RGB")
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no picture {path}") from None
    except Exception as error:  # decoders raise OSError, SyntaxError, ValueError, struct.error …
        raise OSError(f"{path} is no picture that can be read ({error}); remove it or replace it") from error
