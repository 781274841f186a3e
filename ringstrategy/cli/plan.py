"""``ringstrategy plan``: where a classifier of torchvision is cut, and what a step would look like."""

from __future__ import annotations

import argparse
import difflib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from ringstrategy.cli.arguments import HelpFormatter, argument, at_least, output, picture

if TYPE_CHECKING:
    from torch import nn

    from ringstrategy.pipeline.plan import Cut
    from ringstrategy.pipeline.table import StageRow
    from ringstrategy.pipeline.timeline import Timeline

__all__ = ["add_parser"]

Balance = Literal["time", "size", "memory"] | tuple[int, ...]
_PIPE_WIDTH = 100  # columns, where the output is no terminal


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add ``plan`` to the command line.

    Args:
        subparsers: what ``ArgumentParser.add_subparsers()`` returned.
    """
    parser = subparsers.add_parser(
        "plan",
        help="cut a model into pipeline stages and draw its schedule",
        description="Cut a classifier of torchvision into pipeline stages by what its layers cost on this machine, and"
        " predict a step. Nothing is trained: the layers are measured in this process on one micro-batch, each with the"
        " machine to itself. The prediction is as good as that: stages that compete for cores or memory are slower.",
        epilog="example: ringstrategy plan --model resnet50 --stages 4 --chunks 8",
        formatter_class=HelpFormatter,
    )
    parser.add_argument("--model", required=True, help="any classifier of torchvision, e.g. resnet50")
    parser.add_argument("--stages", type=at_least(1), default=2, help="number of stages")
    parser.add_argument("--chunks", type=at_least(1), default=8, help="micro-batches per batch")
    parser.add_argument("--schedule", choices=("gpipe", "1f1b"), default="gpipe")
    parser.add_argument("--batch", type=at_least(1), default=32, help="images per step")
    parser.add_argument("--size", type=at_least(1), default=224, help="height and width of the images, in pixels")
    parser.add_argument(
        "--balance",
        type=argument(_balance),
        default="time",
        metavar="{time,size,memory,N,N,...}",
        help="what the stages shall have equal shares of, or the number of layers of each",
    )
    parser.add_argument(
        "--checkpoint",
        choices=("always", "except_last", "never"),
        default="except_last",
        help="which micro-batches run their forward once more in the backward, to keep fewer activations",
    )
    parser.add_argument("--threads", type=at_least(1), default=1, help="CPU threads of each stage")
    parser.add_argument("--layers", action="store_true", help="list the layers too, to choose a balance by hand")
    parser.add_argument("--json", type=output, metavar="FILE", help="also write plan, rows and spans here")
    parser.add_argument("--plot", type=picture, metavar="FILE.png", help="also draw the timeline (.png, .svg or .pdf)")
    parser.set_defaults(func=_plan)


@dataclass(frozen=True)
class Forecast:
    """A step as it should go.

    Args:
        sizes: images per micro-batch.
        timeline: of the schedule.
        one_chunk: the same stages one after another: a single micro-batch, nothing computed twice.
    """

    sizes: tuple[int, ...]
    timeline: Timeline
    one_chunk: Timeline

    @property
    def speedup(self) -> float:
        """How many times as fast as with the stages at work one at a time."""
        return self.one_chunk.makespan / self.timeline.makespan


def _plan(args: argparse.Namespace) -> int:
    from ringstrategy.bench.environment import describe

    environment = describe(_command(args))
    try:
        with _threads(args.threads):
            module = _build(args.model, args.size)
            sizes = _sizes(module, args)
            print(f"measuring {_title(args, sizes)}", file=sys.stderr, flush=True)
            chosen = _cut(module, args, chunks=len(sizes))
    except ValueError as error:
        print(f"ringstrategy plan: error: {error}", file=sys.stderr)
        return 2
    from ringstrategy.pipeline.table import stage_rows

    rows = stage_rows(chosen, module)
    forecast = _forecast(chosen, rows, sizes, args)
    _show(args, module, chosen, rows, forecast)
    if args.json:
        args.json.write_text(json.dumps(_as_json(environment, args, rows, forecast), indent=2) + "\n")
    if args.plot:
        from ringstrategy.pipeline.drawing import plot

        plot(forecast.timeline, args.plot, title=_title(args, sizes))
    return 0


def _build(model: str, size: int) -> nn.Module:
    """A classifier by name, with random weights: their values do not change what it costs.

    Raises:
        ValueError: there is none of that name, or torchvision is not installed.
    """
    try:
        from torchvision import models
    except ImportError as error:
        raise ValueError(f"the model {model!r} needs torchvision: pip install 'ringstrategy[recipes]'") from error
    names = models.list_models(module=models)
    if model not in names:
        near = difflib.get_close_matches(model.lower(), names, n=5, cutoff=0.5)
        hint = f"did you mean {', '.join(near)}?" if near else f"there are: {', '.join(names)}"
        raise ValueError(f"torchvision has no classifier {model!r}; {hint}")
    arguments: dict[str, Any] = {}
    if model.startswith("vit_"):  # these are made for one size of images
        arguments = {"image_size": size}
    elif model.startswith("maxvit_"):
        arguments = {"input_size": (size, size)}
    elif model in ("googlenet", "inception_v3"):  # a minute of random numbers nobody needs here
        arguments = {"init_weights": False}
    network: nn.Module = models.get_model(model, weights=None, **arguments)
    return network


def _sizes(module: nn.Module, args: argparse.Namespace) -> tuple[int, ...]:
    """Images per micro-batch, as the strategy chooses them."""
    from ringstrategy.pipeline.micro_batches import micro_batch_sizes
    from ringstrategy.pipeline.plan import least_rows

    return micro_batch_sizes(args.batch, args.chunks, least=least_rows(module))


def _cut(module: nn.Module, args: argparse.Namespace, chunks: int) -> Cut:
    """Measure the layers on a micro-batch, and cut.

    Raises:
        ValueError: the model cannot be cut like this, or does not take such images.
    """
    import torch

    from ringstrategy.pipeline.calls import Example, flatten_call
    from ringstrategy.pipeline.plan import choose_cut

    example = Example(*flatten_call((torch.randn(args.batch, 3, args.size, args.size),), {}))
    recompute = chunks > 1 and args.checkpoint != "never"
    try:
        return choose_cut(module, args.stages, args.balance, example, chunks, recompute)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(
            f"{args.model} cannot run on images of {args.size} x {args.size}, {-(-args.batch // chunks)} at a time:"
            f" {error}"
        ) from error


def _forecast(chosen: Cut, rows: Sequence[StageRow], sizes: tuple[int, ...], args: argparse.Namespace) -> Forecast:
    """Play the schedule with what was measured."""
    from ringstrategy.pipeline.costs import balance_costs
    from ringstrategy.pipeline.schedules import gpipe, one_f_one_b
    from ringstrategy.pipeline.stage import recomputed
    from ringstrategy.pipeline.timeline import simulate

    chunks = len(sizes)
    schedule = {"gpipe": gpipe, "1f1b": one_f_one_b}[args.schedule](args.stages, chunks)
    forward, backward = ([getattr(row, name) for row in rows] for name in ("forward", "backward"))
    _, there_and_back = balance_costs("time", [costs[-1] for costs in (chosen.costs or ())[:-1]])
    send = [seconds / 2 for seconds in there_and_back]
    again = [number for number in range(chunks) if recomputed(args.checkpoint, number, chunks)]
    timeline = simulate(schedule, forward, backward, send, recomputed=again)
    whole = sum(sizes) / sizes[0]
    one_chunk = ([whole * seconds for seconds in each] for each in (forward, backward, send))
    return Forecast(sizes, timeline, simulate(gpipe(args.stages, 1), *one_chunk))


def _show(
    args: argparse.Namespace, module: nn.Module, chosen: Cut, rows: Sequence[StageRow], forecast: Forecast
) -> None:
    from rich.console import Console

    from ringstrategy.pipeline.drawing import TimelineText
    from ringstrategy.pipeline.table import layer_table, stage_table
    from ringstrategy.pipeline.timeline import ideal_bubble
    from ringstrategy.quantities import format_time

    console = Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH, highlight=False)
    if args.layers:
        console.print(layer_table(chosen, module), "", sep="\n")
    timeline = forecast.timeline
    console.print(_title(args, forecast.sizes), "", stage_table(rows), "", TimelineText(timeline), "", sep="\n")
    console.print(
        f"predicted step  {format_time(timeline.makespan)}; with the stages at work one at a time"
        f" {format_time(forecast.one_chunk.makespan)} ({forecast.speedup:.2f}x)"
    )
    ideal = ideal_bubble(timeline.stages, timeline.micro_batches)
    console.print(
        f"bubble          {timeline.bubble * 100:.1f} %; with equal stages (K-1)/(M+K-1) = {ideal * 100:.1f} %"
    )


def _title(args: argparse.Namespace, sizes: tuple[int, ...]) -> str:
    rows = " or ".join(str(size) for size in sorted(set(sizes), reverse=True))
    return (
        f"{args.model}, {args.batch} images of {args.size} x {args.size} in {len(sizes)} micro-batches of {rows},"
        f" {args.schedule}, checkpoint={args.checkpoint}"
    )


def _as_json(
    environment: Mapping[str, Any], args: argparse.Namespace, rows: Sequence[StageRow], forecast: Forecast
) -> dict[str, Any]:
    from ringstrategy.pipeline.timeline import ideal_bubble

    timeline = forecast.timeline
    return {
        "environment": environment,
        "plan": {
            "model": args.model,
            "schedule": args.schedule,
            "checkpoint": args.checkpoint,
            "micro_batches": forecast.sizes,
            "balance": [len(row.layers) for row in rows],
            "step_s": timeline.makespan,
            "bubble": timeline.bubble,
            "ideal_bubble": ideal_bubble(timeline.stages, timeline.micro_batches),
            "one_chunk_s": forecast.one_chunk.makespan,
            "speedup": forecast.speedup,
        },
        "rows": [asdict(row) for row in rows],
        "spans": [
            {"stage": span.stage, "action": str(span.action), "start_s": span.start, "end_s": span.end}
            for span in timeline.spans
        ],
    }


def _command(args: argparse.Namespace) -> str:
    """The command that makes the same plan."""
    balance = args.balance if isinstance(args.balance, str) else ",".join(map(str, args.balance))
    return (
        f"ringstrategy plan --model {args.model} --stages {args.stages} --chunks {args.chunks}"
        f" --schedule {args.schedule} --batch {args.batch} --size {args.size} --balance {balance}"
        f" --checkpoint {args.checkpoint} --threads {args.threads}"
    )


def _balance(text: str) -> Balance:
    if text in ("time", "size", "memory"):
        return text  # type: ignore[return-value]
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(
            f"{text!r} is no balance; choose time, size, memory or a number of layers for each stage, e.g. 3,5"
        ) from None


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Measure with so many threads of the CPU."""
    import torch

    previous = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(previous)
