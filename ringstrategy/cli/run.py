"""``ringstrategy run NAME``: train a recipe."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from ringstrategy.cli.recipes import add_recipes_to_path, check_installed

__all__ = ["add_parser"]


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add ``run`` to the command line.

    Args:
        subparsers: what ``ArgumentParser.add_subparsers()`` returned.
    """
    parser = subparsers.add_parser(
        "run",
        help="train a recipe, e.g. `ringstrategy run digits`",
        description="Train a recipe, test its best checkpoint and sum up. `ringstrategy recipes` lists the names.",
        epilog="example: ringstrategy run digits --trainer.max_epochs 5",
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
        print(f"ringstrategy run: {error.args[0]}", file=sys.stderr)
        return 2
    check_installed()
    from train import main

    main(args.arguments, config=recipe.config, prog=f"ringstrategy run {recipe.name}")
    return 0
