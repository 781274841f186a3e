"""Draw where the tensors of a model live in training, and in the checkpoint: ``python docs/draw_checkpoint.py``."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import lightning.pytorch as pl
import torch
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from pictures import EDGE, IMAGES, INK, bare, write
from torch import nn

from ringstrategy.pipeline.placement import Placement
from ringstrategy.pipeline.plan import PipelinePlan, choose_cut

STAGES = 2
BALANCE = (2, 2)  # layers of each
_HELD, _ABSENT, _FILE = "#74c0fc", "#ffffff", "#ffe066"
_WIDTH, _FROM = 1.5, 3.2  # of a column; where the first one begins


class Row(NamedTuple):
    """One entry of the state dict.

    Attributes:
        name: its key.
        stages: that hold it in training.
        number: of its state in the optimizer; none for a buffer.
    """

    name: str
    stages: tuple[int, ...]
    number: int | None


class Classifier(pl.LightningModule):
    """The model of the page, as far as it matters here."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))


def rows() -> list[Row]:
    """The state dict of the model when it is cut into stages."""
    module = Classifier()
    plan = PipelinePlan("net", module.net, choose_cut(module.net, STAGES, BALANCE, None, chunks=1), module)
    placements = [Placement(module, plan.owners, stage) for stage in range(STAGES)]
    numbers = {name: number for number, (name, _) in enumerate(module.named_parameters())}
    return [
        Row(name, tuple(stage for stage in range(STAGES) if placements[stage].holds(name)), numbers.get(name))
        for name in module.state_dict()
    ]


def draw() -> Figure:
    """A row per tensor, a column per stage and one for the file."""
    entries = rows()
    figure = Figure(figsize=(6.6, 0.6 + 0.3 * len(entries)), layout="constrained")
    axes = figure.subplots()
    bare(axes)
    file = _FROM + (STAGES + 0.6) * _WIDTH
    for line, row in enumerate(entries):
        for stage in range(STAGES):
            held = stage in row.stages
            axes.add_patch(
                Rectangle(
                    (_FROM + stage * _WIDTH + 0.05, line + 0.08),
                    _WIDTH - 0.1,
                    0.84,
                    facecolor=_HELD if held else _ABSENT,
                    edgecolor=EDGE,
                    linewidth=0.6,
                    linestyle="-" if held else (0, (2, 2)),
                )
            )
        first = min(row.stages)
        axes.text(_FROM + (first + 0.5) * _WIDTH, line + 0.53, "sent" if first else "taken", ha="center", va="center")
        start = (_FROM + STAGES * _WIDTH + 0.05, line + 0.5)
        axes.annotate("", (file, line + 0.5), start, arrowprops={"arrowstyle": "-|>", "color": INK, "shrinkB": 0})
        axes.add_patch(Rectangle((file, line), 3.4, 1, facecolor=_FILE, edgecolor=EDGE, linewidth=0.6))
        axes.text(file + 0.8, line + 0.53, "✓", ha="center", va="center")
        number = "—" if row.number is None else str(row.number)
        axes.text(file + 2.5, line + 0.53, number, ha="center", va="center")
        axes.text(0, line + 0.53, row.name, va="center")
    for x, head in (
        *((_FROM + (stage + 0.5) * _WIDTH, f"stage {stage}") for stage in range(STAGES)),
        (file + 0.8, "weights"),
        (file + 2.5, "optimizer state"),
    ):
        axes.text(x, -0.2, head, ha="center", va="bottom", fontweight="bold")
    axes.set_xlim(-0.05, file + 3.45)
    axes.set_ylim(len(entries) + 0.05, -0.9)
    axes.set_xticks([])
    axes.set_yticks([])
    return figure


def main(folder: Path = IMAGES) -> None:
    """Draw all pictures of this script into a folder."""
    write(folder / "checkpoint.svg", lambda path: draw().savefig(path))


if __name__ == "__main__":
    main()
