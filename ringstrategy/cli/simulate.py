"""``ringstrategy simulate``: what more ranks and other links would make of what was measured."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringstrategy.bench.sizes import format_size, parse_size, parse_sizes
from ringstrategy.cli.arguments import HelpFormatter, argument, output

if TYPE_CHECKING:
    from rich.table import Table

    from ringstrategy.cost_model import CostModel, Link, Sample
    from ringstrategy.step_model import StepModel

__all__ = ["add_parser", "parse_bandwidth", "parse_seconds"]

_PIPE_WIDTH = 120  # columns, where the output is no terminal
_WITHIN = 0.25
_BANDWIDTHS = {"kbit": 125.0, "mbit": 125e3, "gbit": 125e6, "kb": 1e3, "mb": 1e6, "gb": 1e9}
_TIMES = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
_SHARED_MEMORY, _HIERARCHICAL = "shared_memory", "hierarchical"
_CAPS = {_SHARED_MEMORY: 4 * 2**20}  # largest buckets, as the strategy chooses them
_CAP = 25 * 2**20


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add ``simulate`` to the command line.

    Args:
        subparsers: what ``ArgumentParser.add_subparsers()`` returned.
    """
    parser = subparsers.add_parser(
        "simulate",
        help="predict all-reduce and step time for more ranks and other links from measurements",
        description="Fit a cost model to results of `ringstrategy bench all-reduce --json`, check it on measurements"
        " that it has not seen, and predict the time of an all-reduce, and of a training step, for other sizes, numbers"
        " of ranks and hosts. What goes beyond the measurements is marked with a star.",
        epilog="example: ringstrategy simulate ranks2.json ranks4.json --ranks 2,4,8,16 --hosts 1,2 --bandwidth 10Gbit",
        formatter_class=HelpFormatter,
    )
    parser.add_argument("bench", type=_document, nargs="+", metavar="BENCH.json", help="one file per number of ranks")
    parser.add_argument("--ranks", type=argument(_numbers), default="2,4,8,16", help="over all hosts")
    parser.add_argument("--hosts", type=argument(_numbers), default="1", help="numbers of hosts")
    parser.add_argument("--sizes", type=argument(parse_sizes), help="of buffers; those that were measured by default")
    parser.add_argument(
        "--bandwidth", type=argument(parse_bandwidth), metavar="1Gbit", help="of each host's link, per direction"
    )
    parser.add_argument(
        "--latency", type=argument(parse_seconds), default="50us", metavar="50us", help="of a message between hosts"
    )
    parser.add_argument(
        "--train-step", type=_document, metavar="STEP.json", help="result of `ringstrategy bench train-step --json`"
    )
    parser.add_argument(
        "--gradients",
        type=argument(parse_size),
        metavar="SIZE",
        help="of a step; those of STEP.json's model by default",
    )
    parser.add_argument("--json", type=output, metavar="FILE", help="also write coefficients and predictions here")
    parser.set_defaults(func=_simulate)


@dataclass(frozen=True)
class Check:
    """A measurement that the model has not seen, and what it says of it."""

    collective: str
    ranks: int
    nbytes: int
    measured_s: float
    predicted_s: float

    @property
    def error(self) -> float:
        """Relative."""
        return self.predicted_s / self.measured_s - 1


@dataclass(frozen=True)
class Prediction:
    """The times of one all-reduce by the name of the collective, and in which ways each goes beyond measurements."""

    ranks: int
    hosts: int
    nbytes: float
    seconds: dict[str, float]
    extrapolated: dict[str, list[str]]

    @property
    def best(self) -> str:
        """The fastest."""
        return min(self.seconds, key=self.seconds.__getitem__)


@dataclass(frozen=True)
class StepPrediction:
    """A training step with the all-reduce that makes it shortest."""

    ranks: int
    hosts: int
    collective: str
    all_reduce_s: float
    step_s: float
    efficiency: float
    extrapolated: list[str]


