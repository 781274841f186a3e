"""MNIST, FashionMNIST, CIFAR-10 and CIFAR-100, read by torchvision from the files their authors publish."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

from image_data import ImageDataModule, TransformedImages, split_off
from image_format import ImageFormat
from torchvision import datasets
from torchvision.datasets.utils import check_integrity
from torchvision.transforms import v2

__all__ = ["CIFAR10DataModule", "CIFAR100DataModule", "FashionMNISTDataModule", "MNISTDataModule"]


class _PublishedImages(ImageDataModule):
    """A data set of torchvision that consists of training and test images.

    Args:
        root: folder with the files, or where to put them.
        download: get what is missing, once per host. Nothing is downloaded without it.
        batch_size: images per rank and step; in a pipeline, of all its stages together.
        val_images: how many of the training images are held back for validation.
        split_seed: decides which ones; apart from the seed of the run.
        augment: change the training images at random.
        rand_augment: magnitude of RandAugment's two operations per training image, up to 30; 0 is none.
        num_workers: processes per rank that load.
        mixup_alpha: of MixUp's beta distribution; 0 is none.
        cutmix_alpha: of CutMix's; 0 is none.
    """

    title: ClassVar[str]
    megabytes: ClassVar[int]  # to download
    dataset: ClassVar[Any]
    channels: ClassVar[int]
    size: ClassVar[int]
    # Of the published training images.
    mean: ClassVar[tuple[float, ...]]
    std: ClassVar[tuple[float, ...]]

    def __init__(
        self,
        root: str = "data",
        download: bool = False,
        batch_size: int = 128,
        val_images: int = 5000,
        split_seed: int = 0,
        augment: bool = True,
        rand_augment: int = 0,
        num_workers: int = 2,
        mixup_alpha: float = 0.0,
        cutmix_alpha: float = 0.0,
    ) -> None:
        super().__init__(batch_size, num_workers, mixup_alpha, cutmix_alpha)
        self.root = Path(root)
        self.download = download
        self.val_images_count = val_images
        self.split_seed = split_seed
        self.augment = augment
        self.rand_augment = rand_augment

    @abstractmethod
    def published_files(self) -> Iterator[tuple[Path, str | None]]:
        """The files that must be there, and their MD5 sums where torchvision compares them."""

    @abstractmethod
    def augmentation(self) -> list[Callable[[Any], Any]]:
        """What happens to the training images at random."""

    def check_files(self) -> None:
        """Look for every file, unless they may be downloaded.

        Raises:
            FileNotFoundError: files are missing.
            ValueError: a file is there, but is not the published one.
        """
        if not self.download:
            self._check()

    def prepare_data(self) -> None:
        """Download what is missing, if that was asked for.

        Raises:
            ConnectionError: it could not be downloaded.
        """
        if not self.download:
            return
        try:
            self.dataset(self.root, download=True)
        except (OSError, RuntimeError) as error:
            reason = " ".join(str(error).split())
            raise ConnectionError(
                f"{self.title} could not be downloaded into {self.root.resolve()}: {reason}. Where there is no "
                f"network, bring the files from elsewhere: {self._names()}."
            ) from error

    def setup(self, stage: str) -> None:
        """Read the files and hold validation images back."""
        self._check()
        known, unknown = (self.dataset(self.root, train=train) for train in (True, False))
        self.image_format = ImageFormat(tuple(known.classes), self.channels, self.size, self.mean, self.std)
        train, val = split_off(len(known), self.val_images_count, self.split_seed)
        changes = self.augmentation() if self.augment else []
        if self.rand_augment:
            changes.append(v2.RandAugment(magnitude=self.rand_augment))
        plain = self.image_format.prepare_after()
        self.train_images = TransformedImages(known, self.image_format.prepare_after(*changes), train)
        self.val_images = TransformedImages(known, plain, val)
        self.test_images = TransformedImages(unknown, plain)

    def _names(self) -> str:
        return ", ".join(str(path.relative_to(self.root)) for path, _ in self.published_files())

    def _check(self) -> None:
        missing = [path for path, _ in self.published_files() if not path.is_file()]
        if missing:
            raise FileNotFoundError(
                f"{self.title} is not complete: {', '.join(str(path.relative_to(self.root)) for path in missing)} not "
                f"found in {self.root.resolve()}. Name the folder that has them with --data.init_args.root, or add "
                f"--data.init_args.download true to download about {self.megabytes} MB into it."
            )
        for path, md5 in self.published_files():
            if not check_integrity(str(path), md5):
                raise ValueError(
                    f"{path.resolve()} is not the file that the authors of {self.title} published: its MD5 sum is not "
                    f"{md5}. Delete it and get it again, e.g. with --data.init_args.download true."
                )


class MNISTDataModule(_PublishedImages):
    """Handwritten digits: 60,000 images for training and 10,000 for test, grey, 28x28 pixels."""

    title = "MNIST"
    megabytes = 12
    dataset = datasets.MNIST
    channels, size = 1, 28
    mean, std = (0.1307,), (0.3081,)

    def published_files(self) -> Iterator[tuple[Path, str | None]]:
        """Images and labels in IDX format, unpacked."""
        for name, _ in self.dataset.resources:
            yield self.root / self.dataset.__name__ / "raw" / name.removesuffix(".gz"), None

    def augmentation(self) -> list[Callable[[Any], Any]]:
        """Turned, shifted and scaled a little."""
        return [v2.RandomAffine(degrees=10, translate=(0.1, 0.1), scale=(0.9, 1.1))]


class FashionMNISTDataModule(MNISTDataModule):
    """Pieces of clothing in the format of MNIST."""

    title = "FashionMNIST"
    megabytes = 31
    dataset = datasets.FashionMNIST
    mean, std = (0.2860,), (0.3530,)

    def augmentation(self) -> list[Callable[[Any], Any]]:
        """Shifted and mirrored."""
        return [v2.RandomCrop(28, padding=2), v2.RandomHorizontalFlip()]


class CIFAR10DataModule(_PublishedImages):
    """50,000 images for training and 10,000 for test, RGB, 32x32 pixels, of 10 classes."""

    title = "CIFAR-10"
    megabytes = 170
    dataset = datasets.CIFAR10
    channels, size = 3, 32
    mean, std = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)

    def published_files(self) -> Iterator[tuple[Path, str | None]]:
        """The pickles of the Python version, unpacked."""
        folder = self.root / self.dataset.base_folder
        for name, md5 in [*self.dataset.train_list, *self.dataset.test_list]:
            yield folder / name, md5
        yield folder / self.dataset.meta["filename"], self.dataset.meta["md5"]

    def augmentation(self) -> list[Callable[[Any], Any]]:
        """Shifted by up to 4 pixels and mirrored."""
        return [v2.RandomCrop(32, padding=4), v2.RandomHorizontalFlip()]


class CIFAR100DataModule(CIFAR10DataModule):
    """The same of 100 classes."""

    title = "CIFAR-100"
    megabytes = 169
    dataset = datasets.CIFAR100
    mean, std = (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)
