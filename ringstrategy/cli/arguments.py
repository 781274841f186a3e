"""Words of the command line that several subcommands understand."""

from __future__ import annotations

import argparse
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

__all__ = ["HelpFormatter", "add_outputs", "argument", "at_least", "output", "picture"]

T = TypeVar("T")
_PLOT_FORMATS = (".png", ".svg", ".pdf")


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Tells defaults, where there is one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default is None else super()._get_help_string(action)


def add_outputs(parser: argparse.ArgumentParser) -> None:
    """Add ``--json`` and ``--plot``."""
    parser.add_argument("--json", type=output, metavar="FILE", help="also write rows and environment here")
    parser.add_argument("--plot", type=picture, metavar="FILE.png", help="also draw them (.png, .svg or .pdf)")


def argument(parse: Callable[[str], T]) -> Callable[[str], T]:
    """Turn the ``ValueError`` of a parser into argparse's own, which keeps the message."""

    def read(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


def at_least(minimum: int) -> Callable[[str], int]:
    """A whole number that is not below ``minimum``."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number") from None
        if value < minimum:
            raise argparse.ArgumentTypeError(f"must be at least {minimum}, not {value}")
        return value

    return read


def output(text: str) -> Path:
    """A file to write later: better to fail now than after the measurement."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is a folder, or lies in one that does not exist")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written")
    return path


def picture(text: str) -> Path:
    """A file to draw into later, if there is something to draw with."""
    path = output(text)
    if path.suffix not in _PLOT_FORMATS:
        raise argparse.ArgumentTypeError(f"{text!r} must end in {', '.join(_PLOT_FORMATS)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError("drawing needs matplotlib: pip install 'ringstrategy[recipes]'")
    return path
