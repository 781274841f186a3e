"""scikit-learn's handwritten digits: 1797 real scans of 8x8 grey pixels that need no download."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from image_data import Example, ImageDataModule, ImageSet
from image_format import ImageFormat
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor
from torchvision.transforms import v2

__all__ = ["DigitsDataModule", "DigitsSplit", "split_digits"]

# A distributed sampler repeats images until they divide evenly among the ranks. 240 and 360 divide by 2, 3, 4, 5, 6, 8,
# 10 and 12, so that there each image is counted exactly once.
VALIDATION_IMAGES = 240
TEST_IMAGES = 360


class DigitsSplit(NamedTuple):
    """Positions in scikit-learn's array of digits; no position is in two parts, and every one is in some part."""

    train: Tensor
    val: Tensor
    test: Tensor


def split_digits(labels: Tensor, seed: int) -> DigitsSplit:
    """A random split in which every class has its share of each part.

    Args:
        labels: the classes, (1797,).
        seed: the same seed gives the same split.
    """
    rest, test = train_test_split(torch.arange(len(labels)), test_size=TEST_IMAGES, stratify=labels, random_state=seed)
    train, val = train_test_split(rest, test_size=VALIDATION_IMAGES, stratify=labels[rest], random_state=seed)
    return DigitsSplit(train, val, test)


class _Images(ImageSet):
    """Images held in memory, transformed one by one so that each gets its own augmentation."""

    def __init__(self, images: Tensor, labels: Tensor, transform: Callable[[Tensor], Tensor]) -> None:
        self.images = images
        self.labels = labels
        self.transform = transform

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Example:
        return self.transform(self.images[index]), self.labels[index]


class DigitsDataModule(ImageDataModule):
    """Batches of normalised images (N, 1, 8, 8) in float32 and labels (N,) in int64.

    Args:
        batch_size: images per rank and step; in a pipeline, of all its stages together.
        split_seed: decides which images are for training (1197), validation (240) and test (360). It is apart from the
            seed of the run, so that runs with different seeds are compared on the same test images.
        augment: turn, shift and scale the training images a little.
        num_workers: processes that load; 0 is the fastest here, for the images are in memory.
        mixup_alpha: of MixUp's beta distribution; 0 is none.
        cutmix_alpha: of CutMix's; 0 is none.
    """

    train_images: _Images
    val_images: _Images
    test_images: _Images

    def __init__(
        self,
        batch_size: int = 32,
        split_seed: int = 0,
        augment: bool = True,
        num_workers: int = 0,
        mixup_alpha: float = 0.0,
        cutmix_alpha: float = 0.0,
    ) -> None:
        super().__init__(batch_size, num_workers, mixup_alpha, cutmix_alpha)
        self.split_seed = split_seed
        self.augment = augment

    def setup(self, stage: str) -> None:
        """Load and split the images. Mean and deviation are those of the training images."""
        digits = load_digits()
        images = torch.from_numpy(digits.images).float().div(16.0).unsqueeze(1)
        labels = torch.from_numpy(digits.target).long()
        split = split_digits(labels, self.split_seed)

        known = images[split.train]
        mean, std = known.mean().item(), known.std().item()
        self.image_format = ImageFormat(
            tuple(str(name) for name in digits.target_names), channels=1, size=8, mean=(mean,), std=(std,)
        )
        plain = v2.Normalize(mean=[mean], std=[std])
        # One pixel is an eighth of the image. What is turned in from outside is paper, 0 before the normalisation.
        turned = v2.RandomAffine(
            degrees=10, translate=(0.1, 0.1), scale=(0.9, 1.1), interpolation=v2.InterpolationMode.BILINEAR, fill=0
        )
        augmented = v2.Compose([turned, plain]) if self.augment else plain

        self.train_images = _Images(known, labels[split.train], augmented)
        self.val_images = _Images(images[split.val], labels[split.val], plain)
        self.test_images = _Images(images[split.test], labels[split.test], plain)
