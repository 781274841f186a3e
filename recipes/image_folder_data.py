"""Pictures in folders, one folder per class: ImageNet's layout, or your own pictures."""

from __future__ import annotations

from pathlib import Path

from image_data import ImageDataModule, TransformedImages
from image_format import ImageFormat, read_image
from lightning.pytorch.utilities import rank_zero_info
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

__all__ = ["ImageFolderDataModule"]

_LAYOUT = "{root}/train/CLASS/PICTURE and {root}/val/CLASS/PICTURE, and for a test of its own {root}/test/CLASS/PICTURE"
# Of ImageNet's training images, which torchvision's weights expect.
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class ImageFolderDataModule(ImageDataModule):
    """Batches of RGB images (N, 3, image_size, image_size) from ``root/{train,val,test}/CLASS/``.

    Without a folder ``test`` the validation pictures are those of the test too, as is usual for ImageNet. The
    checkpoint was chosen on them then.

    A picture that cannot be read is an error that names its file.

    Args:
        root: folder with ``train`` and ``val``.
        batch_size: images per rank and step; in a pipeline, of all its stages together.
        image_size: height and width of the images in pixels.
        resize: what the shorter side is scaled to before the middle is cut out, for evaluation; None is 8/7 of
            ``image_size`` (256 for 224).
        smallest_crop: training images are cut out of the picture at random; the least share of its area.
        rand_augment: magnitude of RandAugment's two operations per training image, up to 30; 0 is none.
        random_erasing: share of the training images of which a rectangle is erased.
        num_workers: processes per rank that load.
        mixup_alpha: of MixUp's beta distribution; 0 is none.
        cutmix_alpha: of CutMix's; 0 is none.
    """

    def __init__(
        self,
        root: str = "data/images",
        batch_size: int = 64,
        image_size: int = 224,
        resize: int | None = None,
        smallest_crop: float = 0.08,
        rand_augment: int = 0,
        random_erasing: float = 0.0,
        num_workers: int = 4,
        mixup_alpha: float = 0.0,
        cutmix_alpha: float = 0.0,
    ) -> None:
        super().__init__(batch_size, num_workers, mixup_alpha, cutmix_alpha)
        self.root = Path(root)
        self.image_size = image_size
        self.resize = resize or image_size * 8 // 7
        self.smallest_crop = smallest_crop
        self.rand_augment = rand_augment
        self.random_erasing = random_erasing

    def check_files(self) -> None:
        """Look for the folders.

        Raises:
            FileNotFoundError: ``train`` or ``val`` is missing.
            ValueError: the parts have not the same classes.
        """
        missing = [part for part in ("train", "val") if not (self.root / part).is_dir()]
        if missing:
            raise FileNotFoundError(
                f"no folder {' and no folder '.join(missing)} in {self.root.resolve()}. Name the folder that has them "
                f"with --data.init_args.root. Expected is {_LAYOUT.format(root=self.root)}; ImageNet's archives must "
                "be asked for at its own site and sorted into such folders."
            )
        known = self._classes("train")
        for part in self._parts()[1:]:
            if difference := sorted(known ^ self._classes(part)):
                raise ValueError(
                    f"{self.root.resolve()}: train and {part} do not have the same classes; only one of them has "
                    f"{', '.join(difference[:5])}{' …' if len(difference) > 5 else ''}"
                )

    def setup(self, stage: str) -> None:
        """List the pictures."""
        self.check_files()
        parts = {part: ImageFolder(self.root / part, loader=read_image) for part in self._parts()}
        if "test" not in parts and stage == "fit":
            rank_zero_info(f"{self.root} has no folder test: the test is on the validation pictures")
        self.image_format = ImageFormat(
            tuple(parts["train"].classes), channels=3, size=self.image_size, mean=_MEAN, std=_STD, resize=self.resize
        )
        changes = [
            v2.RandomResizedCrop(self.image_size, scale=(self.smallest_crop, 1.0), antialias=True),
            v2.RandomHorizontalFlip(),
            *([v2.RandAugment(magnitude=self.rand_augment)] if self.rand_augment else []),
            *([v2.RandomErasing(self.random_erasing)] if self.random_erasing else []),
        ]
        plain = self.image_format.preparation
        self.train_images = TransformedImages(parts["train"], self.image_format.prepare_after(*changes))
        self.val_images = TransformedImages(parts["val"], plain)
        self.test_images = TransformedImages(parts.get("test", parts["val"]), plain)

    def _parts(self) -> list[str]:
        return ["train", "val", *(["test"] if (self.root / "test").is_dir() else [])]

    def _classes(self, part: str) -> set[str]:
        return {path.name for path in (self.root / part).iterdir() if path.is_dir()}
