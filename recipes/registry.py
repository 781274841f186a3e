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
    """

    name: str
    summary: str
    data: str
    ranks: int

    @property
    def config(self) -> Path:
        """The YAML file with every setting of the run."""
        return Path(__file__).resolve().parent / "configs" / f"{self.name}.yaml"


RECIPES = (
    Recipe(
        name="digits",
        summary="a small convolutional classifier of handwritten digits, data parallel with ring_ddp",
        data="1797 scans of 8x8 pixels, shipped with scikit-learn",
        ranks=2,
    ),
    Recipe(
        name="digits_gpipe",
        summary="the same classifier cut into two stages, with the gpipe schedule",
        data="1797 scans of 8x8 pixels, shipped with scikit-learn",
        ranks=2,
    ),
    Recipe(
        name="digits_1f1b",
        summary="the same classifier cut into two stages, with the 1f1b schedule",
        data="1797 scans of 8x8 pixels, shipped with scikit-learn",
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
