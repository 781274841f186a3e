"""docs/tutorial.md holds: its programs print what it says, in the order in which its reader starts them."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from ringstrategy.cli.recipes import add_recipes_to_path
from tests.docs.markdown import blocks, commands
from tests.docs.programs import patched, programs, run_program, terminal
from tests.docs.ways import TWO_STEPS
from tests.helpers.ranks import run_ranks
from tests.helpers.scripts import Completed, run_script

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "tutorial.md"
BLOCKS = blocks(PAGE)
PROGRAMS = programs(PAGE)
PATCHES = [block.text for block in BLOCKS if block.language == "diff"]
PRINTED = [ast.literal_eval(block.text) for block in BLOCKS if block.text.startswith("{'loss'")]
EPOCH: dict[str, Any] = {"max_epochs": 1}


def _versions() -> list[str]:
    """first.py as the reader has it: at first, and after each change."""
    versions = [PROGRAMS["first.py"]]
    for patch in PATCHES:
        versions.append(patched(versions[-1], patch))
    return versions


# -- the script of one's own -----------------------------------------------------------------------------------------


def test_the_strategies_train_alike_and_the_checkpoint_is_read_by_torch_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ddp, ring, gpipe, alone = (
        run_ranks(run_program, ranks, text, tmp_path, **EPOCH)
        for text, ranks in zip(_versions(), (2, 2, 2, 1), strict=True)
    )
    assert ddp == ring
    assert ddp[0].keys() == PRINTED[0].keys()
    for stage in gpipe:
        assert stage == pytest.approx(alone[0], abs=1e-5)
    capsys.readouterr()
    run_ranks(_use, 1, tmp_path, init=False)
    answers, truth = (ast.literal_eval(line[8:]) for line in capsys.readouterr().out.splitlines())
    assert sum(map(int.__eq__, answers, truth)) > 6


def _use(rank: int, world_size: int, folder: Path) -> None:
    os.chdir(folder)
    exec(compile(PROGRAMS["use.py"], "use.py", "exec"), {})


def test_the_page_shows_the_same_numbers_where_it_says_so() -> None:
    ddp, ring, gpipe, alone = PRINTED
    assert ddp == ring
    assert gpipe == pytest.approx(alone, abs=1e-5)
    assert gpipe["loss"] != pytest.approx(ddp["loss"], rel=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(4), ids=["ddp", "ring_ddp", "gpipe", "auto"])
def test_a_version_started_as_a_program_prints_what_is_shown(number: int, tmp_path: Path) -> None:
    (tmp_path / "first.py").write_text(_versions()[number])
    ended = run_script(tmp_path / "first.py", cwd=tmp_path, timeout=100.0)
    assert ended.returncode == 0, ended
    (printed,) = re.findall(r"^\{'loss'.*\}$", ended.stdout, re.MULTILINE)
    assert ast.literal_eval(printed) == pytest.approx(PRINTED[number], rel=1e-3, abs=1e-6)


# -- the recipe ------------------------------------------------------------------------------------------------------


def test_it_installs_what_the_readme_does() -> None:
    assert "pip install '.[recipes]'" in commands(PAGE)
    assert "pip install '.[recipes]'" in commands(ROOT / "README.md")


def test_the_environment_can_be_made(tmp_path: Path) -> None:
    python, *words = commands(PAGE)[0].split()
    assert python == "python3"
    subprocess.run([sys.executable, *words, "--without-pip"], cwd=tmp_path, check=True)
    (activate,) = (command for command in commands(PAGE) if command.endswith("activate"))
    done = subprocess.run(
        ["bash", "-c", f"{activate}; command -v python"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.stdout.strip() == str(tmp_path / ".venv" / "bin" / "python")


def test_the_files_of_a_run_are_those_that_are_listed() -> None:
    add_recipes_to_path()
    from summary import Summary

    (shown,) = (json.loads(block.text) for block in BLOCKS if block.language == "json")
    assert list(shown) == list(asdict(Summary(None, None, 2, None, None)))
    (table,) = (block.text for block in BLOCKS if block.text.startswith("Summary"))
    assert f"{shown['test_accuracy']:.4f}" in table
    assert f"{shown['samples_per_s']:,.0f}" in table


def _shell(text: str, folder: Path, env: dict[str, str]) -> Completed:
    script = folder / "block.sh"
    script.write_text(f"#!/bin/bash\nset -e\n{text}")
    script.chmod(0o755)
    ended = run_script(script, cwd=folder, env=env, timeout=100.0)
    assert ended.returncode == 0, ended
    return ended


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_recipe_from_training_to_the_sheet(tmp_path: Path) -> None:
    """With two steps of training: all commands of steps 1 to 4, and every file and curve that the page names."""
    env = terminal(tmp_path, *TWO_STEPS)
    (tmp_path / "pictures.py").write_text(PROGRAMS["pictures.py"])
    shell = "\n".join(block.text for block in BLOCKS if block.language == "console").partition("python first.py")[0]
    for elsewhere in ("python3 -m venv .venv", ". .venv/bin/activate", "pip install '.[recipes]'"):
        assert elsewhere in shell
        shell = shell.replace(elsewhere, "")
    shell = shell.replace("tensorboard --logdir runs", "")
    printed = _shell(shell, tmp_path, env).stdout
    assert "All is well." in printed
    assert "picture1796.png" in printed
    assert (tmp_path / "sheet.png").stat().st_size > 1000
    run = tmp_path / "runs" / "digits" / "version_0"
    text = PAGE.read_text()
    rows = re.findall(r"^\| (`.+?) \| ", text[text.index("| file |") :], re.MULTILINE)
    names = [name.rstrip("/…") for row in rows for name in re.findall(r"`(.+?)`", row)]
    assert len(names) > 6
    for name in names:
        assert list(run.glob(f"{name}*")), name


@pytest.mark.slow
def test_the_curves_are_in_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

    assert "tensorboard --logdir runs" in commands(PAGE)
    _shell("ringstrategy run digits", tmp_path, terminal(tmp_path, *TWO_STEPS, "--trainer.log_every_n_steps=1"))
    events = EventAccumulator(str(tmp_path / "runs" / "digits" / "version_0"))
    events.Reload()
    listed = re.findall(r"`(\w+)`", PAGE.read_text().partition("shows the curves")[2].partition("Ctrl-C")[0])
    assert set(listed) <= set(events.Tags()["scalars"])
    assert events.Tags()["images"] == ["test_confusion"]
