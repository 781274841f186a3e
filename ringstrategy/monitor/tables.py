"""The costs and the buckets as tables for the terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.table import Table

from ringstrategy.monitor.costs import RankCosts, bubble
from ringstrategy.quantities import format_bytes, format_time
from ringstrategy.recorder import BucketContents

__all__ = ["costs_table", "plan_table"]

_Quantity = tuple[str, Callable[[RankCosts], float], Callable[[float], str]]

_EXPOSED = "not hidden behind backward"
_PER_STEP: tuple[_Quantity, ...] = (
    ("step", lambda rank: rank.seconds, format_time),
    ("sent", lambda rank: rank.communication.bytes_sent, format_bytes),
    ("buckets", lambda rank: rank.communication.all_reduces, lambda count: f"{count:.3g}"),
    ("all-reduce", lambda rank: rank.all_reduce_seconds, format_time),
    (_EXPOSED, lambda rank: rank.communication.exposed_seconds, format_time),
    ("copies into buckets", lambda rank: rank.communication.copy_seconds, format_time),
    ("waiting for the slowest rank", lambda rank: rank.waited_seconds, format_time),
)


def costs_table(costs: Sequence[RankCosts], title: str) -> Table:
    """One line per quantity: the mean over ranks, the lowest and the highest of them.

    Args:
        costs: by rank; of at least one step.
        title: above the table.
    """
    table = Table(title=title, title_justify="left", caption_justify="left")
    table.add_column("per step")
    for heading in ("mean", "lowest", "highest"):
        table.add_column(heading, justify="right", no_wrap=True)
    pipeline = any(rank.available for rank in costs)
    for name, total, written in _PER_STEP:
        if pipeline and name == _EXPOSED:
            name = "waiting for other stages, or for gradients"
        _add_row(table, name, [total(rank) / rank.steps for rank in costs], written)
    if not pipeline and all(rank.all_reduce_seconds for rank in costs):
        rates = [rank.communication.bytes_sent / rank.all_reduce_seconds / 1e9 for rank in costs]
        _add_row(table, "bus bandwidth", rates, lambda rate: f"{rate:.3g} GB/s")
    compared = max(rank.compared for rank in costs)
    notes = []
    if compared and len(costs) > 1:
        slowest = max(range(len(costs)), key=lambda rank: costs[rank].slowest)
        notes.append(f"slowest: rank {slowest}, in {costs[slowest].slowest / compared:.0%} of {compared} steps")
    if (idle := bubble(costs)) is not None:
        notes.append(f"pipeline bubble: {idle:.1%}")
    table.caption = "\n".join(notes) or None
    return table


def _add_row(table: Table, name: str, values: Sequence[float], written: Callable[[float], str]) -> None:
    if not any(values):
        return  # nothing of the kind, or nobody counts it
    lowest, highest = (choose(range(len(values)), key=lambda rank: values[rank]) for choose in (min, max))
    mean = written(sum(values) / len(values))
    if written(values[lowest]) == written(values[highest]):
        table.add_row(name, mean)
    else:
        table.add_row(name, mean, *(f"{written(values[rank])} (rank {rank})" for rank in (lowest, highest)))


def plan_table(plan: Sequence[BucketContents]) -> Table:
    """One line per bucket, in the order in which they leave, with the names of its parameters."""
    table = Table(title="Gradient buckets, in the order in which they leave", title_justify="left")
    table.add_column("bucket", justify="right")
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("dtype", no_wrap=True)
    table.add_column("parameters", overflow="fold")
    for number, bucket in enumerate(plan):
        table.add_row(str(number), format_bytes(bucket.nbytes), bucket.dtype, ", ".join(bucket.parameters))
    return table
