"""``ringstrategy doctor``: what a run would use here, and whether it works."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from typing import Any

from ringstrategy.cli.arguments import HelpFormatter, output

__all__ = ["add_parser"]

_PIPE_WIDTH = 100  # columns, where the output is no terminal
_STYLES = {"ok": "green", "note": "yellow", "broken": "bold red"}


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add ``doctor`` to the command line.

    Args:
        subparsers: what ``ArgumentParser.add_subparsers()`` returned.
    """
    parser = subparsers.add_parser(
        "doctor",
        help="say what a run would use here, and try it with two ranks",
        description="Say which backend and transport a run would use here and why, look at the network and at limits"
        " of this machine, and have two ranks sum numbers. The exit status is 0 if all works, 1 if something is"
        " broken.",
        epilog="example: ringstrategy doctor --json doctor.json",
        formatter_class=HelpFormatter,
    )
    parser.add_argument("--no-self-test", action="store_true", help="only look, start no ranks")
    parser.add_argument("--json", type=output, metavar="FILE", help="also write the findings here")
    parser.set_defaults(func=_doctor)


def _doctor(args: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.table import Table

    from ringstrategy.doctor import examine, judge
    from ringstrategy.self_test import self_test

    findings = examine()
    trials = []
    if not args.no_self_test:
        print("starting two ranks", file=sys.stderr, flush=True)
        trials = self_test()
        findings += judge(trials)
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column()
    for finding in findings:
        table.add_row(f"[{_STYLES[finding.state]}]{finding.state}[/]", finding.topic, finding.text)
    broken = sum(finding.state == "broken" for finding in findings)
    console = Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH, highlight=False)
    console.print(table)
    console.print("All is well." if not broken else f"{broken} thing{'s' * (broken > 1)} broken.", style="bold")
    if args.json:
        document = {
            "broken": broken,
            "findings": [asdict(finding) for finding in findings],
            "self_test": [asdict(trial) for trial in trials],
        }
        args.json.write_text(json.dumps(document, indent=2) + "\n")
    return 1 if broken else 0
