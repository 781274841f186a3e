"""Draw the ring all-reduce step by step, and what it sends compared with others: ``python docs/draw_ring.py``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import Rectangle
from pictures import EDGE, IMAGES, INK, MARK, bare, ruled, write

from ringstrategy.collectives.chunks import ring_arrivals, segments, tree_links

RANKS = 4
# By how many ranks are in a sum, as a share of all: fill and ink.
_SHADES = (("#f1f3f5", INK), ("#d0ebff", INK), ("#74c0fc", INK), ("#1864ab", "#ffffff"))
_CELL, _GAP = 1.25, 0.6  # width of a cell, and between two ranks; a cell is 1 high


class Moment(NamedTuple):
    """All ranks after a step of a ring.

    Attributes:
        name: what has been done.
        values: by rank and shard.
        arrived: by rank, the shard that its left neighbour has just sent; none before the first step.
    """

    name: str
    values: list[list[Any]]
    arrived: tuple[int, ...] = ()


def start_values(ranks: int) -> list[list[int]]:
    """Numbers whose sums tell who is in them: 1, 2, 3 on rank 0, 10, 20, 30 on rank 1, and so on."""
    return [[10**rank * (shard + 1) for shard in range(ranks)] for rank in range(ranks)]


def play(values: Sequence[Sequence[Any]]) -> list[Moment]:
    """Sum over a ring, by the arithmetic that :mod:`ringstrategy.collectives.ring` follows.

    Args:
        values: by rank and shard; as many shards as ranks.

    Returns:
        The start, and one moment per step.
    """
    ranks = len(values)
    plans = [ring_arrivals(rank, ranks, numel=ranks, longest=1) for rank in range(ranks)]
    moments = [Moment("start", [list(own) for own in values])]
    for step in range(2 * (ranks - 1)):
        before, arrivals = moments[-1].values, [plan[step] for plan in plans]
        after = [list(own) for own in before]
        for rank, (shard, _, add, _) in enumerate(arrivals):
            sent = before[rank - 1][shard]  # rank 0's left neighbour is the last
            after[rank][shard] = sent + before[rank][shard] if add else sent
        half, number = ("reduce-scatter", step + 1) if arrivals[0].add else ("all-gather", step + 2 - ranks)
        moments.append(Moment(f"{half}, step {number}", after, tuple(arrival.start for arrival in arrivals)))
    return moments


def busiest(algorithm: str, ranks: int) -> float:
    """What the rank sends that sends most, in sizes of the buffer."""
    if algorithm == "ring":
        sent = []
        for rank in range(ranks):
            own = sum(stop - start for start, stop in segments(rank, ranks, ranks, 1))
            passed_on = sum(a.stop - a.start for a in ring_arrivals(rank, ranks, ranks, 1) if a.forward)
            sent.append((own + passed_on) / ranks)
        return max(sent)
    if algorithm == "tree":
        links = [tree_links(rank, ranks) for rank in range(ranks)]
        return float(max(len(children) + (parent is not None) for parent, children in links))
    return float(ranks - 1)  # the server sends the sum to each of the others


def draw_steps() -> Figure:
    """A panel per moment: reduce-scatter on the left, all-gather on the right."""
    start, *steps = play(start_values(RANKS))
    figure = Figure(figsize=(7, 7.6), layout=ConstrainedLayoutEngine(h_pad=0.09))
    panels = figure.subplots(RANKS, 2)
    _panel(panels[0, 0], start)
    _key(panels[0, 1])
    for row in range(1, RANKS):
        _panel(panels[row, 0], steps[row - 1])
        _panel(panels[row, 1], steps[row + RANKS - 2])
    return figure


def _panel(axes: Axes, moment: Moment) -> None:
    bare(axes)
    for rank, own in enumerate(moment.values):
        left = rank * (_CELL + _GAP)
        for shard, value in enumerate(own):
            fill, ink = _SHADES[sum(digit != "0" for digit in str(value)) - 1]
            axes.add_patch(Rectangle((left, shard), _CELL, 1, facecolor=fill, edgecolor=EDGE, linewidth=0.6))
            axes.text(left + _CELL / 2, shard + 0.53, str(value), ha="center", va="center", color=ink, fontsize=10)
    for rank, shard in enumerate(moment.arrived):
        left = rank * (_CELL + _GAP)
        axes.add_patch(Rectangle((left, shard), _CELL, 1, facecolor="none", edgecolor=MARK, linewidth=2, zorder=3))
        line = {"color": MARK, "linewidth": 1.6, "shrinkA": 0, "shrinkB": 0}
        axes.annotate("", (left, shard + 0.5), (left - _GAP, shard + 0.5), arrowprops={"arrowstyle": "-|>", **line})
    if moment.arrived:  # the last rank sends round to rank 0
        end, shard = len(moment.values) * (_CELL + _GAP) - _GAP, moment.arrived[0]
        axes.plot((end, end + _GAP * 0.75), (shard + 0.5, shard + 0.5), color=MARK, linewidth=1.6)
    shards = len(moment.values[0])
    axes.set_xlim(-_GAP - 0.05, len(moment.values) * (_CELL + _GAP) + 0.05)
    axes.set_ylim(shards + 0.02, -0.02)
    axes.set_xticks(
        [rank * (_CELL + _GAP) + _CELL / 2 for rank in range(len(moment.values))],
        [f"rank {rank}" for rank in range(len(moment.values))],
    )
    axes.xaxis.tick_top()
    axes.set_yticks([shard + 0.5 for shard in range(shards)], list("abcdefgh"[:shards]))
    axes.set_title(moment.name, loc="left", fontsize=11, fontweight="bold")


def _key(axes: Axes) -> None:
    bare(axes)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_xlim(0, 8)
    axes.set_ylim(6.2, -0.2)
    for number, (fill, ink) in enumerate(_SHADES):
        axes.add_patch(Rectangle((0.3, number), _CELL, 0.86, facecolor=fill, edgecolor=EDGE, linewidth=0.6))
        axes.text(0.3 + _CELL / 2, number + 0.45, "1" * (number + 1), ha="center", va="center", color=ink)
        words = "one rank's own" if number == 0 else f"the sum of {number + 1} ranks"
        axes.text(2.0, number + 0.45, words + (": done" if number + 1 == RANKS else ""), va="center")
    axes.annotate("", (1.55, 4.6), (0.3, 4.6), arrowprops={"arrowstyle": "-|>", "color": MARK, "linewidth": 1.6})
    axes.text(2.0, 4.6, "sent to the right neighbour;", va="center")
    axes.text(2.0, 5.35, "rank 3's is rank 0", va="center")


def draw_costs() -> Figure:
    """What the busiest rank sends, by the number of ranks."""
    figure = Figure(figsize=(6.2, 3.1), layout="constrained")
    axes = figure.subplots()
    ranks = range(2, 17)
    for algorithm, name, colour, marker in (
        ("naive", "parameter server", "#495057", "^"),
        ("tree", "tree", "#d9480f", "s"),
        ("ring", "ring", "#1971c2", "o"),
    ):
        sent = [busiest(algorithm, number) for number in ranks]
        axes.plot(ranks, sent, color=colour, marker=marker, markersize=4.5, linewidth=1.4)
        axes.text(16.4, sent[-1], name, color=colour, va="center", fontsize=10)
    axes.set_yscale("log", base=2)
    axes.set_yticks([1, 2, 4, 8, 16], ["1", "2", "4", "8", "16"])
    axes.set_xticks(range(2, 17, 2))
    axes.set_xlim(1.5, 20.5)
    axes.spines["bottom"].set_bounds(2, 16)
    axes.set_xlabel("ranks", x=0.4)
    ruled(axes, "What the busiest rank sends, in sizes of the buffer")
    return figure


def main(folder: Path = IMAGES) -> None:
    """Draw all pictures of this script into a folder."""
    write(folder / "ring-steps.svg", lambda path: draw_steps().savefig(path))
    write(folder / "ring-costs.svg", lambda path: draw_costs().savefig(path))


if __name__ == "__main__":
    main()
