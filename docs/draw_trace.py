"""Draw some steps of a trace that RingMonitor has written: ``python docs/draw_trace.py trace.json trace.png``."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch

_COLOURS = {
    "forward": "#74c0fc",
    "backward": "#ffa94d",
    "wait for gradients": "#fa5252",
    "optimizer": "#63e6be",
    "next batch": "#dee2e6",
    "monitor": "#adb5bd",
    "bucket": "#9775fa",
    "wait for": "#fcc2d7",
}
_HEIGHT = 0.8


def _inside(inner: dict[str, Any], outer: dict[str, Any]) -> bool:
    """Whether an event lies in another one of its lane."""
    alike = (inner["pid"], inner["tid"]) == (outer["pid"], outer["tid"])
    return alike and 0 <= inner["ts"] - outer["ts"] <= outer["dur"]


def draw(trace: dict[str, Any], steps: range) -> Figure:
    """One row per rank and lane, over the time of some steps."""
    events = trace["traceEvents"]
    names = {(e["name"], e["pid"], e["tid"]): e["args"].get("name") for e in events if e["ph"] == "M"}
    spans = [e for e in events if e["ph"] == "X"]
    lanes = sorted({(e["pid"], e["tid"]) for e in spans})
    within = [e for e in spans if e["args"].get("step") in steps and e["name"] != "next batch"]
    begun, ended = min(e["ts"] for e in within), max(e["ts"] + e["dur"] for e in within)
    figure = Figure(figsize=(11, 1.2 + 0.62 * len(lanes)), layout="constrained")
    axes = figure.subplots()
    used = {}
    for event in spans:
        colour = next((name for name in _COLOURS if event["name"].startswith(name)), None)
        if colour is None or event["ts"] + event["dur"] < begun or event["ts"] > ended:
            continue
        used[colour] = Patch(color=_COLOURS[colour])
        row, start, width = lanes.index((event["pid"], event["tid"])), (event["ts"] - begun) / 1e3, event["dur"] / 1e3
        nested = colour in ("wait for", "wait for gradients")
        height = _HEIGHT * (0.5 if nested else 1.0)
        axes.barh(row, width, left=start, height=height, color=_COLOURS[colour], edgecolor="white", linewidth=0.5)
        label = event["name"].removeprefix("bucket ").split(",")[0] if colour == "bucket" else event["name"]
        inner = (wait["ts"] for wait in spans if wait["name"] == "wait for gradients" != label and _inside(wait, event))
        room = (min(inner, default=event["ts"] + event["dur"]) - event["ts"]) / 1e3
        if colour != "wait for" and room / (ended - begun) * 1e3 > 0.0085 * len(label):
            axes.text(start + room / 2, row, label, ha="center", va="center", fontsize=8, clip_on=True)
    axes.set_xlim(0, (ended - begun) / 1e3)
    axes.set_yticks(
        range(len(lanes)), [f"{names['process_name', p, 0]}  {names['thread_name', p, t]}" for p, t in lanes]
    )
    axes.invert_yaxis()
    axes.set_xlabel("time (ms)")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)
    order = [name for name in _COLOURS if name in used]
    labels = [{"bucket": "all-reduce of a bucket", "wait for": "wait for another rank"}.get(n, n) for n in order]
    axes.legend(
        [used[n] for n in order],
        labels,
        ncols=8 if len(order) < 6 else 4,
        loc="lower left",
        bbox_to_anchor=(0, 1),
        frameon=False,
        fontsize=8,
    )
    return figure


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--steps", type=int, nargs=2, default=(5, 7), metavar=("FIRST", "END"), help="default: 5 7")
    arguments = parser.parse_args()
    draw(json.loads(arguments.trace.read_text()), range(*arguments.steps)).savefig(arguments.picture, dpi=130)
