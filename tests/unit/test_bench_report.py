from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from ringstrategy.bench.all_reduce import AllReduceConfig, AllReduceRow
from ringstrategy.bench.environment import describe
from ringstrategy.bench.plot import plot_all_reduce, plot_train_step
from ringstrategy.bench.report import all_reduce_table, train_step_table, write_json
from ringstrategy.bench.train_step import TrainStepRow

ALL_REDUCE_ROWS = [
    AllReduceRow.of("shared_memory", 4, 2**20, 0.25e-3),
    AllReduceRow.of("backend", 4, 2**20, 1e-3),
    AllReduceRow.of("shared_memory", 4, 25 * 2**20, 10e-3),
    AllReduceRow.of("backend", 4, 25 * 2**20, 50e-3),
]
TRAIN_STEP_ROWS = [
    TrainStepRow("ring_ddp", "mlp", 2, 0.044, 600.4, (0.042, 0.044, 0.045), 0.0101, 0.002, 0.0015),
    TrainStepRow("ddp", "mlp", 2, 0.066, 610.6, (0.066, 0.064, 0.067), None, None, None),
    TrainStepRow("ddp+keep", "mlp", 2, 0.055, 620.0, (0.055, 0.054, 0.056), None, None, None),
    TrainStepRow("none", "mlp", 2, 0.040, 580.0, (0.040, 0.039, 0.041), None, None, None),
]


def test_the_all_reduce_table_shows_the_ratio_to_the_backend() -> None:
    lines = _rendered(all_reduce_table(ALL_REDUCE_ROWS))
    assert _cells(lines, "shared_memory")[:1] == [["1MiB", "shared_memory", "250 µs", "4.19", "6.29", "4.00x"]]
    assert _cells(lines, "shared_memory")[1:] == [["25MiB", "shared_memory", "10.0 ms", "2.62", "3.93", "5.00x"]]
    assert [cells[-1] for cells in _cells(lines, "backend") if len(cells) == 6] == ["1.00x", "1.00x"]


def test_the_all_reduce_table_does_without_the_backend() -> None:
    lines = _rendered(all_reduce_table([row for row in ALL_REDUCE_ROWS if row.collective != "backend"]))
    assert _cells(lines, "1MiB") == [["1MiB", "shared_memory", "250 µs", "4.19", "6.29"]]


def test_the_all_reduce_table_marks_what_was_chosen_and_how_far_it_is_from_the_best() -> None:
    rows = [
        AllReduceRow.of("ring", 2, 2**10, 1.0e-3, chosen=True),
        AllReduceRow.of("tree", 2, 2**10, 1.5e-3),
        AllReduceRow.of("ring", 2, 2**20, 2.0e-3),
        AllReduceRow.of("tree", 2, 2**20, 2.5e-3, chosen=True),
    ]
    lines = _rendered(all_reduce_table(rows))
    assert [cells[-1] for name in ("ring", "tree") for cells in _cells(lines, name)] == ["chosen", "", "", "chosen"]
    assert "at most 25% behind the best" in "\n".join(lines)


def test_the_train_step_table_shows_speed_overhead_and_communication() -> None:
    lines = _rendered(train_step_table(TRAIN_STEP_ROWS))
    header = [cell.strip() for cell in next(line for line in lines if "strategy" in line).split("┃")[1:-1]]
    assert header == [
        *("strategy", "step", "rounds", "vs ddp", "vs ddp+keep", "over none"),
        *("all-reduce", "exposed", "copies", "peak PSS MiB"),
    ]
    # 66 / 44 = 1.5, 55 / 44 = 1.25, 44 / 40 - 1 = 10 %
    assert _cells(lines, "ring_ddp") == [
        ["ring_ddp", "44.0 ms", "42.0 to 45.0 ms", "1.50x", "1.25x", "+10%", "10.1 ms", "2.00 ms", "1.50 ms", "600"]
    ]
    assert _cells(lines, "none")[-1][6:] == ["-", "-", "-", "580"]


def test_the_train_step_table_has_no_column_without_a_value() -> None:
    lines = _rendered(train_step_table(TRAIN_STEP_ROWS[1:2]))
    assert _cells(lines, "ddp")[-1] == ["ddp", "66.0 ms", "64.0 to 67.0 ms", "1.00x", "611"]


def test_json_holds_the_environment_and_the_rows(tmp_path: Path) -> None:
    environment = describe(AllReduceConfig().command)
    write_json(tmp_path / "all_reduce.json", environment, ALL_REDUCE_ROWS)
    written = json.loads((tmp_path / "all_reduce.json").read_text())
    assert written["environment"] == environment
    assert written["rows"][0] == {
        "collective": "shared_memory",
        "ranks": 4,
        "bytes": 1_048_576,
        "median_s": 0.00025,
        "algbw_GBps": pytest.approx(4.194304),
        "busbw_GBps": pytest.approx(6.291456),
        "chosen": False,
    }
    write_json(tmp_path / "train_step.json", environment, TRAIN_STEP_ROWS)
    row = json.loads((tmp_path / "train_step.json").read_text())["rows"][1]
    expected = {"strategy": "ddp", "model": "mlp", "ranks": 2, "median_s": 0.066, "peak_pss_MiB": 610.6}
    assert expected.items() <= row.items()


def test_the_environment_names_software_and_machine_but_no_host_or_path() -> None:
    environment = describe("ringstrategy bench all-reduce")
    assert {"python", "torch", "lightning", "ringstrategy", "cpu", "cores", "kernel", "date", "command"} <= set(
        environment
    )
    text = json.dumps(environment)
    assert str(Path.home()) not in text
    assert "/" not in text.replace("ringstrategy bench", "")


def test_pictures_are_drawn(tmp_path: Path) -> None:
    plot_all_reduce(ALL_REDUCE_ROWS, tmp_path / "all_reduce.png")
    plot_train_step(TRAIN_STEP_ROWS, tmp_path / "train_step.png")
    for picture in tmp_path.iterdir():
        assert picture.read_bytes().startswith(b"\x89PNG")


def _rendered(table: Table) -> list[str]:
    console = Console(width=160, file=io.StringIO())
    with console.capture() as capture:
        console.print(table)
    return capture.get().splitlines()


def _cells(lines: list[str], name: str) -> list[list[str]]:
    """The cells of the body's lines that have ``name`` in one."""
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if line.startswith("│")]
    return [row for row in rows if name in row]
