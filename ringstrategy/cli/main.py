"""The entry point of the command ``ringstrategy``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from ringstrategy import __version__
from ringstrategy.cli import bench, plan, recipes, run

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand.

    Args:
        argv: the words after ``ringstrategy``; those of this process if left out.

    Returns:
        The exit status: 0 for success, 2 for a command line that cannot be understood.
    """
    parser = argparse.ArgumentParser(
        prog="ringstrategy",
        description="Data-parallel and pipeline training for PyTorch Lightning: recipes, plans and benchmarks.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for subcommand in (run, recipes, plan, bench):
        subcommand.add_parser(subparsers)
    args = parser.parse_args(argv)
    status: int = args.func(args)
    return status


if __name__ == "__main__":
    sys.exit(main())
