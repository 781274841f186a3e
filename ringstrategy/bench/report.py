"""Results as tables and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.table import Table

from ringstrategy.bench.all_reduce import AllReduceRow
from ringstrategy.bench.pipeline import PipelineRow
from ringstrategy.bench.sizes import format_size
from ringstrategy.bench.train_step import Contender, TrainStepRow
from ringstrategy.quantities import format_bytes, format_time

__all__ = ["all_reduce_table", "pipeline_table", "train_step_table", "write_json"]

_BASELINE = "backend"


def all_reduce_table(rows: Sequence[AllReduceRow]) -> Table:
    """One line per size and collective, with the speed relative to the backend's own all-reduce where it was run.

    Where ``measure`` has chosen, a column marks what, and the caption says how far that is from the best at most.
    """
    backend_s = {row.bytes: row.median_s for row in rows if row.collective == _BASELINE}
    table = Table(title=f"all-reduce, {rows[0].ranks} ranks (GB = 1e9 bytes)")
    table.add_column("size", justify="right")
    table.add_column("collective")
    chosen = any(row.chosen for row in rows)
    for name in (
        *("time", "algbw GB/s", "busbw GB/s"),
        *(["vs backend"] if backend_s else []),
        *(["measure"] if chosen else []),
    ):
        table.add_column(name, justify="right")
    if chosen:
        table.caption = f"what 'measure' chose is at most {_most_behind(rows):.0%} behind the best of its size"
    last = None
    for row in rows:
        if last not in (None, row.bytes):
            table.add_section()
        ratio = [f"{backend_s[row.bytes] / row.median_s:.2f}x"] if backend_s else []
        table.add_row(
            format_size(row.bytes) if row.bytes != last else "",
            row.collective,
            format_time(row.median_s),
            f"{row.algbw_GBps:.2f}",
            f"{row.busbw_GBps:.2f}",
            *ratio,
            *(["chosen" if row.chosen else ""] if chosen else []),
        )
        last = row.bytes
    return table


def _most_behind(rows: Sequence[AllReduceRow]) -> float:
    """By which part of its time a chosen collective is slower than the fastest of the same size, at most."""
    best_s = {row.bytes: min(other.median_s for other in rows if other.bytes == row.bytes) for row in rows}
    return max(row.median_s / best_s[row.bytes] - 1 for row in rows if row.chosen)


def train_step_table(rows: Sequence[TrainStepRow]) -> Table:
    """One line per strategy, its speed relative to each ``ddp`` and its overhead over each ``none``."""
    of_base = {base: [row for row in rows if Contender.parse(row.strategy).base == base] for base in ("ddp", "none")}
    counted = any(row.all_reduce_s is not None for row in rows)
    table = Table(title=f"training step, {rows[0].model}, {rows[0].ranks} ranks of one thread")
    table.add_column("strategy")
    for name in (
        "step",
        "rounds",
        *(f"vs {row.strategy}" for row in of_base["ddp"]),
        *(f"over {row.strategy}" for row in of_base["none"]),
        *(["all-reduce", "exposed", "copies"] if counted else []),
        "peak PSS MiB",
    ):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row.strategy,
            format_time(row.median_s),
            f"{min(row.rounds_s) * 1e3:.1f} to {max(row.rounds_s) * 1e3:.1f} ms",
            *(f"{other.median_s / row.median_s:.2f}x" for other in of_base["ddp"]),
            *(f"{row.median_s / other.median_s - 1:+.0%}" for other in of_base["none"]),
            *(map(_optional, (row.all_reduce_s, row.exposed_s, row.copy_s)) if counted else ()),
            f"{row.peak_pss_MiB:.0f}",
        )
    return table


def pipeline_table(rows: Sequence[PipelineRow]) -> Table:
    """One line per number of chunks and variant, with what it is measured against.

    Each of ours has its speed relative to torch's of the same schedule and chunks; all have theirs relative to the
    naive one, and what the step takes longer than the critical path.
    """
    median_s = {(row.variant, row.chunks): row.median_s for row in rows}
    naive_s = next((row.median_s for row in rows if row.variant == "naive"), None)
    first = rows[0]
    table = Table(
        title=f"pipeline of {first.stages} stages of one thread ({' + '.join(map(str, first.balance))} layers),"
        f" {first.model}, batch {first.batch}"
    )
    table.add_column("chunks", justify="right")
    table.add_column("variant")
    for name in ("step", "rounds", "vs torch", "vs naive", "critical\npath", "over\nit", "bubble", "ideal", "sent"):
        table.add_column(name, justify="right")
    table.add_column("peak PSS,\nMiB by rank", justify="right")
    last = None
    for row in rows:
        if last not in (None, row.chunks):
            table.add_section()
        table.add_row(
            str(row.chunks) if row.chunks != last else "",
            row.variant,
            format_time(row.median_s),
            f"{min(row.rounds_s) * 1e3:.1f} to {max(row.rounds_s) * 1e3:.1f} ms",
            _ratio(median_s.get((f"torch_{row.variant}", row.chunks)), row.median_s),
            _ratio(naive_s, row.median_s),
            format_time(row.critical_s),
            f"{row.median_s / row.critical_s - 1:+.1%}",
            f"{row.bubble:.1%}",
            f"{row.ideal_bubble:.1%}",
            format_bytes(row.sent_bytes),
            ", ".join(f"{peak:.0f}" for peak in row.peak_pss_MiB),
        )
        last = row.chunks
    return table


def _ratio(other_s: float | None, own_s: float) -> str:
    return "-" if other_s is None else f"{other_s / own_s:.2f}x"


def _optional(seconds: float | None) -> str:
    return "-" if seconds is None else format_time(seconds)


def write_json(
    path: Path,
    environment: dict[str, str | float],
    rows: Sequence[AllReduceRow] | Sequence[TrainStepRow] | Sequence[PipelineRow],
) -> None:
    """Write ``{"environment": {...}, "rows": [...]}``."""
    path.write_text(json.dumps({"environment": environment, "rows": [asdict(row) for row in rows]}, indent=2) + "\n")
