"""What the data of all recipes have in common: three parts, their loaders, and images mixed with each other."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch
from image_format import ImageFormat
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate
from torchvision.transforms import v2

__all__ = ["Example", "ImageDataModule", "ImageSet", "TransformedImages", "split_off"]

T = TypeVar("T")
Example = tuple[Tensor, Any]  # an image and its label


class ImageSet(Dataset[Example]):
    """Images of which the number is known."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, index: int) -> Example: ...


class TransformedImages(ImageSet):
    """Some of the images of a data set, transformed one by one so that each gets its own augmentation.

    Args:
        images: pairs of a picture and its label.
        transform: from a picture to a tensor.
        chosen: which ones; all by default.
    """

    def __init__(
        self,
        images: Dataset[tuple[T, Any]],
        transform: Callable[[T], Tensor],
        chosen: Sequence[int] | None = None,
    ) -> None:
        self.images = images
        self.transform = transform
        self.chosen = range(len(images)) if chosen is None else chosen  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, index: int) -> Example:
        image, label = self.images[self.chosen[index]]
        return self.transform(image), label


def split_off(count: int, part: int, seed: int) -> tuple[list[int], list[int]]:
    """The positions of ``count`` images at random: all but ``part`` of them, and these.

    Raises:
        ValueError: nothing would be left of either.
    """
    if not 0 < part < count:
        raise ValueError(f"val_images is {part}, but must be at least 1 and below the {count} images there are")
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
    return order[part:], order[:part]


class ImageDataModule(pl.LightningDataModule):
    """Batches of images (N, C, H, W) in float32 and labels (N,) in int64.

    Where images are mixed, the labels of a training batch are probabilities (N, number of classes). They are mixed
    while the batch is put together, so that the stages of a pipeline get one and the same.

    Args:
        batch_size: images per rank and step; in a pipeline, of all its stages together, which read the same images.
        num_workers: processes per rank that load; 0 loads in the rank itself.
        mixup_alpha: of MixUp's beta distribution; 0 is none.
        cutmix_alpha: of CutMix's; 0 is none. With both, every batch gets one of them at random.

    Raises:
        ValueError: an argument is outside its range.
    """

    image_format: ImageFormat  # of the images, once `setup` has run
    train_images: ImageSet
    val_images: ImageSet
    test_images: ImageSet

    def __init__(
        self, batch_size: int, num_workers: int = 0, mixup_alpha: float = 0.0, cutmix_alpha: float = 0.0
    ) -> None:
        super().__init__()
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        if mixup_alpha < 0.0 or cutmix_alpha < 0.0:
            raise ValueError(f"mixup_alpha and cutmix_alpha must not be negative, got {mixup_alpha} and {cutmix_alpha}")
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.mixup_alpha = mixup_alpha
        self.cutmix_alpha = cutmix_alpha

    def check_files(self) -> None:
        """Say what is missing before any rank is started; here nothing can be.

        Raises:
            FileNotFoundError: a file is missing. The message says which, where it was looked for, and how to get it.
        """

    @abstractmethod
    def setup(self, stage: str) -> None:
        """Make the three parts and the format of the images."""

    def train_dataloader(self) -> DataLoader[Example]:
        """Shuffled training batches, all of the full size.

        Raises:
            ValueError: a rank has fewer images than one batch.
        """
        sampler = self.trainer.distributed_sampler_kwargs if self.trainer else None
        images_per_rank = len(self.train_images) // (sampler["num_replicas"] if sampler else 1)
        if self.batch_size > images_per_rank:
            raise ValueError(f"batch_size is {self.batch_size}, but a rank has only {images_per_rank} training images")
        return self._loader(self.train_images, shuffle=True, drop_last=True, collate_fn=self._collate)

    def val_dataloader(self) -> DataLoader[Example]:
        """Validation batches in a fixed order."""
        return self._loader(self.val_images)

    def test_dataloader(self) -> DataLoader[Example]:
        """Test batches in a fixed order."""
        return self._loader(self.test_images)

    def predict_dataloader(self) -> DataLoader[Example]:
        """The test batches."""
        return self._loader(self.test_images)

    def _loader(self, images: ImageSet, **options: Any) -> DataLoader[Example]:
        return DataLoader(
            images,
            batch_size=self.batch_size,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
            pin_memory=torch.cuda.is_available(),
            **options,
        )

    def _collate(self, examples: list[Example]) -> Any:
        """A training batch; its images are mixed if that was asked for."""
        batch = default_collate(examples)
        count = self.image_format.num_classes
        mixes: list[Callable[..., Any]] = []
        if self.mixup_alpha:
            mixes.append(v2.MixUp(alpha=self.mixup_alpha, num_classes=count))
        if self.cutmix_alpha:
            mixes.append(v2.CutMix(alpha=self.cutmix_alpha, num_classes=count))
        return v2.RandomChoice(mixes)(*batch) if mixes else batch
