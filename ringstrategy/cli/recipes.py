"""``ringstrategy recipes``: what there is to run. Also finds the folder of the recipes."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path
from typing import Any

__all__ = ["add_parser", "add_recipes_to_path", "check_installed", "recipes_folder"]

_PIPE_WIDTH = 140  # columns, where the output is no terminal
# What the extra `recipes` installs and the recipes import.
_NEEDED = ("torchvision", "torchmetrics", "sklearn", "tensorboard", "jsonargparse", "matplotlib")


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add ``recipes`` to the command line.

    Args:
        subparsers: what ``ArgumentParser.add_subparsers()`` returned.
    """
    parser = subparsers.add_parser(
        "recipes",
        help="list the recipes",
        description="List the recipes: what they train, on which data and how many ranks, and what has been measured.",
        epilog="example: ringstrategy recipes",
    )
    parser.set_defaults(func=_list_recipes)


def recipes_folder() -> Path:
    """The folder of scripts and configs: inside the installed package, or beside it in a checkout.

    Raises:
        FileNotFoundError: it is in neither place.
    """
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "recipes", package.parent / "recipes"):
        if (folder / "registry.py").is_file():
            return folder
    raise FileNotFoundError(f"the recipes are missing from {package}; install ringstrategy again")


def add_recipes_to_path() -> None:
    """Make the recipes' modules importable by their plain names, as if one of their scripts had been started.

    A folder of scripts, not a package: it looks the same in a checkout and in an installation, and processes that
    are spawned later get this path handed on, so that they find the classes they unpickle.
    """
    folder = str(recipes_folder())
    if folder not in sys.path:
        sys.path.insert(0, folder)


def check_installed() -> None:
    """See whether everything is there that the recipes import.

    Raises:
        ModuleNotFoundError: something is missing; the message says how to get it.
    """
    missing = [module for module in _NEEDED if importlib.util.find_spec(module) is None]
    if missing:
        raise ModuleNotFoundError(
            f"{', '.join(missing)} not installed; the recipes need `pip install 'ringstrategy[recipes]'`"
        )


def _list_recipes(args: argparse.Namespace) -> int:
    add_recipes_to_path()
    from registry import RECIPES
    from rich.console import Console
    from rich.table import Table

    table = Table(title="ringstrategy run NAME", title_justify="left")
    table.add_column("name", no_wrap=True)
    table.add_column("trains")
    table.add_column("data")
    table.add_column("ranks", justify="right")
    table.add_column("test accuracy and time")
    for recipe in RECIPES:
        measured = recipe.measured or "not measured"
        table.add_row(recipe.name, recipe.summary, recipe.data, str(recipe.ranks), measured)
    Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH).print(table)
    return 0
