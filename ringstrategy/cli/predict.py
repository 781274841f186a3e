"""``ringstrategy predict CKPT IMAGE...``: what the model of a run takes pictures for."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ringstrategy.cli.arguments import HelpFormatter, at_least, picture
from ringstrategy.cli.recipes import add_recipes_to_path, check_installed

__all__ = ["add_parser"]


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add ``predict`` to the command line.

    Args:
        subparsers: what ``ArgumentParser.add_subparsers()`` returned.
    """
    parser = subparsers.add_parser(
        "predict",
        help="classify pictures with the checkpoint of a run",
        description="Classify pictures with the checkpoint of a recipe's run, on the CPU: class and probability of"
        " each. Pictures of any size and format are prepared as the images of the test were.",
        epilog="example: ringstrategy predict runs/digits/version_0/checkpoints/*.ckpt 3.png --plot sheet.png",
        formatter_class=HelpFormatter,
    )
    parser.add_argument("checkpoint", metavar="CKPT", type=Path, help="a checkpoint of `ringstrategy run`")
    parser.add_argument("pictures", metavar="IMAGE", type=Path, nargs="+", help="files with pictures")
    parser.add_argument("--top", type=at_least(1), default=1, metavar="N", help="answers per picture")
    parser.add_argument("--plot", type=picture, metavar="FILE.png", help="also draw the pictures with their classes")
    parser.set_defaults(func=_predict)


def _predict(args: argparse.Namespace) -> int:
    add_recipes_to_path()
    check_installed()
    from predict import main

    return main(args.checkpoint, args.pictures, top=args.top, plot=args.plot)
