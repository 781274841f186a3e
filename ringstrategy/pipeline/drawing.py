"""A timeline as text in the terminal and as a picture."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.text import Text

from ringstrategy.pipeline.timeline import Span, Timeline, ideal_bubble
from ringstrategy.quantities import format_time

__all__ = ["TimelineText", "caption", "plot"]

# Fill and ink; two shades for each kind, in turn, tell neighbours apart. Forwards are blue, backwards orange.
_SHADES: dict[Literal["F", "B"], tuple[tuple[str, str], tuple[str, str]]] = {
    "F": (("#1971c2", "#ffffff"), ("#74c0fc", "#000000")),
    "B": (("#d9480f", "#ffffff"), ("#ffa94d", "#000000")),
}
_KINDS: tuple[tuple[Literal["F", "B"], str], ...] = (("F", "forward"), ("B", "backward"))
_IDLE, _PLAIN = "·", "━"
_NARROWEST = 20  # columns of time, however narrow the terminal is
_TICKS = (0.0, 1.0, 0.5, 0.25, 0.75)  # of the step; the first ones are the most wanted

# Of the picture, in inches: how wide a row is, how high, and what stands around the rows.
_WIDTH, _HEIGHT, _AROUND = 9.2, 0.42, 1.1
# Labels, in points: as large as their cells allow, or left out. A character takes about 0.7 of its size.
_LARGEST, _SMALLEST, _CHARACTER = 8.5, 5.0, 0.7 / 72


def caption(timeline: Timeline) -> str:
    """Sum a timeline up: ``"4 stages, 8 micro-batches: 130 ms, bubble 31.2 % (ideal 27.3 %)"``."""
    stages, micro_batches = timeline.stages, timeline.micro_batches
    ideal = ideal_bubble(stages, micro_batches)
    return (
        f"{stages} stage{'s'[: stages > 1]}, {micro_batches} micro-batch{'es' if micro_batches > 1 else ''}:"
        f" {format_time(timeline.makespan)}, bubble {timeline.bubble * 100:.1f} % (ideal {ideal * 100:.1f} %)"
    )


@dataclass(frozen=True, slots=True)
class TimelineText:
    """A timeline for a rich console: one row per stage, as wide as the console, time to the right.

    Args:
        timeline: what to draw.
    """

    timeline: Timeline

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        coloured = console.color_system is not None and not console.no_color
        heads = [f"stage {stage}  " for stage in range(self.timeline.stages)]
        margin = len(heads[-1])
        columns = max(options.max_width - margin, _NARROWEST)
        makespan = self.timeline.makespan
        per_second = columns / makespan if makespan else 0.0
        for stage, head in enumerate(heads):
            row = Text(head.rjust(margin), no_wrap=True, overflow="crop")
            for text, style in self._cells(stage, columns, per_second, coloured):
                row.append(text, style)
            yield row
        yield Text(" " * margin + _axis(columns, makespan), style="dim", no_wrap=True, overflow="crop")
        legend = Text(" " * margin)
        for kind, name in _KINDS:
            legend.append(f" {kind} ", _style(kind, 0) if coloured else "").append(f" {name}   ")
        yield legend.append(f"{_IDLE * 3} bubble", "dim")

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(_NARROWEST, options.max_width)

    def _cells(self, stage: int, columns: int, per_second: float, coloured: bool) -> Iterator[tuple[str, str]]:
        """The row of one stage, as pieces of text and their styles."""
        origin, position = self.timeline.start, 0
        for span in _of_stage(self.timeline, stage):
            start, end = (round((time - origin) * per_second) for time in (span.start, span.end))
            yield _IDLE * (start - position), "dim"
            width, label = end - start, str(span.action)
            label = label if len(label) <= width else span.action.kind[:width]
            if coloured:
                yield label.center(width), _style(span.action.kind, span.action.micro_batch)
            else:
                yield label.ljust(width, _PLAIN), ""
            position = end
        yield _IDLE * (columns - position), "dim"


def _axis(columns: int, makespan: float) -> str:
    """Times under the rows, each below its moment, as many as there is room for."""
    line = " " * columns
    digits = sum(makespan * 1e3 < limit for limit in (1000, 100, 10))
    for tick in _TICKS:
        label = f"{tick * makespan * 1e3:.{digits}f}" + (" ms" if tick == 1 else "")
        start = min(max(round(tick * columns - len(label) / 2), 0), columns - len(label))
        end = start + len(label)
        if not line[max(start - 2, 0) : end + 2].strip():
            line = line[:start] + label + line[end:]
    return line


def plot(timeline: Timeline, path: Path, title: str | None = None) -> None:
    """Draw a timeline as a picture. Needs matplotlib, which comes with the ``recipes`` extra.

    Args:
        timeline: what to draw.
        path: of the picture; its suffix says which format.
        title: what stands above the caption, e.g. model and schedule.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(_WIDTH + 0.8, _AROUND + _HEIGHT * timeline.stages), layout="constrained")
    axes = figure.subplots()
    stages, origin, makespan = range(timeline.stages), timeline.start, timeline.makespan * 1e3
    rows = [makespan] * len(stages)
    bubble = axes.barh(stages, rows, height=0.86, color="#f1f3f5", edgecolor="#ced4da", linewidth=0, hatch="/////")
    for stage in stages:
        sizes = {kind: _label_size(timeline, stage, kind) for kind, _ in _KINDS}
        for span in _of_stage(timeline, stage):
            kind, label = span.action.kind, str(span.action)
            fill, ink = _SHADES[kind][span.action.micro_batch % 2]
            start, width = (span.start - origin) * 1e3, (span.end - span.start) * 1e3
            axes.barh(stage, width, left=start, height=0.86, color=fill, edgecolor="#ffffff", linewidth=0.6)
            if sizes[kind] >= _SMALLEST:
                axes.text(start + width / 2, stage, label, ha="center", va="center", color=ink, fontsize=sizes[kind])
    axes.set_xlim(0, makespan or 1)
    axes.set_ylim(timeline.stages - 0.5, -0.5)
    axes.set_yticks(stages, [f"stage {stage}" for stage in stages])
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("time (ms)")
    axes.set_title("\n".join(filter(None, (title, caption(timeline)))), loc="left", fontsize=11)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    handles = [*(Patch(color=_SHADES[kind][0][0]) for kind, _ in _KINDS), bubble.patches[0]]
    axes.legend(
        handles,
        [*(name for _, name in _KINDS), "bubble"],
        loc="lower right",
        bbox_to_anchor=(1, 1),
        borderaxespad=0,
        ncols=3,
        frameon=False,
        handlelength=1.4,
        columnspacing=1.4,
    )
    figure.savefig(path, dpi=150)


def _label_size(timeline: Timeline, stage: int, kind: Literal["F", "B"]) -> float:
    """The size, in points, at which every cell of a kind in a row has room for its label."""
    cells = [span for span in _of_stage(timeline, stage) if span.action.kind == kind]
    narrowest = min(((span.end - span.start) / len(str(span.action)) for span in cells), default=0.0)
    return min(_LARGEST, narrowest * _WIDTH / _CHARACTER / (timeline.makespan or 1.0))


def _of_stage(timeline: Timeline, stage: int) -> list[Span]:
    return sorted((span for span in timeline.spans if span.stage == stage), key=lambda span: span.start)


def _style(kind: Literal["F", "B"], micro_batch: int) -> str:
    fill, ink = _SHADES[kind][micro_batch % 2]
    return f"{ink} on {fill}"
