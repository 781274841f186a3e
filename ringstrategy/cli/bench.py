"""``ringstrategy bench``: how fast the all-reduce, a training step and a pipeline are on this machine."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from rich.console import Console
from rich.table import Table

from ringstrategy.bench import BenchError
from ringstrategy.bench.sizes import parse_sizes
from ringstrategy.cli.arguments import HelpFormatter, add_outputs, argument, at_least

__all__ = ["add_parser"]

_PIPE_WIDTH = 140  # columns, where the output is no terminal


class _Config(Protocol):
    @property
    def command(self) -> str: ...


C = TypeVar("C", bound=_Config)


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add ``bench`` to the command line.

    Args:
        subparsers: what ``ArgumentParser.add_subparsers()`` returned.
    """
    bench = subparsers.add_parser(
        "bench",
        help="measure the all-reduce, a training step or a pipeline on this machine",
        epilog="example: ringstrategy bench train-step --model resnet18 --batch-size 16",
    )
    kinds = bench.add_subparsers(metavar="KIND", required=True)
    _add_all_reduce(kinds)
    _add_train_step(kinds)
    _add_pipeline(kinds)


def _add_kind(
    kinds: argparse._SubParsersAction[Any],
    name: str,
    run: Callable[[argparse.Namespace], int],
    summary: str,
    description: str,
) -> argparse.ArgumentParser:
    """A kind of measurement, with what all kinds take."""
    parser: argparse.ArgumentParser = kinds.add_parser(
        name,
        help=summary,
        description=description,
        epilog=f"example: ringstrategy bench {name} --json {name}.json",
        formatter_class=HelpFormatter,
    )
    add_outputs(parser)
    parser.set_defaults(func=run)
    return parser


def _add_all_reduce(kinds: argparse._SubParsersAction[Any]) -> None:
    parser = _add_kind(
        kinds,
        "all-reduce",
        _all_reduce,
        "bandwidth of our all-reduces and of the backend's own",
        "Bandwidth of several all-reduces, interleaved repeat by repeat in one run, as nccl-tests counts it: algbw ="
        " size / time, busbw = algbw * 2(n-1)/n, GB = 1e9 bytes. Times are medians over the repeats of the slowest"
        " rank; every result is checked element by element.",
    )
    parser.add_argument("--ranks", type=at_least(2), default=2, help="number of processes, one thread each")
    parser.add_argument(
        "--sizes",
        type=argument(parse_sizes),
        default="64KiB,1MiB,4MiB,25MiB,64MiB",
        help="sizes of the whole buffer, separated by commas: 64KiB, 25MiB, 1GiB, or a number of bytes",
    )
    parser.add_argument(
        "--algorithms",
        type=argument(_names),
        default="shared_memory,backend",
        help="what to measure, separated by commas: shared_memory, backend (the process group's own), ring, tree and"
        " naive (over its send and receive); measure marks which of them algorithm='measure' chooses",
    )
    parser.add_argument("--dtype", choices=("float32", "float64", "float16", "bfloat16"), default="float32")
    parser.add_argument("--repeats", type=at_least(1), default=20, help="timed repeats")
    parser.add_argument("--warmup", type=at_least(0), default=5, help="repeats before them, checked but not timed")


def _add_train_step(kinds: argparse._SubParsersAction[Any]) -> None:
    parser = _add_kind(
        kinds,
        "train-step",
        _train_step,
        "time of a training step and peak memory, per strategy",
        "Median time of a training step and peak memory per strategy: real Trainer.fit runs in fresh processes of one"
        " thread each, the strategies taking turns. 'ddp' is Lightning's with static_graph and gradient_as_bucket_view;"
        " 'none' trains the same processes without gradient sync, the floor. The suffix +keep makes glibc keep freed"
        " memory instead of handing it back to the system (ring_ddp's default), +release lets it hand it back (the"
        " others' default). ring_ddp+backend does without shared memory, where +bf16 or +fp16 compress gradients.",
    )
    parser.add_argument("--model", default="mlp", help="mlp (10.5 M parameters) or any classifier of torchvision")
    parser.add_argument("--batch-size", type=at_least(1), default=32, help="samples per rank and step")
    parser.add_argument("--ranks", type=at_least(1), default=2, help="number of processes, one thread each")
    parser.add_argument(
        "--strategies", type=argument(_names), default="ring_ddp,ddp,none", help="what to measure, separated by commas"
    )
    parser.add_argument("--steps", type=at_least(1), default=40, help="timed steps per run")
    parser.add_argument("--warmup", type=at_least(1), default=10, help="steps before them")
    parser.add_argument("--rounds", type=at_least(1), default=3, help="runs per strategy")
    parser.add_argument("--image-size", type=at_least(1), default=32, help="height and width of the images, in pixels")
    parser.add_argument(
        "--keep-freed-memory", action="store_true", help="the same as +keep after each strategy that has no suffix"
    )


