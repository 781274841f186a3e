"""The README holds: its code and every command run, its tables are those of the code."""

from __future__ import annotations

import inspect
import json
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.strategies import StrategyRegistry
from rich.console import Console

from ringstrategy import RingDDPStrategy
from ringstrategy.bench import train_step
from ringstrategy.cli.recipes import add_recipes_to_path
from tests.docs.markdown import Block, blocks, commands
from tests.docs.ways import STEPS, TWO_STEPS, Way, as_script, config_only, execute, here, json_files
from tests.helpers.ranks import RanksFailedError, run_ranks
from tests.helpers.scripts import run_script

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
TEXT = README.read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PYTHON = [block for block in blocks(README) if block.language == "python"]
SNIPPET = PYTHON[0]
(FAILING,) = [block for block in PYTHON if "raise " in block.text]


# -- blocks of Python ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "block", [block for block in PYTHON if block != FAILING], ids=lambda block: f"line {block.line}"
)
def test_a_block_trains(block: Block) -> None:
    assert run_ranks(execute, 2, block) == [STEPS, STEPS]


def test_the_first_snippet_is_a_script() -> None:
    assert len(SNIPPET.text.strip().splitlines()) == 5
    assert "import ringstrategy" in SNIPPET.text
    before = (
        "from functools import partial\n"
        "import lightning.pytorch as pl\n"
        "from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel\n"
        "model, data = BoringModel(), BoringDataModule()\n"
        "pl.Trainer = partial(pl.Trainer, max_epochs=1, limit_train_batches=2, limit_val_batches=1, barebones=True)\n"
    )
    after = "print(f'rank {trainer.global_rank} of {trainer.world_size}: {trainer.global_step} steps\\n', end='')\n"
    ended = run_script(before + SNIPPET.text + after, timeout=100.0)
    assert ended.returncode == 0, ended
    assert not ended.leftover_pids, ended
    assert {f"rank {rank} of 2: 2 steps" for rank in range(2)} <= set(ended.stdout.splitlines()), ended


def _documented_failure() -> str:
    """The line that the README shows, as a pattern for another process and host."""
    (line,) = [
        block.text.strip() for block in blocks(README) if block.language == "text" and "failed first" in block.text
    ]
    assert re.search(r"\(pid \d+ on [\w.-]+, ", line)
    pattern, count = re.subn(r"pid\\ \d+\\ on\\ .+?,\\ ", lambda _: r"pid \d+ on \S+, ", re.escape(line))
    assert count == 1
    return pattern


def test_a_failing_rank_is_named_as_shown() -> None:
    with pytest.raises(RanksFailedError) as failure:
        run_ranks(execute, 2, FAILING, grace=20.0)
    survivor, failed = failure.value.outcomes
    assert re.search(_documented_failure(), survivor.output), survivor
    assert survivor.error_type == "RankFailure"
    assert failed.error_type == "ValueError"


# -- commands --------------------------------------------------------------------------------------------------------


