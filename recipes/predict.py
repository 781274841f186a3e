"""Classify pictures with the checkpoint of a run: ``python predict.py CHECKPOINT PICTURE...``."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from image_classifier import ImageClassifier
from image_format import ImageFormat, read_image
from matplotlib.figure import Figure
from PIL import Image
from rich.console import Console
from rich.progress import track
from rich.table import Table

__all__ = ["Prediction", "contact_sheet", "load_model", "main", "predict"]

_THUMBNAIL = 256  # pixels, of a picture in the contact sheet
_PIPE_WIDTH = 140  # columns, where the output is no terminal


@dataclass(frozen=True)
class Prediction:
    """What a picture was taken for.

    Attributes:
        path: its file.
        picture: a small copy.
        answers: classes with their probabilities, the most likely first.
    """

    path: Path
    picture: Image.Image
    answers: tuple[tuple[str, float], ...]


def load_model(checkpoint: Path) -> tuple[ImageClassifier, ImageFormat]:
    """The model of a run, on the CPU, and how its images have to be prepared.

    Raises:
        FileNotFoundError: there is no such checkpoint.
        ValueError: it is none of an image classifier's run.
    """
    if not checkpoint.is_file():
        raise FileNotFoundError(f"there is no checkpoint {checkpoint.resolve()}")
    try:
        model = ImageClassifier.load_from_checkpoint(checkpoint, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever a file that is something else runs into
        raise ValueError(f"{checkpoint} is no checkpoint of an image classifier's run: {error}") from error
    if model.image_format is None:
        raise ValueError(f"{checkpoint} does not say how its images were prepared: it was not made with a data module")
    return model.eval(), model.image_format


@torch.inference_mode()
def predict(model: ImageClassifier, form: ImageFormat, path: Path, top: int = 1) -> Prediction:
    """Classify a picture.

    Args:
        model: in evaluation mode.
        form: how its images are prepared.
        path: file with the picture.
        top: number of answers.

    Raises:
        OSError: the picture cannot be read; the message names it.
    """
    picture = read_image(path)
    images = form.preparation(picture).unsqueeze(0)
    probabilities, labels = model(images).softmax(dim=1)[0].topk(min(top, form.num_classes))
    picture.thumbnail((_THUMBNAIL, _THUMBNAIL))
    names = (form.classes[label] for label in labels.tolist())
    return Prediction(path, picture, tuple(zip(names, probabilities.tolist(), strict=True)))


def contact_sheet(predictions: Sequence[Prediction]) -> Figure:
    """All pictures beside each other, each under its most likely class."""
    columns = min(len(predictions), max(4, math.ceil(math.sqrt(len(predictions)))))
    rows = math.ceil(len(predictions) / columns)
    figure = Figure(figsize=(1.8 * columns, 2.1 * rows), layout="constrained")
    for axes in figure.subplots(rows, columns, squeeze=False).flat:
        axes.axis("off")
    for axes, each in zip(figure.axes, predictions, strict=False):
        axes.imshow(each.picture, cmap="gray", vmin=0, vmax=255)
        name, share = each.answers[0]
        axes.set_title(f"{name}  {share:.0%}\n{each.path.name}", fontsize=8)
    return figure


def main(checkpoint: Path, pictures: Sequence[Path], top: int = 1, plot: Path | None = None) -> int:
    """Print a table with the class and the probability of every picture.

    Args:
        checkpoint: of a run.
        pictures: files.
        top: number of answers for each.
        plot: file to draw a contact sheet into.

    Returns:
        1 if a picture could not be read; the others are classified nevertheless.

    Raises:
        FileNotFoundError: there is no such checkpoint.
        ValueError: it is none of an image classifier's run.
    """
    stderr = Console(stderr=True)
    model, form = load_model(checkpoint)
    done: list[Prediction] = []
    for path in track(pictures, "classifying", console=stderr, transient=True, disable=not stderr.is_terminal):
        try:
            done.append(predict(model, form, path, top))
        except OSError as error:
            stderr.print(str(error), style="red", markup=False, highlight=False, soft_wrap=True)
    if done:
        Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH).print(_table(done))
    if done and plot is not None:
        contact_sheet(done).savefig(plot, dpi=120)
    return 0 if len(done) == len(pictures) else 1


def _table(predictions: Sequence[Prediction]) -> Table:
    table = Table()
    table.add_column("picture", overflow="fold")
    table.add_column("class")
    table.add_column("probability", justify="right")
    for each in predictions:
        for rank, (name, share) in enumerate(each.answers):
            table.add_row(str(each.path) if rank == 0 else "", name, f"{share:.1%}")
    return table


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Classify pictures with the checkpoint of a run.")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("pictures", type=Path, nargs="+")
    parser.add_argument("--top", type=int, default=1, help="answers per picture")
    parser.add_argument("--plot", type=Path, help="file for a contact sheet, e.g. sheet.png")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main(**vars(_arguments())))
