"""Results as pictures. Needs matplotlib, which comes with the ``recipes`` extra."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from ringstrategy.bench.all_reduce import AllReduceRow
from ringstrategy.bench.pipeline import PipelineRow
from ringstrategy.bench.sizes import format_size
from ringstrategy.bench.train_step import Contender, TrainStepRow
from ringstrategy.quantities import format_time

__all__ = ["plot_all_reduce", "plot_pipeline", "plot_train_step"]

# Ours in a strong colour, what it is measured against in quiet ones.
_OURS, _OTHERS, _FLOOR = "#d9480f", ("#495057", "#1971c2", "#2f9e44", "#9c36b5", "#f08c00"), "#adb5bd"
# Of a pipeline: colour, dashes and marker. Ours are warm, torch's are cool.
_LINES = {
    "gpipe": (_OURS, "-", "o"),
    "1f1b": ("#f59f00", "--", "s"),
    "torch_gpipe": (_OTHERS[0], "-", "o"),
    "torch_1f1b": (_OTHERS[1], "--", "s"),
    "naive": (_FLOOR, "-", ""),
}


def plot_all_reduce(rows: Sequence[AllReduceRow], path: Path) -> None:
    """Bus bandwidth over size, one line per collective.

    Args:
        rows: of one measurement.
        path: of the picture; its suffix says which format.
    """
    figure = Figure(figsize=(7.2, 4.4), layout="constrained")
    axes = figure.subplots()
    others = iter(_OTHERS * len(rows))
    for name in dict.fromkeys(row.collective for row in rows):
        line = sorted((row for row in rows if row.collective == name), key=lambda row: row.bytes)
        colour = next(others) if name == "backend" or name != rows[0].collective else _OURS
        sizes, bandwidths = [row.bytes for row in line], [row.busbw_GBps for row in line]
        axes.plot(sizes, bandwidths, marker="o", markersize=5, linewidth=1.8, color=colour, label=name)
    sizes = sorted({row.bytes for row in rows})
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(sizes))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: format_size(round(size))))
    axes.tick_params(axis="x", labelrotation=45 if len(sizes) > 9 else 0)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("buffer size")
    axes.set_ylabel("bus bandwidth (GB/s, 1 GB = 10⁹ bytes)")
    axes.set_title(f"All-reduce between {rows[0].ranks} ranks", loc="left")
    axes.legend(frameon=False)
    _tidy(axes, grid="both")
    figure.savefig(path, dpi=150)


def plot_train_step(rows: Sequence[TrainStepRow], path: Path) -> None:
    """Time per step and peak memory, one bar per strategy; a thin line spans the rounds.

    Args:
        rows: of one measurement.
        path: of the picture; its suffix says which format.
    """
    figure = Figure(figsize=(9.0, 1.5 + 0.5 * len(rows)), layout="constrained")
    times, memory = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    names = [row.strategy for row in rows]
    colours = [_colour(row) for row in rows]

    milliseconds = [row.median_s * 1e3 for row in rows]
    below = [(row.median_s - min(row.rounds_s)) * 1e3 for row in rows]
    above = [(max(row.rounds_s) - row.median_s) * 1e3 for row in rows]
    times.barh(names, milliseconds, color=colours, height=0.62)
    times.errorbar(milliseconds, names, xerr=[below, above], fmt="none", ecolor="#212529", elinewidth=1, capsize=3)
    for row, value, right in zip(rows, milliseconds, above, strict=True):
        times.annotate(
            format_time(row.median_s), (value + right, row.strategy), (5, 0), textcoords="offset points", va="center"
        )
    times.set_xlim(right=1.18 * max(map(sum, zip(milliseconds, above, strict=True))))
    times.set_xlabel("time per training step (ms)")
    times.invert_yaxis()

    peaks = [row.peak_pss_MiB for row in rows]
    memory.barh(names, peaks, color=colours, height=0.62)
    for name, peak in zip(names, peaks, strict=True):
        memory.annotate(f"{peak:.0f}", (peak, name), (5, 0), textcoords="offset points", va="center")
    memory.set_xlim(right=1.18 * max(peaks))
    memory.set_xlabel("peak memory per rank (PSS, MiB)")

    for axes in (times, memory):
        _tidy(axes, grid="x")
        axes.tick_params(axis="y", length=0)
    times.set_title(f"{rows[0].model}, {rows[0].ranks} ranks of one thread", loc="left")
    figure.savefig(path, dpi=150)


def plot_pipeline(rows: Sequence[PipelineRow], path: Path) -> None:
    """Time per step, bubble and peak memory over the number of micro-batches, one line per variant.

    Args:
        rows: of one measurement.
        path: of the picture; its suffix says which format.
    """
    figure = Figure(figsize=(11.0, 4.2))
    figure.set_layout_engine("constrained", wspace=0.06)
    times, bubbles, memory = figure.subplots(1, 3)
    chunks = sorted({row.chunks for row in rows if row.variant != "naive"}) or [1]
    for name in dict.fromkeys(row.variant for row in rows):
        line = sorted((row for row in rows if row.variant == name), key=lambda row: row.chunks)
        across = [row.chunks for row in line]
        if name == "naive":  # it has one micro-batch, however many the others have
            across, line = chunks, line * len(chunks)
        colour, dashes, marker = _LINES[name]
        for axes, values in (
            (times, [row.median_s * 1e3 for row in line]),
            (bubbles, [row.bubble * 100 for row in line]),
            (memory, [max(row.peak_pss_MiB) for row in line]),
        ):
            axes.plot(across, values, color=colour, linestyle=dashes, marker=marker, markersize=5, label=name)
        times.fill_between(
            across,
            [min(row.rounds_s) * 1e3 for row in line],
            [max(row.rounds_s) * 1e3 for row in line],
            color=colour,
            alpha=0.12,
            linewidth=0,
        )
    ideal = {row.chunks: row.ideal_bubble * 100 for row in rows}
    bubbles.plot(chunks, [ideal[count] for count in chunks], color="#212529", linewidth=1, label="(K-1)/(M+K-1)")
    for axes, what in (
        (times, "time per step (ms)"),
        (bubbles, "bubble (%)"),
        (memory, "peak memory of the largest rank (PSS, MiB)"),
    ):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_locator(FixedLocator(chunks))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda count, _: str(round(count))))
        axes.set_xmargin(0.08)
        axes.set_ylim(bottom=0, top=1.06 * axes.get_ylim()[1])
        axes.set_xlabel("micro-batches M")
        axes.set_ylabel(what)
        _tidy(axes, grid="y")
    times.set_title(f"{rows[0].model}, batch {rows[0].batch}, {rows[0].stages} stages of one thread", loc="left")
    figure.legend(
        *bubbles.get_legend_handles_labels(), loc="outside lower center", ncols=len(_LINES) + 1, frameon=False
    )
    figure.savefig(path, dpi=150)


def _colour(row: TrainStepRow) -> str:
    return {"ring_ddp": _OURS, "none": _FLOOR}.get(Contender.parse(row.strategy).base, _OTHERS[0])


def _tidy(axes: Axes, grid: str) -> None:
    axes.grid(axis=grid, color="#dee2e6", linewidth=0.8)  # type: ignore[arg-type]
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
