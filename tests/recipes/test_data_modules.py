"""Data sets in their real formats, and what is said when a file is missing or broken."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.error import URLError

import pytest
import torch
from image_data import ImageDataModule, split_off
from image_folder_data import ImageFolderDataModule
from synthetic_data import SyntheticDataModule
from torchvision import datasets
from torchvision_data import CIFAR10DataModule, CIFAR100DataModule, FashionMNISTDataModule, MNISTDataModule

from tests.recipes.image_files import accept_written_files, write_cifar, write_mnist, write_pictures

Write = Callable[[Path], None]


def _prepared(data: ImageDataModule) -> ImageDataModule:
    data.check_files()
    data.prepare_data()
    data.setup("fit")
    return data


def _shapes(data: ImageDataModule) -> list[tuple[int, ...]]:
    loaders = [data.train_dataloader(), data.val_dataloader(), data.test_dataloader()]
    return [tuple(next(iter(loader))[0].shape) for loader in loaders]


@pytest.mark.parametrize(("module", "name"), [(MNISTDataModule, "MNIST"), (FashionMNISTDataModule, "FashionMNIST")])
def test_idx_files(module: Any, name: str, tmp_path: Path) -> None:
    write_mnist(tmp_path, name, train=24, test=8)
    data = _prepared(module(str(tmp_path), batch_size=4, val_images=6, num_workers=0))
    assert _shapes(data) == [(4, 1, 28, 28)] * 3
    assert [len(part) for part in (data.train_images, data.val_images, data.test_images)] == [18, 6, 8]
    assert data.image_format.num_classes == 10
    raw = datasets.MNIST(tmp_path, train=False) if name == "MNIST" else datasets.FashionMNIST(tmp_path, train=False)
    image, label = data.test_images[3]
    expected = (raw.data[3].float() / 255 - data.image_format.mean[0]) / data.image_format.std[0]
    torch.testing.assert_close(image[0], expected)
    assert label == 3


@pytest.mark.parametrize(("module", "classes"), [(CIFAR10DataModule, 10), (CIFAR100DataModule, 100)])
def test_cifar_pickles(module: Any, classes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_cifar(tmp_path, classes)
    accept_written_files(tmp_path, monkeypatch)
    data = _prepared(module(str(tmp_path), batch_size=4, val_images=8, rand_augment=9, num_workers=0))
    assert _shapes(data) == [(4, 3, 32, 32)] * 3
    assert data.image_format.classes[:2] == ("class0", "class1")
    dataset = data.dataset(tmp_path, train=False)  # type: ignore[attr-defined]
    image, label = data.test_images[5]
    pixels = torch.from_numpy(dataset.data[5]).permute(2, 0, 1).float() / 255
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (data.image_format.mean, data.image_format.std))
    torch.testing.assert_close(image, (pixels - mean) / std)
    assert label == dataset.targets[5]


def test_only_training_images_are_augmented(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    data = _prepared(MNISTDataModule(str(tmp_path), val_images=6, num_workers=0))
    torch.manual_seed(0)
    assert not torch.equal(data.train_images[0][0], data.train_images[0][0])
    assert torch.equal(data.val_images[0][0], data.val_images[0][0])
    plain = _prepared(MNISTDataModule(str(tmp_path), val_images=6, num_workers=0, augment=False))
    assert torch.equal(plain.train_images[0][0], plain.train_images[0][0])


@pytest.mark.parametrize(
    ("write", "data", "lost"),
    [
        (write_mnist, MNISTDataModule, "MNIST/raw/t10k-labels-idx1-ubyte"),
        (write_cifar, CIFAR10DataModule, "cifar-10-batches-py/data_batch_3"),
        (lambda root: write_cifar(root, 100), CIFAR100DataModule, "cifar-100-python/meta"),
    ],
)
def test_a_missing_file_is_named_with_where_and_how(
    write: Write, data: Any, lost: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path)
    if data is not MNISTDataModule:
        accept_written_files(tmp_path, monkeypatch)
    (tmp_path / lost).unlink()
    with pytest.raises(FileNotFoundError) as missing:
        data(str(tmp_path)).check_files()
    message = str(missing.value)
    assert f": {lost} not found in {tmp_path}." in message
    assert "--data.init_args.root" in message
    assert "--data.init_args.download true to download about 1" in message


def test_a_damaged_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_cifar(tmp_path)
    accept_written_files(tmp_path, monkeypatch)
    damaged = tmp_path / "cifar-10-batches-py" / "data_batch_2"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"data_batch_2 is not the file that the authors of CIFAR-10 published"):
        CIFAR10DataModule(str(tmp_path)).check_files()


def test_without_a_network_the_files_to_bring_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_network(*_: object, **__: object) -> None:
        raise URLError("Name or service not known")

    monkeypatch.setattr("torchvision.datasets.mnist.download_and_extract_archive", no_network)
    data = MNISTDataModule(str(tmp_path), download=True)
    data.check_files()  # they may be missing
    with pytest.raises(
        ConnectionError, match=r"MNIST could not be downloaded into .*MNIST/raw/train-images-idx3-ubyte"
    ):
        data.prepare_data()


def test_pictures_in_folders(tmp_path: Path) -> None:
    write_pictures(tmp_path, classes=("cat", "dog", "fox"))
    options: dict[str, Any] = {"rand_augment": 9, "random_erasing": 0.5, "num_workers": 0}
    data = _prepared(ImageFolderDataModule(str(tmp_path), batch_size=4, image_size=32, **options))
    assert _shapes(data) == [(4, 3, 32, 32)] * 3
    assert data.image_format.classes == ("cat", "dog", "fox")
    labels = torch.cat([labels for _, labels in data.test_dataloader()])
    assert labels.tolist() == [0] * 8 + [1] * 8 + [2] * 8


def test_a_test_folder_is_used_if_there_is_one(tmp_path: Path) -> None:
    write_pictures(tmp_path, parts=("train", "val"))
    write_pictures(tmp_path, parts=("test",), per_class=3)
    data = _prepared(ImageFolderDataModule(str(tmp_path), image_size=32, num_workers=0))
    assert [len(part) for part in (data.val_images, data.test_images)] == [16, 6]


def test_folders_that_are_missing_are_named(tmp_path: Path) -> None:
    with pytest.raises(
        FileNotFoundError, match=rf"no folder train and no folder val in {tmp_path}\. .*data\.init_args"
    ):
        ImageFolderDataModule(str(tmp_path)).check_files()


def test_parts_with_other_classes_are_refused(tmp_path: Path) -> None:
    write_pictures(tmp_path, parts=("train",), classes=("cat", "dog"))
    write_pictures(tmp_path, parts=("val",), classes=("cat", "fox"))
    with pytest.raises(ValueError, match="only one of them has dog, fox"):
        ImageFolderDataModule(str(tmp_path)).check_files()


@pytest.mark.parametrize(("keep", "workers"), [(0, 0), (100, 0), pytest.param(100, 1, marks=pytest.mark.slow)])
def test_a_corrupt_picture_is_named(keep: int, workers: int, tmp_path: Path) -> None:
    write_pictures(tmp_path, per_class=4)
    corrupt = tmp_path / "val" / "dog" / "2.png"
    corrupt.write_bytes(corrupt.read_bytes()[:keep])
    data = _prepared(ImageFolderDataModule(str(tmp_path), batch_size=4, image_size=32, num_workers=workers))
    assert f"{corrupt} is no picture that can be read" in _error_of(data)


def _error_of(data: ImageDataModule) -> str:
    """Of the validation; without its traceback, which would keep the processes that load alive."""
    try:
        list(data.val_dataloader())
    except OSError as error:
        return str(error)
    finally:
        gc.collect()
    return ""


def test_made_up_images_are_the_same_at_every_read_and_differ_by_class() -> None:
    options: dict[str, Any] = {"num_classes": 3, "channels": 1, "image_size": 16, "images": 30, "batch_size": 5}
    first, again = (_prepared(SyntheticDataModule(**options)) for _ in range(2))
    assert _shapes(first) == [(5, 1, 16, 16)] * 3
    assert torch.equal(first.train_images[7][0], again.train_images[7][0])
    by_class = [torch.stack([first.train_images[i][0] for i in range(c, 30, 3)]).mean(0) for c in range(3)]
    assert (by_class[0] - by_class[1]).abs().mean() > 0.5
    parts = [first.train_images, first.val_images, first.test_images]
    assert len({part[0][0].sum().item() for part in parts}) == 3


@pytest.mark.parametrize("mix", ["mixup_alpha", "cutmix_alpha"])
def test_only_training_images_are_mixed(mix: str) -> None:
    alpha: dict[str, Any] = {mix: 1.0}
    data = _prepared(SyntheticDataModule(batch_size=8, num_classes=4, images=32, **alpha))
    torch.manual_seed(0)
    images, labels = next(iter(data.train_dataloader()))
    assert images.shape == (8, 3, 32, 32)
    assert labels.shape == (8, 4)
    torch.testing.assert_close(labels.sum(dim=1), torch.ones(8))
    assert labels.count_nonzero() > 8
    assert next(iter(data.val_dataloader()))[1].shape == (8,)


def test_images_held_back_are_no_training_images() -> None:
    train, val = split_off(20, 5, seed=1)
    assert sorted(train + val) == list(range(20))
    assert len(val) == 5
    assert split_off(20, 5, seed=1) == (train, val) != split_off(20, 5, seed=2)
    with pytest.raises(ValueError, match="val_images is 20, but must be at least 1 and below the 20 images"):
        split_off(20, 20, seed=0)


@pytest.mark.parametrize("argument", [{"batch_size": 0}, {"mixup_alpha": -1.0}, {"cutmix_alpha": -0.1}])
def test_a_wrong_argument_is_named(argument: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(argument))):
        SyntheticDataModule(**argument)
