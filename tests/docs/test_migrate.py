"""docs/migrate.md holds: its program and commands run, its tables know every argument."""

from __future__ import annotations

import inspect
import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import yaml  # type: ignore[import-untyped]
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, bf16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from ringstrategy import RingDDPStrategy
from ringstrategy.program import main
from tests.docs.markdown import Block, blocks, commands
from tests.docs.ways import STEPS, execute
from tests.helpers.ranks import run_ranks
from tests.helpers.scripts import run_script

PAGE = Path(__file__).resolve().parents[2] / "docs" / "migrate.md"
TEXT = PAGE.read_text()
PROGRAM, *SNIPPETS = [block for block in blocks(PAGE) if block.language == "python"]
COMMANDS = commands(PAGE)
RUNNER = "-m ringstrategy "


def _rows(heading: str) -> list[list[str]]:
    """Cells of the first table below a heading, without its head."""
    section = TEXT.partition(f"# {heading}\n")[2].partition("\n#")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def _names(text: str) -> list[str]:
    return re.findall(r"`\"?(\w+)\"?`", text)


# -- programs and commands -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", SNIPPETS, ids=lambda block: f"line {block.line}")
def test_a_block_trains(block: Block) -> None:
    assert run_ranks(execute, 2, block) == [STEPS, STEPS]


def _configured(rank: int, world_size: int, words: list[str], folder: Path) -> Any:
    os.chdir(folder)
    sys.path[0] = str(folder)
    with pytest.raises(SystemExit) as ended:
        main([*words, "--print_config"])
    return ended.value.code


@pytest.mark.parametrize("command", [command for command in COMMANDS if RUNNER in command])
def test_a_command_up_to_its_config(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.py").write_text(PROGRAM.text)
    words = shlex.split(command.partition(RUNNER)[2])
    assert run_ranks(_configured, 1, words, tmp_path, init=False) == [0]
    trainer = yaml.safe_load(capsys.readouterr().out)["trainer"]
    given = re.findall(r"--trainer\.(\w+) (\w+)", command)
    assert given or "--set" in command
    assert [(name, str(trainer[name])) for name, _ in given] == given


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_to_its_end(command: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM.text)
    program, *words = shlex.split(command)
    launcher = {"python": [], "torchrun": ["-m", "torch.distributed.run"]}[program]
    words = [*launcher, *words, "--trainer.fast_dev_run", "2"]
    ended = run_script(Path(sys.executable), *words, timeout=100.0, cwd=tmp_path)
    assert ended.returncode == 0, ended
    assert "MEMBER: 2/2" in ended.stderr, ended


# -- tables ----------------------------------------------------------------------------------------------------------


def test_names_have_counterparts() -> None:
    suffixes = ["", "_spawn", "_fork", "_notebook"]
    flags = ["", "_find_unused_parameters_true", "_find_unused_parameters_false"]
    expected = {f"ddp{suffix}{flag}" for suffix in suffixes for flag in flags}
    assert {f"ring_{name}" for name in expected} <= set(StrategyRegistry)
    listed = {name for was, _ in _rows("From ddp to ring_ddp") for name in _names(was)}
    assert listed - {"DDPStrategy"} <= expected
    assert {f"ddp{suffix}" for suffix in suffixes} <= listed


def test_every_argument_of_ddp_is_explained() -> None:
    arguments = [name for row in _rows("Arguments of DDPStrategy") for name in _names(row[0])]
    own = inspect.signature(DDPStrategy).parameters.keys() - {"kwargs"}
    assert own <= set(arguments)
    assert set(arguments) - own - {"DistributedDataParallel"} <= inspect.signature(RingDDPStrategy).parameters.keys()
    for name in inspect.signature(DistributedDataParallel).parameters.keys() - set(arguments):
        unknown: dict[str, Any] = {name: None}
        with pytest.raises(TypeError):
            RingDDPStrategy(**unknown)


@pytest.mark.parametrize(
    "arguments",
    [
        {"ddp_comm_hook": powerSGD_hook},
        {"ddp_comm_state": object()},
        {"ddp_comm_wrapper": lambda hook: hook},
        {"model_averaging_period": 2},
    ],
    ids=lambda arguments: next(iter(arguments)),
)
def test_hooks_that_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="communication hooks"):
        RingDDPStrategy(**arguments)


def test_hooks_that_are_translated() -> None:
    for hook in (bf16_compress_hook, allreduce_hook):
        RingDDPStrategy(ddp_comm_hook=hook)


def test_flags_are_those_of_the_trainer() -> None:
    known = inspect.signature(pl.Trainer).parameters.keys() | {"batch_size", "num_workers"}
    listed = [name for row in _rows("Arguments and flags") for name in _names(row[0]) if "." not in name]
    assert listed
    assert set(listed) <= known
