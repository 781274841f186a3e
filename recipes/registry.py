"""Which recipes there are. Imports nothing heavy: ``ringstrategy recipes`` reads only this."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["RECIPES", "Recipe", "find_recipe"]


@dataclass(frozen=True)
class Recipe:
    """One training run that ``ringstrategy run NAME`` starts.

    Attributes:
        name: what it is called on the command line.
        summary: what it trains, in one line.
        data: where its images come from.
        ranks: number of processes its config asks for.
        measured: test accuracy and time of a run that somebody has made, and where; None if nobody has.
    """

    name: str
    summary: str
    data: str
    ranks: int
    measured: str | None = None

    @property
    def config(self) -> Path:
        """The YAML file with every setting of the run."""
        return Path(__file__).resolve().parent / "configs" / f"{self.name}.yaml"


_DIGITS = "1797 scans of 8x8 pixels, shipped with scikit-learn"
_CIFAR10 = "CIFAR-10: 170 MB, --data.init_args.download true"
_PICTURES = "pictures in ImageNet's layout, --data.init_args.root"

RECIPES = (
    Recipe(
        "digits",
        "a small convolutional classifier of handwritten digits, data parallel with ring_ddp",
        _DIGITS,
        ranks=2,
        measured="0.99 in 20 s on 2 CPU cores",
    ),
    Recipe(
        "digits_gpipe",
        "the same classifier cut into two stages, with the gpipe schedule",
        _DIGITS,
        ranks=2,
        measured="0.98 to 1.00 in 24 s on 2 CPU cores",
    ),
    Recipe(
        "digits_1f1b",
        "the same classifier cut into two stages, with the 1f1b schedule",
        _DIGITS,
        ranks=2,
        measured="0.99 to 1.00 in 26 s on 2 CPU cores",
    ),
    Recipe("cifar10_resnet18", "a ResNet-18 for small images, with ring_ddp", _CIFAR10, ranks=2),
    Recipe(
        "cifar10_resnet18_bf16_compressed",
        "the same in bf16-mixed, with ring_ddp and gradients that travel between hosts in bf16",
        _CIFAR10,
        ranks=2,
    ),
    Recipe(
        "cifar100_wideresnet",
        "a Wide ResNet-50-2 for small images, with ring_ddp, CutMix and averaged weights",
        "CIFAR-100: 169 MB, --data.init_args.download true",
        ranks=2,
    ),
    Recipe(
        "imagefolder_resnet50", "a ResNet-50 with ring_ddp, on one host or several with torchrun", _PICTURES, ranks=4
    ),
    Recipe(
        "imagefolder_vit_b16_gpipe",
        "a ViT-B/16 in two stages x two replicas, with the gpipe schedule",
        _PICTURES,
        ranks=4,
    ),
    Recipe(
        "finetune_efficientnet",
        "an EfficientNet-B0 from weights in a file, with ring_ddp: first its last layer, then all",
        _PICTURES,
        ranks=2,
    ),
)


def find_recipe(name: str) -> Recipe:
    """The recipe of that name.

    Raises:
        KeyError: there is none; the message lists those that exist.
    """
    for recipe in RECIPES:
        if recipe.name == name:
            return recipe
    raise KeyError(f"unknown recipe {name!r}; there is: {', '.join(recipe.name for recipe in RECIPES)}")