def _add_pipeline(kinds: argparse._SubParsersAction[Any]) -> None:
    parser = _add_kind(
        kinds,
        "pipeline",
        _pipeline,
        "time, bubble and memory of a pipeline's step, ours and torch's",
        "Median time of a step (forward, loss and backward), bubble and peak memory of pipelines of one process per"
        " stage and one thread each, nothing computed twice: ours; torch.distributed.pipelining's on the same cut and"
        " micro-batches; and naive model parallelism, which has one micro-batch. All find the gradients of the whole"
        " model, then take turns in the same processes. The critical path is the schedule played with the stages' own"
        " median times, without messages.",
    )
    parser.add_argument(
        "--model",
        default="cifar_resnet18",
        help="cifar_resnet18 (its stem keeps 32x32 images as they are), mlp or any classifier of torchvision; batch"
        " norms become group norms, which do not care how a batch is divided",
    )
    parser.add_argument("--stages", type=at_least(2), default=2, help="number of stages, cut by measured time")
    parser.add_argument("--chunks", type=argument(_numbers), default="2,4,8", help="numbers of micro-batches")
    parser.add_argument("--batch", type=at_least(1), default=64, help="samples per step")
    parser.add_argument("--image-size", type=at_least(1), default=32, help="height and width of the images, in pixels")
    parser.add_argument(
        "--variants",
        type=argument(_names),
        default="gpipe,1f1b,torch_gpipe,torch_1f1b,naive",
        help="what to measure, separated by commas",
    )
    parser.add_argument("--rounds", type=at_least(1), default=5, help="turns of each variant")
    parser.add_argument("--steps", type=at_least(1), default=1, help="timed steps per turn")
    parser.add_argument("--warmup", type=at_least(0), default=1, help="steps before them")


def _all_reduce(args: argparse.Namespace) -> int:
    from ringstrategy.bench import all_reduce, report

    def configure() -> all_reduce.AllReduceConfig:
        return all_reduce.AllReduceConfig(
            ranks=args.ranks,
            sizes=args.sizes,
            algorithms=args.algorithms,
            dtype=args.dtype,
            repeats=args.repeats,
            warmup=args.warmup,
        )

    return _measure(args, configure, all_reduce.measure, report.all_reduce_table, "plot_all_reduce")


def _train_step(args: argparse.Namespace) -> int:
    from ringstrategy.bench import report, train_step

    def configure() -> train_step.TrainStepConfig:
        contenders = [train_step.Contender.parse(name) for name in args.strategies]
        if args.keep_freed_memory:
            contenders = [replace(each, memory=each.memory or "keep") for each in contenders]
        return train_step.TrainStepConfig(
            model=args.model,
            batch_size=args.batch_size,
            ranks=args.ranks,
            strategies=tuple(contenders),
            steps=args.steps,
            warmup=args.warmup,
            rounds=args.rounds,
            image_size=args.image_size,
        )

    def measure(config: train_step.TrainStepConfig) -> list[train_step.TrainStepRow]:
        return train_step.measure(config, _say)

    return _measure(args, configure, measure, report.train_step_table, "plot_train_step")


def _pipeline(args: argparse.Namespace) -> int:
    from ringstrategy.bench import pipeline, report

    def configure() -> pipeline.PipelineConfig:
        return pipeline.PipelineConfig(
            model=args.model,
            image_size=args.image_size,
            batch=args.batch,
            stages=args.stages,
            chunks=args.chunks,
            variants=args.variants,
            rounds=args.rounds,
            steps=args.steps,
            warmup=args.warmup,
        )

    def measure(config: pipeline.PipelineConfig) -> list[pipeline.PipelineRow]:
        return pipeline.measure(config, _say)

    return _measure(args, configure, measure, report.pipeline_table, "plot_pipeline")


def _measure(
    args: argparse.Namespace,
    configure: Callable[[], C],
    measure: Callable[[C], Sequence[Any]],
    table: Callable[[Sequence[Any]], Table],
    plot: str,
) -> int:
    """Measure, print the table, and write the files that were asked for."""
    from ringstrategy.bench.environment import describe

    try:
        config = configure()
    except ValueError as error:
        return _fail(error, code=2)
    environment = describe(config.command)
    with _ended_by_sigterm():
        try:
            rows = measure(config)
        except BenchError as error:
            return _fail(error, code=1)
    _deliver(args, environment, rows, table(rows), plot)
    return 0


def _deliver(
    args: argparse.Namespace, environment: dict[str, str | float], rows: Sequence[Any], table: Table, plot: str
) -> None:
    from ringstrategy.bench.environment import in_a_line
    from ringstrategy.bench.report import write_json

    console = Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH, highlight=False)
    console.print(table)
    console.print(in_a_line(environment), style="dim")
    if args.json:
        write_json(args.json, environment, rows)
    if args.plot:
        from ringstrategy.bench import plot as pictures

        getattr(pictures, plot)(rows, args.plot)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _fail(error: Exception, code: int) -> int:
    _say(f"ringstrategy bench: error: {error}")
    return code


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Let SIGTERM unwind the stack, so that the ranks are ended too."""
    previous = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    if not all(names):
        raise ValueError(f"{text!r} has an empty name")
    return names


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(number) for number in text.split(","))
    except ValueError:
        raise ValueError(f"{text!r} is no list of whole numbers, as 2,4,8 is") from None