def _make(command: str, folder: Path) -> None:
    """Without running anything: the target exists, and ends in what it should."""
    program, target = command.split()
    last = {
        "train": "ringstrategy run digits",
        "test": "pytest -m 'not slow' -n 2 --dist loadfile",
        "docs": "sphinx-build -W -b html docs docs/_build",
        "benchmarks": "python docs/benchmarks.py write",
    }
    # A make inside `make test` would also say which folder it leaves.
    how = [program, "--no-print-directory", "--dry-run", target]
    done = subprocess.run(how, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip().splitlines()[-1].endswith(last[target])


def _install(command: str, folder: Path) -> None:
    """As far as pip gets without a network; the wheel has tests of its own."""
    program, *words = shlex.split(command)
    assert set(re.findall(r"\[(\w+)\]", command)) <= PROJECT["optional-dependencies"].keys()
    offline = ["--dry-run", "--no-deps", "--no-index", "--no-build-isolation"]
    done = subprocess.run(
        [sys.executable, "-m", program, *words, *offline], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"Would install {PROJECT['name']}-" in done.stdout


def _measured_elsewhere(command: str, folder: Path) -> None:
    """All but the measurement itself."""

    def measure(config: train_step.TrainStepConfig, progress: object) -> list[train_step.TrainStepRow]:
        return [
            train_step.TrainStepRow(
                contender.name,
                config.model,
                config.ranks,
                median_s=1.0,
                peak_pss_MiB=1.0,
                rounds_s=(1.0,),
                all_reduce_s=None,
                exposed_s=None,
            )
            for contender in config.strategies
        ]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_step, "measure", measure)
        here()(command, folder)


def _row_names(table: str) -> list[str]:
    cells = [line.strip("│").partition("│")[0].strip() for line in table.splitlines() if line.startswith("│")]
    return [cell for cell in cells if cell]


def _sums_up(command: str, folder: Path) -> None:
    """The README shows the rows of the table that is printed, and lists the keys of the JSON that is written."""
    add_recipes_to_path()
    from summary import Summary

    summary = Summary(1.0, 1.0, ranks=2, communication_share=0.0, checkpoint=None)
    (shown,) = [block.text for block in blocks(README) if "test accuracy" in block.text]
    with (folder / "table.txt").open("w+") as file:
        Console(file=file, width=120).print(summary.table())
        file.seek(0)
        assert _row_names(shown) == _row_names(file.read()) != []
    listed = TEXT[TEXT.index("summary.json`, as") :].partition("Beside it")[0]
    assert re.findall(r"`(\w+)`", listed) == list(asdict(summary))


def _measured(command: str, folder: Path) -> None:
    """For two steps per strategy."""
    tiny = ("--batch-size", "2", "--steps", "2", "--warmup", "1", "--rounds", "1")
    as_script(command, *tiny, folder=folder, timeout=280.0)
    for file in json_files(command):
        assert json.loads((folder / file).read_text()).keys() == {"environment", "rows"}


def _measured_pipeline(command: str, folder: Path) -> None:
    """For one step of a small network with two micro-batches."""
    tiny = ("--model", "mlp", "--chunks", "2", "--batch", "4", "--rounds", "1", "--steps", "1", "--warmup", "1")
    as_script(command, *tiny, folder=folder, timeout=280.0)
    for file in json_files(command):
        assert json.loads((folder / file).read_text()).keys() == {"environment", "rows"}


def _trained(command: str, folder: Path) -> None:
    """For two steps."""
    printed = as_script(command, *TWO_STEPS, folder=folder)
    (shown,) = [block.text for block in blocks(README) if "test accuracy" in block.text]
    assert _row_names(printed[printed.index("Summary") :])[: len(_row_names(shown))] == _row_names(shown)


def _fail(command: str, folder: Path) -> None:
    """The program of the block, in a file of that name."""
    _, name = command.split()
    (folder / name).write_text(FAILING.text)
    ended = run_script(folder / name, cwd=folder, timeout=100.0)
    assert ended.returncode == 1, ended
    assert not ended.leftover_pids, ended
    assert re.search(_documented_failure(), ended.stderr), ended


def _commands_starting(with_: str) -> Iterator[str]:
    return (command for command in commands(README) if command.startswith(with_))


TINY_SUMS = here("--sizes", "4KiB", "--repeats", "2", "--warmup", "1")
_ONE_PROCESS = "ringstrategy run digits --trainer.strategy auto --trainer.devices 1 --data.init_args.batch_size 64"
# How each command is run here: in every suite, and in the one with the long tests.
WAYS: dict[str, Way] = {
    "pip install .": _install,
    "pip install '.[recipes]'": _install,
    "make train": _make,
    "make test": _make,
    "make docs": _make,
    "make benchmarks": _make,
    "ringstrategy recipes": here(),
    "ringstrategy copy digits my-digits": here(),
    "ringstrategy run digits": _sums_up,
    "ringstrategy run digits --trainer.strategy ddp --trainer.max_epochs 5": config_only,
    "ringstrategy run digits --model.network resnet18 --model.learning_rate 1.0e-3": config_only,
    _ONE_PROCESS: config_only,
    "ringstrategy run digits_gpipe": config_only,
    "ringstrategy plan --model resnet50 --stages 4 --chunks 8": here(
        *("--model", "squeezenet1_1", "--size", "32", "--batch", "8")
    ),
    **dict.fromkeys(_commands_starting("ringstrategy bench all-reduce "), TINY_SUMS),
    **dict.fromkeys(_commands_starting("ringstrategy bench train-step "), _measured_elsewhere),
}
SLOW_WAYS: dict[str, Way] = {
    "python fails.py": _fail,
    "ringstrategy doctor": here(),
    "ringstrategy run digits": _trained,
    "ringstrategy run digits --trainer.strategy ddp --trainer.max_epochs 5": _trained,
    "ringstrategy run digits --model.network resnet18 --model.learning_rate 1.0e-3": _trained,
    _ONE_PROCESS: _trained,
    "ringstrategy run digits_gpipe": _trained,
    "ringstrategy bench pipeline": _measured_pipeline,
    **dict.fromkeys(_commands_starting("ringstrategy bench train-step "), _measured),
}


def test_every_command_is_run_here_and_only_these() -> None:
    assert set(commands(README)) == set(WAYS) | set(SLOW_WAYS)


@pytest.mark.parametrize("command", WAYS)
def test_a_command(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    WAYS[command](command, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("command", SLOW_WAYS)
def test_a_command_to_its_end(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    SLOW_WAYS[command](command, tmp_path)


# -- command lines of users ------------------------------------------------------------------------------------------

ARGUMENTS = re.findall(r"`(--trainer\.strategy\S* \S+)`", TEXT)


@pytest.mark.parametrize("argument", ARGUMENTS)
def test_an_argument_of_lightning_cli_makes_the_strategy(argument: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(ARGUMENTS) == 2
    words = [*argument.split(), "--trainer.accelerator=cpu", "--trainer.devices=2", "--trainer.logger=false"]
    monkeypatch.setattr("sys.argv", ["train.py", *words])
    cli = LightningCLI(BoringModel, run=False, save_config_callback=None)
    assert type(cli.trainer.strategy) is RingDDPStrategy


# -- tables ----------------------------------------------------------------------------------------------------------


def _rows(heading: str) -> list[list[str]]:
    """Cells of the table below a heading, without its own head."""
    section = TEXT[TEXT.index(f"\n## {heading}\n") + 1 :].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def _code(text: str) -> list[str]:
    return re.findall(r"`(\w+)`", text)


def test_the_names_are_those_that_are_registered() -> None:
    suffixes = ["", *re.findall(r"`(_find_unused_parameters_\w+)`", TEXT)]
    names = {name + suffix for row in _rows("Names") for name in _code(row[0]) for suffix in suffixes}
    assert names == {name for name in StrategyRegistry if name.startswith("ring_ddp")}


def test_the_settings_are_those_of_the_strategy() -> None:
    listed = [name for row in _rows("Settings") for name in _code(row[0])]
    parameters = list(inspect.signature(RingDDPStrategy).parameters)
    assert sorted(listed) == sorted(parameters)


def test_settings_without_effect_and_refused_ones_are_told_apart() -> None:
    strategy: Callable[..., object] = RingDDPStrategy
    for names, meaning in _rows("Settings"):
        for name in _code(names):
            if "without effect" in meaning:
                strategy(**{name: True})
            elif "refused" in meaning:
                with pytest.raises(ValueError, match=name):
                    strategy(**{name: 1})
    with pytest.raises(TypeError, match="init_sync"):
        strategy(init_sync=True)


def test_the_versions_needed_are_those_of_the_project() -> None:
    needed = {name: needs for name, needs, _ in _rows("Compatibility")}
    dependencies = dict(re.findall(r"^([\w-]+)(.*)$", "\n".join(PROJECT["dependencies"]), re.MULTILINE))
    assert needed.pop("Python") == PROJECT["requires-python"]
    assert needed
    assert needed == {name: dependencies[name] for name in needed}


def test_measurements_stand_between_marks() -> None:
    marks = re.findall(r"^<!-- (/?measured(?::[\w-]+)?) -->$", TEXT, re.MULTILINE)
    names = ("all-reduce", "train-step", "pipeline", "digits", "digits-accuracy")
    assert marks == [mark for name in names for mark in (f"measured:{name}", "/measured")]
