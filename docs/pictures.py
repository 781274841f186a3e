"""What the scripts that draw the pages' pictures share: colours, and files that come out the same every time."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes

__all__ = ["ALL_REDUCE", "BACKWARD", "EDGE", "IMAGES", "INK", "MARK", "bare", "ruled", "write"]

IMAGES = Path(__file__).resolve().parent / "images"

# Told apart by people who see no red or no green, and labelled all the same; backward as in the drawings of
# `ringstrategy plan`.
BACKWARD, ALL_REDUCE = "#ffa94d", "#b197fc"
MARK = "#d9480f"  # what the eye is to find
INK, EDGE = "#212529", "#868e96"


def bare(axes: Axes) -> None:
    """Leave nothing of the axes but what is drawn on them."""
    for side in axes.spines.values():
        side.set_visible(False)
    axes.tick_params(length=0)


def ruled(axes: Axes, title: str) -> None:
    """Leave of the axes of a curve the line below it, put rules behind it and a title above."""
    axes.set_title(title, loc="left", fontsize=10)
    axes.grid(axis="y", color="#dee2e6", linewidth=0.7)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)


def write(path: Path, draw: Callable[[Path], None]) -> None:
    """Write an SVG that depends on nothing but what is drawn.

    Args:
        path: of the picture.
        draw: writes it there.
    """
    with matplotlib.rc_context({"svg.hashsalt": "ringstrategy", "font.size": 9}):
        draw(path)
    text = re.sub(r"<dc:date>.*?</dc:date>", "", path.read_text())
    # A thousandth of a point is enough, and the file is much smaller.
    lines = re.sub(r"-?\d+\.\d{4,}", lambda number: f"{float(number[0]):.3f}", text).splitlines()
    path.write_text("".join(f"{line.rstrip()}\n" for line in lines if line.strip()))
