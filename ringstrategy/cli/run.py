"""``ringstrategy run NAME``: train a recipe."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from typing import Any

from ringstrategy.cli.recipes import add_recipes_to_path

__all__ = ["add_parser"]

# What the extra `recipes` installs and the recipes import.
_NEEDED = ("torchvision", "torchmetrics", "sklearn", "tensorboard", "jsonargparse")


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add ``run`` to the command line.

    Args:
        subparsers: what ``ArgumentParser.add_subparsers()`` returned.
    """
    parser = subparsers.add_parser(
        "run",
        help="train a recipe, e.g. `ringstrategy run digits`",
        description="Train a recipe, test its best checkpoint and sum up. `ringstrategy recipes` lists the names.",
    )
    parser.add_argument("name", metavar="NAME", help="the recipe")
    parser.add_argument(
        "arguments",
        metavar="...",
        nargs=argparse.REMAINDER,
        help="arguments of LightningCLI, e.g. --trainer.max_epochs 5; `ringstrategy run NAME --help` lists them",
    )
    parser.set_defaults(func=_run)


def _run(args: argparse.Namespace) -> int:
    add_recipes_to_path()
    from registry import find_recipe

    try:
        recipe = find_recipe(args.name)
    except LookupError as error:
        return _fail(error.args[0], status=2)
    missing = [module for module in _NEEDED if importlib.util.find_spec(module) is None]
    if missing:
        return _fail(f"{', '.join(missing)} not installed; the recipes need `pip install 'ringstrategy[recipes]'`", 1)
    from train import main

    main(args.arguments, config=recipe.config, prog=f"ringstrategy run {recipe.name}")
    return 0


def _fail(message: str, status: int) -> int:
    print(f"ringstrategy run: {message}", file=sys.stderr)
    return status
