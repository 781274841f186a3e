"""Configs run on ranks that exist already, which costs a fraction of the real command."""

from __future__ import annotations

import gc
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.recipes.image_files import accept_written_files, write_cifar, write_mnist, write_pictures

__all__ = ["LIBRARIES", "SMALL", "TINY", "TWO_STEPS", "RecipeRun", "run_recipes", "write_data"]

TWO_STEPS = ("--trainer.max_epochs=1", *(f"--trainer.limit_{stage}_batches=2" for stage in ("train", "val", "test")))
_FOUR_IMAGES = ("--data.init_args.batch_size=4", "--data.init_args.num_workers=0")
_PUBLISHED = ("--data.init_args.root=data", "--data.init_args.val_images=8", *_FOUR_IMAGES)
_PICTURES = (
    "--data.init_args.root=data/pictures",
    "--data.init_args.image_size=32",
    "--model.num_classes=2",
    *_FOUR_IMAGES,
)
# Few and small images for each config; the networks are those of the config.
TINY: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("digits", "digits_gpipe", "digits_1f1b"), ()),
    **dict.fromkeys(("cifar10_resnet18", "cifar10_resnet18_bf16_compressed", "cifar100_wideresnet"), _PUBLISHED),
    "imagefolder_resnet50": _PICTURES,
    "imagefolder_vit_b16_gpipe": (*_PICTURES, '--model.network_args={"image_size": 32}'),
    "finetune_efficientnet": (*_PICTURES, "--model.weights=data/weights.pth"),
}
# Networks that start and step faster than those of the configs, which the long tests run.
SMALL = {
    "imagefolder_vit_b16_gpipe": ("--model.network=squeezenet1_1", "--model.network_args=null"),
    "finetune_efficientnet": (
        *("--model.network=shufflenet_v2_x0_5", "--trainer.max_epochs=3"),  # thaws in the third epoch
        "--trainer.log_every_n_steps=1",
    ),
    **dict.fromkeys(
        ("cifar10_resnet18", "cifar10_resnet18_bf16_compressed", "cifar100_wideresnet", "imagefolder_resnet50"),
        ("--model.network=shufflenet_v2_x0_5",),
    ),
}
# What a script of the recipes may import.
LIBRARIES = {"PIL", "lightning", "matplotlib", "rich", "ringstrategy"}
LIBRARIES |= {"sklearn", "torch", "torchmetrics", "torchvision"}


def write_data(folder: Path, network: str) -> None:
    """All that the configs read: ``data/`` with files of every format, and weights of a network for 1000 classes."""
    from networks import build_network

    write_mnist(folder / "data")
    for classes in (10, 100):
        write_cifar(folder / "data", classes)
    write_pictures(folder / "data" / "pictures", per_class=16)
    torch.save(build_network(network, 3, num_classes=1000).state_dict(), folder / "data" / "weights.pth")


@dataclass(frozen=True)
class RecipeRun:
    """What ``ringstrategy run`` is given, besides :data:`TWO_STEPS` and the number of ranks."""

    name: str
    arguments: tuple[str, ...]


def run_recipes(rank: int, world_size: int, folder: Path, runs: Sequence[RecipeRun]) -> None:
    """On each of the ranks of :func:`tests.helpers.ranks.run_ranks`: run one recipe after the other.

    Args:
        rank: this rank.
        world_size: number of ranks.
        folder: where :func:`write_data` has written, and the runs write.
        runs: what to run.
    """
    from ringstrategy.cli.recipes import add_recipes_to_path

    add_recipes_to_path()
    from registry import find_recipe
    from train import main

    os.chdir(folder)
    launched: dict[str, Any] = {
        "TORCHELASTIC_RUN_ID": "test",
        **{"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size},
        **{"MASTER_ADDR": "the ranks have met already", "MASTER_PORT": 0},
    }
    everywhere = ("--trainer.accelerator=cpu", f"--trainer.devices={world_size}", *TWO_STEPS)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in launched.items():
            patch.setenv(name, str(value))
        accept_written_files(folder / "data", patch)
        for run in runs:
            print(f"running {run.name} {' '.join(run.arguments)}", flush=True)
            main([*everywhere, *run.arguments], config=find_recipe(run.name).config)
            gc.collect()
