"""docs/pipeline.md holds: its code and every command run, its tables and messages are those of the code."""

from __future__ import annotations

import importlib.util
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from lightning.pytorch.strategies import StrategyRegistry

from ringstrategy import PipelineStrategy
from ringstrategy.pipeline.plan import choose_cut
from ringstrategy.pipeline.table import StageRow, as_text, stage_table
from ringstrategy.pipeline.timeline import ideal_bubble
from ringstrategy.strategies.ring_ddp import RingDDPStrategy
from tests.docs.markdown import Block, blocks, commands
from tests.docs.ways import STEPS, TWO_STEPS, Way, as_script, config_only, execute, here
from tests.helpers.ranks import run_ranks

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "pipeline.md"
TEXT = PAGE.read_text()
WORDS = " ".join(TEXT.split())
BLOCKS = blocks(PAGE)


# -- blocks of Python ------------------------------------------------------------------------------------------------


def _numbers(name: str, text: str) -> list[int]:
    return [int(number) for number in re.findall(rf"\b{name}=(\d+)", text)]


@pytest.mark.parametrize(
    "block", [block for block in BLOCKS if block.language == "python"], ids=lambda block: f"line {block.line}"
)
def test_a_block_trains(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (ranks,) = set(_numbers("devices", block.text))
    steps = STEPS * max(_numbers("max_epochs", block.text), default=1)
    assert run_ranks(execute, ranks, block) == [steps] * ranks


# -- commands --------------------------------------------------------------------------------------------------------


def _plan(command: str, folder: Path) -> None:
    """Of a small network, with a picture where the page has one."""
    (picture,) = re.findall(r"--plot (\S+)", command)
    (folder / picture).parent.mkdir(parents=True)
    here("--model", "squeezenet1_1", "--size", "32", "--batch", "8", "--balance", "time")(command, folder)
    assert (folder / picture).stat().st_size > 10_000


def _planned(command: str, folder: Path) -> None:
    """To its end; what the page shows has the same title, columns and rows."""
    (picture,) = re.findall(r"--plot (\S+)", command)
    (folder / picture).parent.mkdir(parents=True)
    printed = as_script(command, folder=folder, timeout=280.0)
    title = printed.splitlines()[0]
    (shown,) = [block.text for block in BLOCKS if block.text.startswith(title)]
    assert _beginnings(shown) == _beginnings(printed)


def _beginnings(printed: str) -> list[str]:
    return [line.split()[0] for line in printed.splitlines() if line[:1].isalpha()]


def _trained(command: str, folder: Path) -> None:
    """For two steps."""
    assert "Summary" in as_script(command, *TWO_STEPS, folder=folder)


def _commands_starting(with_: str) -> Iterator[str]:
    return (command for command in commands(PAGE) if command.startswith(with_))


WAYS: dict[str, Way] = {
    **dict.fromkeys(_commands_starting("ringstrategy plan "), _plan),
    **dict.fromkeys(_commands_starting("ringstrategy run "), config_only),
}
SLOW_WAYS: dict[str, Way] = {
    **dict.fromkeys(_commands_starting("ringstrategy plan "), _planned),
    **dict.fromkeys(_commands_starting("ringstrategy run "), _trained),
}


def test_every_command_is_run_here_and_only_these() -> None:
    assert set(commands(PAGE)) == WAYS.keys() == SLOW_WAYS.keys()


@pytest.mark.parametrize("command", WAYS)
def test_a_command(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    WAYS[command](command, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("command", SLOW_WAYS)
def test_a_command_to_its_end(command: str, tmp_path: Path) -> None:
    SLOW_WAYS[command](command, tmp_path)


# -- tables and messages ---------------------------------------------------------------------------------------------


def _rows(heading: str) -> list[list[str]]:
    """Cells of the table below a heading, its own head first."""
    section = TEXT[TEXT.index(f"\n## {heading}\n") + 1 :].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|") and not line.startswith("|---")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_names_are_those_that_are_registered() -> None:
    (listed,) = re.findall(r"Each name also exists with (.*?) at its end", WORDS)
    suffixes = ["", *re.findall(r"`(\w+)`", listed)]
    names = {
        name + suffix for name in re.findall(r'`strategy="(\w+)"`', TEXT.partition("##")[0]) for suffix in suffixes
    }
    assert names == {name for name in StrategyRegistry if not name.startswith("ring_ddp") and _is_ours(name)}


def _is_ours(name: str) -> bool:
    strategy = StrategyRegistry[name]["strategy"]
    return isinstance(strategy, type) and issubclass(strategy, RingDDPStrategy)


def test_the_settings_are_those_of_the_strategy() -> None:
    parameters = inspect.signature(PipelineStrategy).parameters.values()
    own = {f"`{p.name}`": f"`{_written(p.default)}`" for p in parameters if p.kind is not p.VAR_KEYWORD}
    assert {name: default for name, default, _ in _rows("Settings")[1:]} == own


def _written(default: object) -> str:
    return repr(default).replace("'", '"')


def test_bubbles_are_those_of_the_formula() -> None:
    head, *rows = _rows("How many micro-batches")
    for name, *cells in rows:
        stages = int(name.removeprefix("K = "))
        for micro_batches, cell in zip(map(int, head[1:]), cells, strict=True):
            assert cell == f"{ideal_bubble(stages, micro_batches):.0%}".replace("%", " %")


@pytest.mark.parametrize("page", [PAGE, ROOT / "README.md"], ids=lambda page: page.name)
def test_the_table_of_stages_has_the_columns_of_the_code(page: Path) -> None:
    row = StageRow(0, ("0", "5"), 18_900, 1e-3, 1e-3, 2**10, 2**8, rank=0)
    printed = as_text(stage_table([row, row], "Stages of 'network'")).splitlines()
    (shown,) = [block.text.splitlines() for block in blocks(page) if block.text.startswith("Stages of")]
    assert [line.split() for line in shown[:3]] == [line.split() for line in printed[:3]]


_UNTRACEABLE = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x):
        h = self.one(x)
        if h.sum() > 0:
            h = -h
        return self.two(h)
"""


def test_the_line_that_cannot_be_traced_is_named_as_shown(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(_UNTRACEABLE)
    specification = importlib.util.spec_from_file_location("train", file)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    with pytest.raises(ValueError, match="cannot be traced") as refusal:
        choose_cut(module.Net(), 2, None, None, 1)
    shown = [block.text for block in BLOCKS if "cannot be traced" in block.text]
    message = re.sub(r"\S+train\.py:\d+", "train.py:18", str(refusal.value))
    assert [" ".join(text.split()) for text in shown] == [message]
