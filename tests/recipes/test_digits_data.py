from __future__ import annotations

from typing import Any

import pytest
import torch
from digits_data import DigitsDataModule, split_digits
from sklearn.datasets import load_digits


def _labels() -> torch.Tensor:
    return torch.from_numpy(load_digits().target)


def _prepared(**arguments: Any) -> DigitsDataModule:
    data = DigitsDataModule(**arguments)
    data.setup("fit")
    return data


def test_every_image_is_in_exactly_one_part() -> None:
    split = split_digits(_labels(), seed=0)
    assert [len(part) for part in split] == [1197, 240, 360]
    assert torch.equal(torch.cat(split).sort().values, torch.arange(1797))


def test_every_part_has_its_share_of_every_class() -> None:
    labels = _labels()
    overall = torch.bincount(labels) / len(labels)
    for part in split_digits(labels, seed=0):
        counts = torch.bincount(labels[part], minlength=10)
        assert (counts - overall * len(part)).abs().max() < 1.5


def test_the_split_depends_on_its_seed_alone() -> None:
    labels = _labels()
    first = split_digits(labels, seed=3)
    torch.manual_seed(99)
    again, other = split_digits(labels, seed=3), split_digits(labels, seed=4)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_images_are_normalised_by_the_training_part() -> None:
    data = _prepared(augment=False)
    images = torch.stack([data.train_images[index][0] for index in range(len(data.train_images))])
    assert images.shape == (1197, 1, 8, 8)
    assert images.dtype == torch.float32
    assert images.mean().item() == pytest.approx(0.0, abs=1e-5)
    assert images.std().item() == pytest.approx(1.0, abs=1e-5)
    raw = torch.from_numpy(load_digits().images).float()
    known = raw[split_digits(_labels(), seed=0).train]
    first = split_digits(_labels(), seed=0).test[0]
    expected = (raw[first] - known.mean()) / known.std()
    torch.testing.assert_close(data.test_images[0][0][0], expected)


def test_only_training_images_are_augmented_each_on_its_own() -> None:
    data = _prepared()
    torch.manual_seed(0)
    assert not torch.equal(data.train_images[0][0], data.train_images[0][0])
    assert torch.equal(data.val_images[0][0], data.val_images[0][0])
    assert torch.equal(data.test_images[0][0], data.test_images[0][0])


def test_what_augmentation_brings_in_is_background() -> None:
    plain, augmented = _prepared(augment=False), _prepared()
    background = torch.stack([plain.train_images[index][0] for index in range(200)]).min().item()
    torch.manual_seed(0)
    assert min(augmented.train_images[index][0].min().item() for index in range(200)) >= background - 1e-6


def test_training_batches_are_full_and_evaluation_reads_every_image() -> None:
    data = _prepared(batch_size=50)
    assert [len(labels) for _, labels in data.train_dataloader()] == [50] * 23
    assert sum(len(labels) for _, labels in data.val_dataloader()) == 240
    assert sum(len(labels) for _, labels in data.test_dataloader()) == 360


def test_a_batch_that_no_rank_can_fill_is_an_error() -> None:
    data = _prepared(batch_size=1198)
    with pytest.raises(ValueError, match="batch_size is 1198, but a rank has only 1197 training images"):
        data.train_dataloader()