def _simulate(args: argparse.Namespace) -> int:
    from ringstrategy.cost_model import Link, fit, read_samples

    if max(args.hosts) > 1 and args.bandwidth is None:
        return _fail("several hosts need --bandwidth, e.g. 10Gbit")
    link = None if args.bandwidth is None else Link(args.bandwidth, args.latency)
    try:
        samples = [sample for file, document in args.bench for sample in _named(file, read_samples, document)]
        by_collective: dict[str, list[Sample]] = {}
        for sample in samples:
            by_collective.setdefault(sample.collective, []).append(sample)
        models = {name: fit(own) for name, own in by_collective.items()}
        checks = [check for own in by_collective.values() for check in _check(own)]
        step, nbytes = _step(args)
    except ValueError as error:
        return _fail(str(error))
    places = [(ranks, hosts) for hosts in args.hosts for ranks in args.ranks if ranks >= max(hosts, 2)]
    sizes = args.sizes or sorted({sample.nbytes for sample in samples})
    predictions = [_predict(models, ranks, size, hosts, link) for ranks, hosts in places for size in sizes]
    predictions = [each for each in predictions if each.seconds]  # shared memory alone does not reach other hosts
    places = list(dict.fromkeys((each.ranks, each.hosts) for each in predictions))
    if not places:
        return _fail("nothing that was measured reaches other hosts; measure the backend as well")
    steps = [] if step is None else [_predict_step(models, step, nbytes, *place, link) for place in places]
    _show(models, checks, predictions, steps)
    if args.json:
        document = {
            "models": [asdict(model) for model in models.values()],
            "checks": [asdict(check) | {"error": check.error} for check in checks],
            "predictions": [asdict(each) for each in predictions],
            "steps": [asdict(each) for each in steps],
        }
        args.json.write_text(json.dumps(document, indent=2) + "\n")
    return 0


def _named(file: Path, read: Callable[[Any], Any], document: Any) -> Any:
    try:
        return read(document)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def _check(samples: Sequence[Sample]) -> list[Check]:
    """Fit some, predict the others."""
    from ringstrategy.cost_model import fit, hold_out

    fitted, held = hold_out(samples)
    if not held:
        return []
    model = fit(fitted)
    return [
        Check(each.collective, each.ranks, each.nbytes, each.seconds, model.seconds(each.ranks, each.nbytes))
        for each in held
    ]


def _step(args: argparse.Namespace) -> tuple[StepModel | None, float]:
    """What a step computes, and the bytes of its gradients."""
    from ringstrategy.bench.models import build_network, check_model
    from ringstrategy.step_model import read_step

    if args.train_step is None:
        return None, 0.0
    step: StepModel = _named(args.train_step[0], read_step, args.train_step[1])
    if args.gradients is not None:
        return step, float(args.gradients)
    try:
        check_model(step.model)
    except ValueError as error:
        raise ValueError(f"the size of the gradients is not known, give it with --gradients: {error}") from error
    network, _ = build_network(step.model, 32)
    return step, float(sum(parameter.numel() * parameter.element_size() for parameter in network.parameters()))


