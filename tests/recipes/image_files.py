"""Small data sets in the formats in which the real ones are published."""

from __future__ import annotations

import hashlib
import io
import pickle
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy
import pytest
from PIL import Image
from torchvision import datasets

__all__ = ["accept_written_files", "write_cifar", "write_digit", "write_mnist", "write_pictures"]


def _random(*shape: int, seed: int = 0) -> numpy.ndarray:
    return numpy.random.default_rng(seed).integers(0, 256, size=shape, dtype=numpy.uint8)


def write_mnist(root: Path, name: str = "MNIST", train: int = 24, test: int = 8) -> None:
    """IDX files: a header of big-endian numbers, then bytes."""
    folder = root / name / "raw"
    folder.mkdir(parents=True)
    for part, count in (("train", train), ("t10k", test)):
        images = _random(count, 28, 28)
        header = struct.pack(">IIII", 0x00000803, count, 28, 28)
        (folder / f"{part}-images-idx3-ubyte").write_bytes(header + images.tobytes())
        labels = numpy.arange(count, dtype=numpy.uint8) % 10
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 0x00000801, count) + labels.tobytes())


def write_cifar(root: Path, classes: int = 10, per_file: int = 8) -> None:
    """Pickles of dicts, as Python 2 wrote them: rows of 3072 bytes, channel by channel."""
    dataset = datasets.CIFAR10 if classes == 10 else datasets.CIFAR100
    key = b"labels" if classes == 10 else b"fine_labels"
    folder = root / dataset.base_folder
    folder.mkdir(parents=True)
    for number, (name, _) in enumerate([*dataset.train_list, *dataset.test_list]):
        count = per_file if classes == 10 else 4 * per_file
        labels = [(number + index) % classes for index in range(count)]
        rows = {b"data": _random(count, 3072, seed=number), key: labels}
        (folder / name).write_bytes(_pickled_by_python_2(rows))
    names = {dataset.meta["key"].encode(): [f"class{index}".encode() for index in range(classes)]}
    (folder / dataset.meta["filename"]).write_bytes(_pickled_by_python_2(names))


class _Python2Pickler(pickle._Pickler):
    """Writes bytes as Python 2 wrote its strings, of which the published files consist, those in arrays too."""

    dispatch: ClassVar[dict[type, Any]] = dict(pickle._Pickler.dispatch)

    def _save_string(self, value: bytes) -> None:
        self.write(pickle.BINSTRING + struct.pack("<i", len(value)) + value)  # type: ignore[attr-defined]
        self.memoize(value)  # type: ignore[attr-defined]

    dispatch[bytes] = _save_string


def _pickled_by_python_2(value: object) -> bytes:
    file = io.BytesIO()
    _Python2Pickler(file, protocol=2).dump(value)
    return file.getvalue()


def accept_written_files(root: Path, patch: pytest.MonkeyPatch) -> None:
    """Let the MD5 sums of the files that :func:`write_cifar` wrote be those that torchvision expects."""
    for dataset in (datasets.CIFAR10, datasets.CIFAR100):
        folder = root / dataset.base_folder
        for attribute in ("train_list", "test_list"):
            listed = [[name, _md5(folder / name)] for name, _ in getattr(dataset, attribute)]
            patch.setattr(dataset, attribute, listed)
        patch.setattr(dataset, "meta", dataset.meta | {"md5": _md5(folder / dataset.meta["filename"])})


def _md5(path: Path) -> str | None:
    return hashlib.md5(path.read_bytes()).hexdigest() if path.is_file() else None


def write_pictures(
    root: Path,
    parts: Sequence[str] = ("train", "val"),
    classes: Sequence[str] = ("cat", "dog"),
    per_class: int = 8,
    size: int = 40,
) -> None:
    """Folders of PNG and JPEG files in turn, in RGB and grey, each class with a colour of its own."""
    for part in parts:
        for number, name in enumerate(classes):
            folder = root / part / name
            folder.mkdir(parents=True)
            for index in range(per_class):
                pixels = _random(size, size + 8, 3, seed=index) // 4
                pixels[..., number % 3] += 160
                picture = Image.fromarray(pixels)
                if index % 4 == 3:
                    picture = picture.convert("L")
                picture.save(folder / f"{index}.{('png', 'JPEG')[index % 2]}")


def write_digit(path: Path, scan: numpy.ndarray) -> None:
    """One of scikit-learn's scans, 8x8 with values up to 16, as a picture."""
    Image.fromarray((scan * 255 / 16).round().astype(numpy.uint8)).save(path)
