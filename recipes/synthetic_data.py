"""Made-up images of any size and number, to try a recipe without its data or to measure how fast it is."""

from __future__ import annotations

from functools import partial

import torch
from image_data import Example, ImageDataModule, ImageSet
from image_format import ImageFormat
from torch import Tensor

__all__ = ["SyntheticDataModule"]


class _Patterns(ImageSet):
    """Each class is a pattern of its own, each image its pattern under noise; the same at every read.

    Args:
        patterns: one per class, (classes, channels, size, size).
        count: number of images; classes take turns.
        seed: of the noise.
    """

    def __init__(self, patterns: Tensor, count: int, seed: int) -> None:
        self.patterns = patterns
        self.count = count
        self.seed = seed

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Example:
        if not 0 <= index < self.count:
            raise IndexError(f"there are {self.count} images, not {index + 1}")
        label = index % len(self.patterns)
        pattern = self.patterns[label]
        noise = torch.Generator().manual_seed(self.seed + index)
        return pattern + torch.randn(pattern.shape, generator=noise), label


class SyntheticDataModule(ImageDataModule):
    """Batches of images (N, channels, image_size, image_size) in float32 that a network can learn to tell apart.

    Args:
        batch_size: images per rank and step; in a pipeline, of all its stages together.
        num_classes: number of classes, called ``0``, ``1``, and so on.
        channels: 1 or 3.
        image_size: height and width of the images in pixels.
        images: number of training images; validation and test have an eighth each, at least one batch.
        seed: the same seed makes the same images.
        num_workers: processes per rank that make them.
        mixup_alpha: of MixUp's beta distribution; 0 is none.
        cutmix_alpha: of CutMix's; 0 is none.
    """

    def __init__(
        self,
        batch_size: int = 32,
        num_classes: int = 10,
        channels: int = 3,
        image_size: int = 32,
        images: int = 4096,
        seed: int = 0,
        num_workers: int = 0,
        mixup_alpha: float = 0.0,
        cutmix_alpha: float = 0.0,
    ) -> None:
        super().__init__(batch_size, num_workers, mixup_alpha, cutmix_alpha)
        self.num_classes = num_classes
        self.channels = channels
        self.image_size = image_size
        self.images = images
        self.seed = seed

    def setup(self, stage: str) -> None:
        """Draw the patterns."""
        names = tuple(str(number) for number in range(self.num_classes))
        flat = (0.0,) * self.channels, (1.0,) * self.channels
        self.image_format = ImageFormat(names, self.channels, self.image_size, *flat)
        # Coarse, so that they survive pooling.
        shape = self.num_classes, self.channels, 4, 4
        coarse = torch.randn(shape, generator=torch.Generator().manual_seed(self.seed))
        patterns = torch.nn.functional.interpolate(coarse, size=(self.image_size, self.image_size))
        make = partial(_Patterns, patterns)
        held_back = max(self.images // 8, self.batch_size)
        self.train_images = make(self.images, seed=self.seed)
        self.val_images = make(held_back, seed=self.seed + self.images)
        self.test_images = make(held_back, seed=self.seed + self.images + held_back)
