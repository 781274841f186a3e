"""The table of a plan."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
from torch import nn

from ringstrategy.pipeline.calls import flatten_call
from ringstrategy.pipeline.costs import LayerCost
from ringstrategy.pipeline.plan import Cut
from ringstrategy.pipeline.table import StageRow, as_text, layer_table, stage_rows, stage_table
from ringstrategy.pipeline.tracing import Layer


def _lines(rows: Sequence[StageRow], width: int = 140) -> list[list[str]]:
    """The cells of every line, the heads' first."""
    title, *lines = as_text(stage_table(rows, title="a plan"), width).splitlines()
    assert title == "a plan"
    assert all(len(line) <= width for line in lines)
    return [re.split(r"\s{2,}", line.strip()) for line in lines if "──" not in line]


def test_a_line_says_what_a_stage_holds_computes_and_sends() -> None:
    first = StageRow(0, ("conv1", "bn1", "layer1.0.conv1"), 25_557, 0.010, 0.020, 3 * 2**20, 1536, rank=4)
    last = StageRow(1, ("fc",), 650, 0.005, 0.010, 2**20, None, rank=2)
    assert _lines([first, last]) == [
        ["of", "acti-"],
        ["stage", "rank", "layers", "from … to", "params", "fwd+bwd", "slowest", "vations", "sends"],
        ["0", "4", "3", "conv1 … layer1.0.conv1", "25.6 K", "30.0 ms", "100%", "3.00 MiB", "1.50 KiB"],
        ["1", "2", "1", "fc", "650", "15.0 ms", "50%", "1.00 MiB", "-"],
        ["times and bytes are those of one micro-batch"],
    ]


def test_what_is_not_known_has_no_column() -> None:
    assert _lines([StageRow(0, ("0", "1"), 10), StageRow(1, ("2",), 0)]) == [
        ["stage", "layers", "from … to", "params"],
        ["0", "2", "0 … 1", "10"],
        ["1", "1", "2", "0"],
    ]


def test_stages_that_cost_nothing_have_no_share() -> None:
    assert _lines([StageRow(0, ("flatten",), 0, 0.0, 0.0)])[-1][-2:] == ["0.00 µs", "0%"]


@pytest.mark.parametrize("width", [40, 55])
def test_long_names_are_folded_not_cut(width: int) -> None:
    name = "features.denseblock3.denselayer24.conv2"
    _, first, *rest = _lines([StageRow(0, (name, "classifier"), 10)], width)
    assert first[:2] == ["0", "2"]
    assert first[3] == "10"
    assert "".join([first[2], *(word for line in rest for word in line)]).replace(" ", "") == f"{name}…classifier"


def test_a_terminal_of_80_columns_has_room_for_all_numbers() -> None:
    row = StageRow(
        11, ("features.denseblock3.denselayer24.conv2",), 123_456_789, 0.123, 0.321, 123 << 20, 1023, rank=15
    )
    lines = _lines([row], width=80)
    assert lines[2][:3] == ["11", "15", "1"]
    assert lines[2][4:] == ["123 M", "444 ms", "100%", "123 MiB", "1.00 KiB"]


def _cut(measured: bool) -> tuple[Cut, nn.Module]:
    """Three layers of two stages; the last layer shares its weight with the first."""
    module = nn.Sequential(nn.Linear(3, 3, bias=False), nn.ReLU(), nn.Linear(3, 3))
    module[2].weight = module[0].weight
    layers = (
        (Layer("0", ("0", 0), ("0.weight",), ()), Layer("1", ("1", 0), (), ())),
        (Layer("2", ("2", 0), ("0.weight", "2.bias"), ()),),
    )
    costs = (
        (LayerCost(0.001, 0.002, 4096, 512, 36), LayerCost(0.003, 0.004, 2048, 1024, 0)),
        (LayerCost(0.004, 0.002, 64, 256, 48),),
    )
    return Cut(flatten_call((), {})[1], layers, costs if measured else None), module


def test_a_stage_costs_what_its_layers_cost() -> None:
    first, last = stage_rows(*_cut(measured=True), ranks=[4, 2])
    assert first == StageRow(0, ("0", "1"), 9, 0.001 + 0.003, 0.002 + 0.004, 1536, 2048, rank=4)
    assert last == StageRow(1, ("2",), 12, 0.004, 0.002, 256, None, rank=2)
    assert first.seconds == pytest.approx(0.010)


def test_without_measurement_a_stage_has_layers_and_parameters() -> None:
    chosen, module = _cut(measured=False)
    assert stage_rows(chosen, module.to("meta")) == [StageRow(0, ("0", "1"), 9), StageRow(1, ("2",), 12)]


def test_every_layer_has_a_line() -> None:
    lines = [re.split(r"\s{2,}", line.strip()) for line in as_text(layer_table(*_cut(measured=True))).splitlines()]
    assert [lines[0], *lines[2:]] == [
        ["stage", "layer", "params", "fwd+bwd", "activations", "cut sends"],
        ["0", "0", "9", "3.00 ms", "512 B", "4.00 KiB"],
        ["0", "1", "0", "7.00 ms", "1.00 KiB", "2.00 KiB"],
        ["1", "2", "12", "6.00 ms", "256 B", "64 B"],
    ]