def _predict(models: dict[str, CostModel], ranks: int, nbytes: float, hosts: int, link: Link | None) -> Prediction:
    from ringstrategy.cost_model import hierarchical_seconds

    seconds, extrapolated = {}, {}
    for name, model in models.items():
        if hosts == 1 or name != _SHARED_MEMORY:
            seconds[name] = model.seconds(ranks, nbytes, hosts, link)
            extrapolated[name] = model.extrapolates(ranks, nbytes, hosts)
    memory, messages = models.get(_SHARED_MEMORY), models.get("backend", models.get("ring"))
    if 1 < hosts < ranks and memory is not None and messages is not None:
        assert link is not None
        seconds[_HIERARCHICAL] = hierarchical_seconds(memory, messages, ranks, nbytes, hosts, link)
        extrapolated[_HIERARCHICAL] = memory.extrapolates(-(-ranks // hosts), nbytes, hosts)
    return Prediction(ranks, hosts, nbytes, seconds, extrapolated)


def _predict_step(
    models: dict[str, CostModel], step: StepModel, nbytes: float, ranks: int, hosts: int, link: Link | None
) -> StepPrediction:
    from ringstrategy.step_model import bucketed

    def all_reduces(name: str) -> float:
        cap = _CAPS.get(name, _CAP)
        return bucketed(lambda size: _predict(models, ranks, size, hosts, link).seconds[name], nbytes, cap)

    names = _predict(models, ranks, nbytes, hosts, link).seconds
    seconds, name = min((all_reduces(name), name) for name in names)
    reasons = _predict(models, ranks, min(nbytes, _CAPS.get(name, _CAP)), hosts, link).extrapolated[name]
    here = -(-ranks // hosts)
    if here > step.ranks:
        reasons = [*reasons, "compute"]
    step_s, efficiency = step.seconds(here, seconds), step.efficiency(here, seconds)
    return StepPrediction(ranks, hosts, name, seconds, step_s, efficiency, reasons)


# -- what is shown ---------------------------------------------------------------------------------------------------


def _show(
    models: dict[str, CostModel],
    checks: Sequence[Check],
    predictions: Sequence[Prediction],
    steps: Sequence[StepPrediction],
) -> None:
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH, highlight=False)
    if checks:
        within = sum(abs(check.error) <= _WITHIN for check in checks)
        console.print(_check_table(checks))
        console.print(f"{within} of {len(checks)} within {_WITHIN:.0%}; all measurements are used from here on.\n")
    else:
        console.print("Not checked: that takes three sizes or three numbers of ranks, to hold the middle ones out.\n")
    names = [name for name in (*models, _HIERARCHICAL) if any(name in each.seconds for each in predictions)]
    console.print(_prediction_table(predictions, names))
    console.print("* extrapolated: other sizes, more or fewer ranks, or another link than was measured.")
    if steps:
        console.print("", _step_table(steps), sep="\n")
        console.print("* extrapolated, as above, or more ranks share a host than when the step was measured.")


def _check_table(checks: Sequence[Check]) -> Table:
    table = _table("Check: measured, and predicted from the other measurements", "collective")
    for name in ("ranks", "size", "measured", "predicted", "error"):
        table.add_column(name, justify="right")
    for check in checks:
        style = "red" if abs(check.error) > _WITHIN else ""
        row = (
            check.collective,
            str(check.ranks),
            format_size(check.nbytes),
            *map(_time, (check.measured_s, check.predicted_s)),
        )
        table.add_row(*row, f"{check.error:+.0%}", style=style)
    return table


def _prediction_table(predictions: Sequence[Prediction], names: Sequence[str]) -> Table:
    table = _table("All-reduce")
    for name in ("ranks", "hosts", "size", *names):
        table.add_column(name, justify="right")
    table.add_column("best")
    last = None
    for each in predictions:
        if last not in (None, (each.ranks, each.hosts)):
            table.add_section()
        last = each.ranks, each.hosts
        times = (
            _time(each.seconds[name]) + ("*" if each.extrapolated[name] else " ") if name in each.seconds else "- "
            for name in names
        )
        table.add_row(str(each.ranks), str(each.hosts), format_size(int(each.nbytes)), *times, each.best)
    return table


def _step_table(steps: Sequence[StepPrediction]) -> Table:
    table = _table("Training step")
    for name in ("ranks", "hosts", "all-reduces", "step", "efficiency"):
        table.add_column(name, justify="right")
    table.add_column("by")
    for each in steps:
        star = "*" if each.extrapolated else " "
        row = (str(each.ranks), str(each.hosts), _time(each.all_reduce_s), _time(each.step_s) + star)
        table.add_row(*row, f"{each.efficiency:.0%}", each.collective)
    return table


def _table(title: str, *names: str) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for name in names:
        table.add_column(name)
    return table


def _time(seconds: float) -> str:
    from ringstrategy.quantities import format_time

    return format_time(seconds)


# -- what is read ----------------------------------------------------------------------------------------------------


def _document(text: str) -> tuple[Path, Any]:
    path = Path(text)
    try:
        return path, json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} cannot be read as JSON: {error}") from None


def parse_bandwidth(text: str) -> float:
    """Read ``"1Gbit"`` or ``"125MB"``, per second.

    Returns:
        Bytes per second.

    Raises:
        ValueError: it is neither.
    """
    return _quantity(text, _BANDWIDTHS, "bandwidth; write it as 1Gbit, 100Mbit or 1.25GB (per second)")


def parse_seconds(text: str) -> float:
    """Read ``"50us"``, ``"1.5ms"`` or ``"2s"``.

    Raises:
        ValueError: it is none of them.
    """
    return _quantity(text, _TIMES, "time; write it as 50us, 1.5ms or 2s")


def _quantity(text: str, units: dict[str, float], what: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]+)", text.strip().lower())
    if match is None or match[2] not in units or float(match[1]) == 0:
        raise ValueError(f"{text!r} is no {what}")
    return float(match[1]) * units[match[2]]


def _numbers(text: str) -> tuple[int, ...]:
    numbers = tuple(int(part) if part.strip().isdecimal() else 0 for part in text.split(","))
    if min(numbers) < 1:
        raise ValueError(f"{text!r} is no list of whole numbers, as 2,4,8 is")
    return numbers


def _fail(message: str) -> int:
    print(f"ringstrategy simulate: error: {message}", file=sys.stderr)
    return 2
