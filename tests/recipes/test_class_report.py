from __future__ import annotations

import csv
from pathlib import Path

import lightning.pytorch as pl
import torch
from class_report import ClassReport, draw_confusion, write_classes, write_confusion
from image_classifier import ImageClassifier
from lightning.pytorch.loggers import TensorBoardLogger
from synthetic_data import SyntheticDataModule
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

COUNTS = torch.tensor([[3, 1, 0], [0, 2, 0], [0, 0, 0]])
NAMES = ("cat", "dog", "fox")


def _rows(path: Path) -> list[list[str]]:
    with path.open() as file:
        return list(csv.reader(file))


def test_tables(tmp_path: Path) -> None:
    write_confusion(COUNTS, NAMES, tmp_path / "confusion.csv")
    assert _rows(tmp_path / "confusion.csv") == [
        ["", *NAMES],
        ["cat", "3", "1", "0"],
        ["dog", "0", "2", "0"],
        ["fox", "0", "0", "0"],
    ]
    write_classes(COUNTS, NAMES, tmp_path / "classes.csv")
    expected = [["class", "images", "accuracy"], ["cat", "4", "0.7500"], ["dog", "2", "1.0000"], ["fox", "0", ""]]
    assert _rows(tmp_path / "classes.csv") == expected


def test_the_picture_has_shares_and_names_where_there_is_room() -> None:
    (axes, _) = draw_confusion(COUNTS, NAMES).axes
    assert [text.get_text() for text in axes.texts] == ["75", "25", "100"]
    assert [label.get_text() for label in axes.get_yticklabels()] == list(NAMES)
    many = draw_confusion(torch.eye(100, dtype=torch.long), [str(number) for number in range(100)])
    assert not many.axes[0].texts


def test_a_test_leaves_tables_and_a_picture_beside_the_logs(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path, name="run", version=0)
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, logger=logger, callbacks=[ClassReport()], enable_progress_bar=False
    )
    data = SyntheticDataModule(images=16, batch_size=8, num_classes=3, channels=1, image_size=8)
    model = ImageClassifier(num_classes=3)
    for _ in range(2):  # the second counts anew
        (tested,) = trainer.test(model, datamodule=data, verbose=False)
    folder = tmp_path / "run" / "version_0"
    counted = [[int(cell) for cell in row[1:]] for row in _rows(folder / "confusion.csv")[1:]]
    assert sum(map(sum, counted)) == 8
    assert sum(counted[index][index] for index in range(3)) == round(8 * tested["test_accuracy"])
    assert [row[0] for row in _rows(folder / "classes.csv")] == ["class", "0", "1", "2"]
    assert (folder / "confusion.png").stat().st_size > 5_000
    logger.finalize("success")
    events = EventAccumulator(str(folder), size_guidance={"images": 0})
    events.Reload()
    assert events.Tags()["images"] == ["test_confusion"]


def test_without_a_logger_nothing_is_written(tmp_path: Path) -> None:
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        default_root_dir=tmp_path,
        callbacks=[ClassReport()],
        enable_progress_bar=False,
        enable_checkpointing=False,
    )
    data = SyntheticDataModule(images=8, batch_size=8, num_classes=3, channels=1, image_size=8)
    trainer.test(ImageClassifier(num_classes=3), datamodule=data, verbose=False)
    assert list(tmp_path.iterdir()) == []
