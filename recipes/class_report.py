"""Which classes the test went well for: a picture for people, and tables for programs."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path

import lightning.pytorch as pl
from image_classifier import ImageClassifier
from lightning.pytorch.loggers import TensorBoardLogger
from matplotlib.figure import Figure
from torch import Tensor

__all__ = ["ClassReport", "draw_confusion", "write_classes", "write_confusion"]

_NAMED = 30  # classes up to which a picture has room for their names


class ClassReport(pl.Callback):
    """At the end of a test: ``confusion.png``, ``confusion.csv`` and ``classes.csv`` beside the logs.

    The picture is in TensorBoard, too, where there is such a logger. Without any logger nothing is written.
    """

    def on_test_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Put the counts of all ranks together; rank 0 writes."""
        assert isinstance(pl_module, ImageClassifier), "only ImageClassifier counts its answers by class"
        counts = pl_module.test_confusion.compute().cpu()
        folder = trainer.log_dir  # asks all ranks
        if not trainer.loggers or folder is None or not trainer.is_global_zero:
            return
        known = pl_module.image_format
        names = known.classes if known is not None else tuple(str(number) for number in range(len(counts)))
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        write_confusion(counts, names, path / "confusion.csv")
        write_classes(counts, names, path / "classes.csv")
        figure = draw_confusion(counts, names)
        figure.savefig(path / "confusion.png", dpi=120)
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.add_figure("test_confusion", figure, trainer.global_step)


def write_confusion(counts: Tensor, names: Sequence[str], path: Path) -> None:
    """One row per class: its name, and how often it was taken for each of them.

    Args:
        counts: (true class, answer).
        names: of the classes.
        path: to write to.
    """
    _write_table(path, ["", *names], ([name, *row] for name, row in zip(names, counts.tolist(), strict=True)))


def write_classes(counts: Tensor, names: Sequence[str], path: Path) -> None:
    """One row per class: its name, its number of images, and the share of them that was answered right.

    Args:
        counts: (true class, answer).
        names: of the classes.
        path: to write to.
    """
    rows = (
        [name, sum(row), f"{right / sum(row):.4f}" if sum(row) else ""]
        for name, row, right in zip(names, counts.tolist(), counts.diag().tolist(), strict=True)
    )
    _write_table(path, ["class", "images", "accuracy"], rows)


def _write_table(path: Path, head: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(head)
        table.writerows(rows)


def draw_confusion(counts: Tensor, names: Sequence[str]) -> Figure:
    """The shares of the answers per true class, with numbers and names where there is room.

    Args:
        counts: (true class, answer).
        names: of the classes.
    """
    shares = (counts / counts.sum(dim=1, keepdim=True).clamp(min=1)).numpy()
    named = len(names) <= _NAMED
    side = max(5.0, 0.45 * len(names)) if named else 8.0
    figure = Figure(figsize=(side + 1.0, side), layout="constrained")
    axes = figure.add_subplot()
    picture = axes.imshow(shares, cmap="Blues", vmin=0.0, vmax=1.0)
    figure.colorbar(picture, label="share of the class (numbers: per cent)", shrink=0.8)
    axes.set(xlabel="answer", ylabel="class")
    if not named:
        return figure
    axes.set_xticks(range(len(names)), names, rotation=45, ha="right", rotation_mode="anchor")
    axes.set_yticks(range(len(names)), names)
    for row, column in counts.nonzero().tolist():
        share = shares[row, column]
        colour = "white" if share > 0.5 else "black"
        axes.text(column, row, f"{100 * share:.0f}", ha="center", va="center", fontsize=8, color=colour)
    return figure
