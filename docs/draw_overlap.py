"""Draw when gradients arrive and when buckets leave: ``python docs/draw_overlap.py``.

Times are made up; which gradients travel together is what :func:`ringstrategy.gradients.buckets.plan_buckets` says.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pictures import ALL_REDUCE, BACKWARD, IMAGES, MARK, bare, ruled, write

from ringstrategy.gradients.buckets import MIB, Spec, plan_buckets

# A backward of 20 ms whose gradients have 10 MiB in all, and what an all-reduce takes.
BACKWARD_MS, GRADIENTS_MIB = 20.0, 10
MESSAGE_MS, MIB_MS = 1.0, 1.5
_ALL = GRADIENTS_MIB * MIB


class Sent(NamedTuple):
    """The all-reduce of one bucket.

    Attributes:
        gradients: what is in it: numbers of layers, in the order in which they arrive.
        ready: when the last of them has arrived, in ms.
        begun: in ms.
        ended: in ms.
    """

    gradients: tuple[int, ...]
    ready: float
    begun: float
    ended: float


def send(layers: int, cap_bytes: int, first_cap_bytes: int = MIB) -> list[Sent]:
    """The all-reduces of one backward through equal layers, one after the other.

    Args:
        layers: how many; the last one's gradient comes first.
        cap_bytes: most bytes of a bucket.
        first_cap_bytes: the same for the first bucket.
    """
    numel = _ALL // layers // torch.float32.itemsize
    order = [Spec(layer, numel, torch.float32) for layer in reversed(range(layers))]
    arrived = {spec.index: (place + 1) * BACKWARD_MS / layers for place, spec in enumerate(order)}
    sent: list[Sent] = []
    for bucket in plan_buckets([order], cap_bytes, first_cap_bytes).buckets:
        gradients = tuple(slot.index for slot in bucket.slots)
        ready = max(arrived[gradient] for gradient in gradients)
        begun = max(ready, sent[-1].ended if sent else 0.0)
        mib = sum(slot.numel for slot in bucket.slots) * bucket.dtype.itemsize / MIB
        sent.append(Sent(gradients, ready, begun, begun + MESSAGE_MS + mib * MIB_MS))
    return sent


def exposed(sent: Sequence[Sent]) -> float:
    """For how long training waits when backward has ended, in ms."""
    return sent[-1].ended - BACKWARD_MS


# Ten layers of 1 MiB: what is drawn, from top to bottom.
WAYS = {
    "one all-reduce, at the end": send(10, _ALL, _ALL),
    "an all-reduce per gradient": send(10, 1),
    "buckets of at most 2 MiB": send(10, 2 * MIB),
    "buckets of at most 4 MiB": send(10, 4 * MIB),
}
# Forty layers of a quarter of a MiB: caps in MiB, and what is exposed.
CURVE = {mib / 4: exposed(send(40, mib * MIB // 4)) for mib in range(1, 4 * GRADIENTS_MIB + 1)}


def draw_ways() -> Figure:
    """Two lanes per way: backward, and the all-reduces."""
    figure = Figure(figsize=(7, 5.2), layout="constrained")
    panels = figure.subplots(len(WAYS), sharex=True)
    for axes, (name, sent) in zip(panels, WAYS.items(), strict=True):
        _panel(axes, name, sent)
    panels[-1].set_xlabel("time (ms)")
    panels[-1].set_xlim(0, 40)
    return figure


def _panel(axes: Axes, name: str, sent: Sequence[Sent]) -> None:
    bare(axes)
    layers = sum(len(bucket.gradients) for bucket in sent)
    for place, gradient in enumerate(gradient for bucket in sent for gradient in bucket.gradients):
        width = BACKWARD_MS / layers
        axes.barh(0, width, left=place * width, height=0.84, color=BACKWARD, edgecolor="white", linewidth=0.8)
        axes.text((place + 0.5) * width, 0, str(gradient), ha="center", va="center")
    for bucket in sent:
        width = bucket.ended - bucket.begun
        axes.barh(1, width, left=bucket.begun, height=0.84, color=ALL_REDUCE, edgecolor="white", linewidth=0.8)
        label = " ".join(map(str, bucket.gradients))
        axes.text(bucket.begun + width / 2, 1, label, ha="center", va="center")
    end = sent[-1].ended
    axes.annotate("", (end, 0), (BACKWARD_MS, 0), arrowprops={"arrowstyle": "<->", "color": MARK, "shrinkA": 0})
    axes.text(end + 0.3, 0, f"waits {exposed(sent):g} ms", color=MARK, va="center")
    axes.axvline(BACKWARD_MS, color=MARK, linewidth=1, linestyle=(0, (3, 2)), zorder=0)
    axes.set_ylim(1.5, -0.5)
    axes.set_yticks([0, 1], ["backward", "all-reduces"])
    axes.set_title(name, loc="left", fontsize=10, fontweight="bold")


def draw_curve() -> Figure:
    """What is exposed, by the size of a bucket."""
    figure = Figure(figsize=(6.2, 3), layout="constrained")
    axes = figure.subplots()
    axes.plot(list(CURVE), list(CURVE.values()), color="#1971c2", marker="o", markersize=4, linewidth=1.2)
    best = min(CURVE, key=lambda mib: CURVE[mib])
    axes.annotate(
        f"{CURVE[best]:.2f} ms with {best:g} MiB",
        (best, CURVE[best]),
        (best, 13),
        ha="center",
        color=MARK,
        arrowprops={"arrowstyle": "-|>", "color": MARK},
    )
    axes.text(0.29, CURVE[0.25], "messages cost", va="center")
    axes.text(10, CURVE[10] + 1.6, "hardly anything hides", ha="right")
    axes.set_xscale("log", base=2)
    axes.set_xticks([0.25, 0.5, 1, 2, 4, 8], ["¼", "½", "1", "2", "4", "8"])
    axes.set_ylim(0, None)
    axes.set_xlabel("most MiB of a bucket")
    ruled(axes, "Waiting for gradients after a backward of 20 ms (ms)")
    return figure


def main(folder: Path = IMAGES) -> None:
    """Draw all pictures of this script into a folder."""
    write(folder / "overlap.svg", lambda path: draw_ways().savefig(path))
    write(folder / "bucket-size.svg", lambda path: draw_curve().savefig(path))


if __name__ == "__main__":
    main()
