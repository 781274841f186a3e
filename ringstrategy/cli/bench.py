"""``ringstrategy bench``: how fast the all-reduce and a training step are on this machine."""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table

from ringstrategy.bench import BenchError
from ringstrategy.bench.sizes import parse_sizes

__all__ = ["add_parser"]

T = TypeVar("T")
_PLOT_FORMATS = (".png", ".svg", ".pdf")
_PIPE_WIDTH = 140  # columns, where the output is no terminal


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add ``bench`` to the command line.

    Args:
        subparsers: what ``ArgumentParser.add_subparsers()`` returned.
    """
    bench = subparsers.add_parser("bench", help="measure the all-reduce or a training step on this machine")
    kinds = bench.add_subparsers(metavar="KIND", required=True)
    _add_all_reduce(kinds)
    _add_train_step(kinds)


def _add_all_reduce(kinds: argparse._SubParsersAction[Any]) -> None:
    parser = kinds.add_parser(
        "all-reduce",
        help="bandwidth of our all-reduce and of the backend's own",
        description="Bandwidth of several all-reduces, interleaved repeat by repeat in one run, as nccl-tests counts"
        " it: algbw = size / time, busbw = algbw * 2(n-1)/n, GB = 1e9 bytes. Times are medians over the repeats of the"
        " slowest rank; every result is checked element by element.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--ranks", type=_at_least(2), default=2, help="number of processes, one thread each")
    parser.add_argument(
        "--sizes",
        type=_argument(parse_sizes),
        default="64KiB,1MiB,4MiB,25MiB,64MiB",
        help="sizes of the whole buffer, separated by commas: 64KiB, 25MiB, 1GiB, or a number of bytes",
    )
    parser.add_argument(
        "--collectives", type=_names, default="shared_memory,backend", help="what to measure, separated by commas"
    )
    parser.add_argument("--dtype", choices=("float32", "float64", "float16", "bfloat16"), default="float32")
    parser.add_argument("--repeats", type=_at_least(1), default=20, help="timed repeats")
    parser.add_argument("--warmup", type=_at_least(0), default=5, help="repeats before them, checked but not timed")
    _add_outputs(parser)
    parser.set_defaults(func=_all_reduce)


def _add_train_step(kinds: argparse._SubParsersAction[Any]) -> None:
    parser = kinds.add_parser(
        "train-step",
        help="time of a training step and peak memory, per strategy",
        description="Median time of a training step and peak memory per strategy: real Trainer.fit runs in fresh"
        " processes of one thread each, the strategies taking turns. 'ddp' is Lightning's with static_graph and"
        " gradient_as_bucket_view; 'none' trains the same processes without gradient sync, the floor. The suffix +keep"
        " makes glibc keep freed memory instead of handing it back to the system (ring_ddp's default), +release lets"
        " it hand it back (the others' default).",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--model", default="mlp", help="mlp (10.5 M parameters) or any classifier of torchvision")
    parser.add_argument("--batch-size", type=_at_least(1), default=32, help="samples per rank and step")
    parser.add_argument("--ranks", type=_at_least(1), default=2, help="number of processes, one thread each")
    parser.add_argument(
        "--strategies", type=_names, default="ring_ddp,ddp,none", help="what to measure, separated by commas"
    )
    parser.add_argument("--steps", type=_at_least(1), default=40, help="timed steps per run")
    parser.add_argument("--warmup", type=_at_least(1), default=10, help="steps before them")
    parser.add_argument("--rounds", type=_at_least(1), default=3, help="runs per strategy")
    parser.add_argument("--image-size", type=_at_least(1), default=32, help="height and width of the images, in pixels")
    parser.add_argument(
        "--keep-freed-memory", action="store_true", help="the same as +keep after each strategy that has no suffix"
    )
    _add_outputs(parser)
    parser.set_defaults(func=_train_step)


def _add_outputs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=_output, metavar="FILE", help="also write rows and environment here")
    parser.add_argument("--plot", type=_picture, metavar="FILE.png", help="also draw them (.png, .svg or .pdf)")


def _all_reduce(args: argparse.Namespace) -> int:
    from ringstrategy.bench import all_reduce, report
    from ringstrategy.bench.environment import describe

    try:
        config = all_reduce.AllReduceConfig(
            ranks=args.ranks,
            sizes=args.sizes,
            collectives=args.collectives,
            dtype=args.dtype,
            repeats=args.repeats,
            warmup=args.warmup,
        )
    except ValueError as error:
        return _fail(error, code=2)
    environment = describe(config.command)
    with _ended_by_sigterm():
        try:
            rows = all_reduce.measure(config)
        except BenchError as error:
            return _fail(error, code=1)
    _deliver(args, environment, rows, report.all_reduce_table(rows), "plot_all_reduce")
    return 0


def _train_step(args: argparse.Namespace) -> int:
    from ringstrategy.bench import report, train_step
    from ringstrategy.bench.environment import describe

    try:
        contenders = [train_step.Contender.parse(name) for name in args.strategies]
        if args.keep_freed_memory:
            contenders = [train_step.Contender(each.base, each.memory or "keep") for each in contenders]
        config = train_step.TrainStepConfig(
            model=args.model,
            batch_size=args.batch_size,
            ranks=args.ranks,
            strategies=tuple(contenders),
            steps=args.steps,
            warmup=args.warmup,
            rounds=args.rounds,
            image_size=args.image_size,
        )
    except ValueError as error:
        return _fail(error, code=2)
    environment = describe(config.command)
    with _ended_by_sigterm():
        try:
            rows = train_step.measure(config, progress=lambda text: print(text, file=sys.stderr, flush=True))
        except BenchError as error:
            return _fail(error, code=1)
    _deliver(args, environment, rows, report.train_step_table(rows), "plot_train_step")
    return 0


def _deliver(
    args: argparse.Namespace, environment: dict[str, str | float], rows: Sequence[Any], table: Table, plot: str
) -> None:
    """Print the table and write the files that were asked for."""
    from ringstrategy.bench.report import write_json

    console = Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH, highlight=False)
    console.print(table)
    console.print(
        "{cpu}, {cores} cores, {memory_GiB} GiB, {kernel}; Python {python}, torch {torch}, lightning {lightning},"
        " ringstrategy {ringstrategy}; load before {load_1min}; {date}".format(**environment),
        style="dim",
    )
    if args.json:
        write_json(args.json, environment, rows)
    if args.plot:
        from ringstrategy.bench import plot as pictures

        getattr(pictures, plot)(rows, args.plot)


def _fail(error: Exception, code: int) -> int:
    print(f"ringstrategy bench: error: {error}", file=sys.stderr)
    return code


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Let SIGTERM unwind the stack, so that the ranks are ended too."""
    previous = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _argument(parse: Callable[[str], T]) -> Callable[[str], T]:
    """Turn the ``ValueError`` of a parser into argparse's own, which keeps the message."""

    def read(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


def _at_least(minimum: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number") from None
        if value < minimum:
            raise argparse.ArgumentTypeError(f"must be at least {minimum}, not {value}")
        return value

    return read


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    if not all(names):
        raise argparse.ArgumentTypeError(f"{text!r} has an empty name")
    return names


def _output(text: str) -> Path:
    """A file to write later: better to fail now than after the measurement."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is a folder, or lies in one that does not exist")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written")
    return path


def _picture(text: str) -> Path:
    path = _output(text)
    if path.suffix not in _PLOT_FORMATS:
        raise argparse.ArgumentTypeError(f"{text!r} must end in {', '.join(_PLOT_FORMATS)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError("drawing needs matplotlib: pip install 'ringstrategy[recipes]'")
    return path
