"""The plan of a pipeline as a table: one line per stage, or one per layer."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from torch import nn

from ringstrategy.pipeline.plan import Cut
from ringstrategy.pipeline.tracing import Layer
from ringstrategy.quantities import format_bytes, format_count, format_time

__all__ = ["StageRow", "as_text", "layer_table", "stage_rows", "stage_table"]

T = TypeVar("T")
_UNKNOWN = "-"
_RANGE, _NAME = "from … to", "layer"  # columns of names


@dataclass(frozen=True, slots=True)
class StageRow:
    """What one stage holds, computes and sends. What is not known is None.

    Args:
        stage: its number, from 0.
        layers: names of its layers, at least one, in the order in which they run.
        parameters: number of elements of its parameters.
        forward: seconds of one micro-batch's forward.
        backward: seconds of one micro-batch's backward, without recompute.
        activations: bytes that one micro-batch keeps for its backward.
        sends: bytes that one micro-batch passes on to the next stage; None for the last stage.
        rank: who runs the stage.
    """

    stage: int
    layers: tuple[str, ...]
    parameters: int
    forward: float | None = None
    backward: float | None = None
    activations: int | None = None
    sends: int | None = None
    rank: int | None = None

    @property
    def seconds(self) -> float | None:
        """Forward and backward of one micro-batch, in seconds."""
        return None if self.forward is None or self.backward is None else self.forward + self.backward


def stage_rows(chosen: Cut, module: nn.Module, ranks: Sequence[int] | None = None) -> list[StageRow]:
    """What each stage of a cut module holds, computes and sends.

    Args:
        chosen: where the module is cut.
        module: the module; its parameters may be on the meta device.
        ranks: who runs each stage.

    Returns:
        One row per stage.
    """
    rows = []
    for stage, layers in enumerate(chosen.layers):
        row = StageRow(
            stage=stage,
            layers=tuple(layer.name for layer in layers),
            parameters=_parameters(module, layers),
            rank=None if ranks is None else ranks[stage],
        )
        if chosen.costs is not None:
            costs = chosen.costs[stage]
            row = replace(
                row,
                forward=sum(cost.forward for cost in costs),
                backward=sum(cost.backward for cost in costs),
                activations=sum(cost.activation_bytes for cost in costs),
                sends=costs[-1].output_bytes if stage + 1 < len(chosen.layers) else None,
            )
        rows.append(row)
    return rows


def stage_table(rows: Sequence[StageRow], title: str | None = None) -> Table:
    """One line per stage. What is known of no stage has no column.

    Args:
        rows: of all stages.
        title: what stands above.

    Returns:
        The table.
    """
    slowest = max((row.seconds for row in rows if row.seconds is not None), default=0.0)
    columns = {
        "stage": [str(row.stage) for row in rows],
        "rank": [_known(row.rank, str) for row in rows],
        "layers": [str(len(row.layers)) for row in rows],
        _RANGE: [" … ".join(dict.fromkeys((row.layers[0], row.layers[-1]))) for row in rows],
        "params": [format_count(row.parameters) for row in rows],
        "fwd+bwd": [_known(row.seconds, format_time) for row in rows],
        "of\nslowest": [_known(row.seconds, lambda time: f"{time / (slowest or 1):.0%}") for row in rows],
        "acti-\nvations": [_known(row.activations, format_bytes) for row in rows],
        "sends": [_known(row.sends, format_bytes) for row in rows],
    }
    table = _table({name: cells for name, cells in columns.items() if set(cells) != {_UNKNOWN}})
    table.title = title
    if slowest:
        table.caption = "times and bytes are those of one micro-batch"
    return table


def layer_table(chosen: Cut, module: nn.Module) -> Table:
    """One line per layer: what there is to choose from for a balance by hand.

    Args:
        chosen: where the module is cut, with measured costs.
        module: the module.

    Returns:
        The table; times and bytes are those of one micro-batch, "cut sends" what a cut after the layer would send.
    """
    lines = [
        (
            str(stage),
            layer.name,
            format_count(_parameters(module, [layer])),
            format_time(cost.forward + cost.backward),
            format_bytes(cost.activation_bytes),
            format_bytes(cost.output_bytes),
        )
        for stage, (layers, costs) in enumerate(zip(chosen.layers, chosen.costs or (), strict=True))
        for layer, cost in zip(layers, costs, strict=True)
    ]
    names = ("stage", _NAME, "params", "fwd+bwd", "activations", "cut sends")
    return _table(dict(zip(names, map(list, zip(*lines, strict=True)), strict=True)))


def as_text(table: Table, width: int = 100) -> str:
    """A table for a log: without colours, and without spaces at the ends of its lines.

    Args:
        table: any table.
        width: columns of the text, at most.

    Returns:
        The lines.
    """
    file = io.StringIO()
    Console(file=file, width=width, color_system=None, force_terminal=False).print(table)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def _table(columns: Mapping[str, Sequence[str]]) -> Table:
    # Ten columns in the 80 of a terminal: no vertical lines, two spaces instead.
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), title_justify="left")
    for name in columns:
        if name in (_RANGE, _NAME):
            table.add_column(name, overflow="fold")  # between the words where there is no room, else within one
        else:
            table.add_column(name, justify="right", no_wrap=True)
    for cells in zip(*columns.values(), strict=True):
        table.add_row(*cells)
    return table


def _parameters(module: nn.Module, layers: Sequence[Layer]) -> int:
    """Elements of the parameters of layers; those that several of them use count once."""
    return sum(module.get_parameter(name).numel() for name in {name for layer in layers for name in layer.parameters})


def _known(value: T | None, write: Callable[[T], str]) -> str:
    return _UNKNOWN if value is None else write(value)
