"""The entry point of the command ``ringstrategy``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from ringstrategy import __version__
from ringstrategy.cli import bench, copy, doctor, plan, predict, recipes, run, simulate

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand.

    Args:
        argv: the words after ``ringstrategy``; those of this process if left out.

    Returns:
        The exit status: 0 for success, 1 for an error, which is told in a line, 2 for a command line that cannot be
        understood.
    """
    parser = argparse.ArgumentParser(
        prog="ringstrategy",
        description="Data-parallel and pipeline training for PyTorch Lightning: recipes, plans and benchmarks.",
        epilog="example: ringstrategy run digits",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    parser.add_argument("--debug", action="store_true", help="show where an error comes from; may stand anywhere")
    subparsers = parser.add_subparsers(metavar="COMMAND", dest="command", required=True)
    for subcommand in (run, recipes, copy, predict, plan, bench, doctor, simulate):
        subcommand.add_parser(subparsers)
    words = list(sys.argv[1:] if argv is None else argv)
    args = parser.parse_args([word for word in words if word != "--debug"])
    try:
        status: int = args.func(args)
    except Exception as error:
        if "--debug" in words:
            raise
        print(f"ringstrategy {args.command}: {_told(error)} (--debug shows where)", file=sys.stderr)
        return 1
    return status


def _told(error: Exception) -> str:
    """An error in a line: its class and its message."""
    text = str(error)
    if "Original Traceback" in text:  # from a process that loads data, whose whole traceback is in the message
        before, _, after = text.partition("Caught ")
        text = before + after.strip().splitlines()[-1]
        return f"{type(error).__name__}: {text}" if before else text
    return f"{type(error).__name__}: {text}"


if __name__ == "__main__":
    sys.exit(main())
