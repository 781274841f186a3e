"""Draw steps of a pipeline and what its stages keep: ``python docs/draw_timelines.py``."""

from __future__ import annotations

from collections.abc import Container
from functools import partial
from pathlib import Path
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from pictures import EDGE, IMAGES, write

from ringstrategy.pipeline.drawing import plot
from ringstrategy.pipeline.schedules import gpipe, one_f_one_b
from ringstrategy.pipeline.timeline import Timeline, simulate

STAGES, MICRO_BATCHES = 4, 8
FORWARD_S, BACKWARD_S = 1e-3, 2e-3  # of one micro-batch through one stage
_ACTIVATIONS, _INPUTS = "#1971c2", "#e9ecef"


class Step(NamedTuple):
    """A step of a pipeline.

    Attributes:
        title: of its picture.
        timeline: what runs when.
        recomputed: micro-batches whose forward is run again in backward.
    """

    title: str
    timeline: Timeline
    recomputed: Container[int]


class Kept(NamedTuple):
    """What a stage keeps from a moment on, until the next.

    Attributes:
        time: in seconds.
        activations: of so many micro-batches.
        inputs: of so many more micro-batches, their inputs alone.
    """

    time: float
    activations: int
    inputs: int


def steps(stages: int = STAGES, micro_batches: int = MICRO_BATCHES) -> dict[str, Step]:
    """The steps that are drawn, by the name of the picture."""
    again = range(micro_batches - 1)
    play = partial(simulate, forward=[FORWARD_S] * stages, backward=[BACKWARD_S] * stages)
    return {
        "timeline-one": Step("One micro-batch", play(gpipe(stages, 1)), ()),
        "timeline-gpipe": Step("GPipe", play(gpipe(stages, micro_batches)), ()),
        "timeline-1f1b": Step("1F1B", play(one_f_one_b(stages, micro_batches)), ()),
        "timeline-recompute": Step(
            "GPipe, all but the last micro-batch computed twice",
            play(gpipe(stages, micro_batches), recomputed=again),
            again,
        ),
    }


def kept(step: Step) -> list[list[Kept]]:
    """By stage, what is kept from when to when.

    Activations live from the beginning of a forward to the end of the backward. Where a forward is run again, it is the
    input that lives until then, and the activations as long as that backward.
    """
    by_stage: list[list[Kept]] = []
    for stage in range(step.timeline.stages):
        changes: list[tuple[float, int, int]] = []
        for span in step.timeline.spans:
            again = span.action.micro_batch in step.recomputed
            if span.stage != stage:
                continue
            if span.action.kind == "F":
                changes.append((span.start, 0, 1) if again else (span.start, 1, 0))
            else:
                changes += [(span.start, 1, -1)] * again + [(span.end, -1, 0)]
        moments = [Kept(0.0, 0, 0)]
        for time in sorted({time for time, _, _ in changes}):
            _, activations, inputs = moments[-1]
            now = [change for change in changes if change[0] == time]
            moments.append(Kept(time, activations + sum(c[1] for c in now), inputs + sum(c[2] for c in now)))
        by_stage.append(moments)
    return by_stage


def draw_kept() -> Figure:
    """A column per way to run a step, a row per stage."""
    named = steps()
    columns = {
        "GPipe": named["timeline-gpipe"],
        "GPipe, computed twice": named["timeline-recompute"],
        "1F1B": named["timeline-1f1b"],
    }
    figure = Figure(figsize=(7, 4.4), layout="constrained")
    panels = figure.subplots(STAGES, len(columns), sharex=True, sharey=True)
    for column, (title, step) in enumerate(columns.items()):
        for stage, moments in enumerate(kept(step)):
            _panel(panels[stage, column], moments)
        panels[0, column].set_title(title, loc="left", fontsize=10, fontweight="bold")
        panels[-1, column].set_xlabel("time (ms)")
    for stage in range(STAGES):
        panels[stage, 0].set_ylabel(f"stage {stage}", rotation=0, ha="right", va="center")
    panels[0, 0].set_ylim(0, MICRO_BATCHES + 0.4)
    panels[0, 0].set_yticks([0, 4, 8])
    handles = [Patch(color=_ACTIVATIONS), Patch(facecolor=_INPUTS, edgecolor=EDGE, hatch="////", linewidth=0)]
    figure.legend(
        handles,
        ["activations of so many micro-batches", "their inputs only"],
        loc="outside upper left",
        ncols=2,
        frameon=False,
    )
    return figure


def _panel(axes: Axes, moments: list[Kept]) -> None:
    times = [moment.time * 1e3 for moment in moments]
    activations = [moment.activations for moment in moments]
    both = [moment.activations + moment.inputs for moment in moments]
    axes.fill_between(times, activations, step="post", color=_ACTIVATIONS, linewidth=0)
    if both != activations:
        axes.fill_between(
            times, activations, both, step="post", facecolor=_INPUTS, edgecolor=EDGE, hatch="////", linewidth=0
        )
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def main(folder: Path = IMAGES) -> None:
    """Draw all pictures of this script into a folder."""
    for name, step in steps().items():
        write(folder / f"{name}.svg", partial(plot, step.timeline, title=step.title))
    write(folder / "activations.svg", lambda path: draw_kept().savefig(path))


if __name__ == "__main__":
    main()
