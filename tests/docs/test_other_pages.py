"""Code and commands of the pages that have no test of their own run; no page with code is left out."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from tests.docs.markdown import Block, blocks, commands
from tests.docs.ways import STEPS, Way, as_script, execute, here
from tests.helpers.hosts import obstacle_to_hosts
from tests.helpers.ranks import run_ranks

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
HERE = ("algorithms", "benchmarks", "compression", "doctor", "evaluation", "hosts", "monitor", "simulate")
RUNNABLE = ("python", "console", "bash")


def _python(*names: str) -> list[object]:
    return [
        pytest.param(block, id=f"{name}, line {block.line}")
        for name in names
        for block in blocks(DOCS / f"{name}.md")
        if block.language == "python"
    ]


@pytest.mark.parametrize("block", _python("algorithms", "compression", "hosts", "monitor"))
def test_a_block_trains(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    # Two hosts have tests of their own; here all ranks are on one.
    one_host = replace(block, text=block.text.replace(", num_nodes=2", ""))
    assert run_ranks(execute, 2, one_host) == [STEPS, STEPS]


@pytest.mark.parametrize("block", _python("evaluation"))
def test_a_block_evaluates(block: Block) -> None:
    assert run_ranks(execute, 2, block) == [0, 0]


# -- commands --------------------------------------------------------------------------------------------------------


def _make(command: str, folder: Path) -> None:
    """Without running anything: the target exists and is said to do something."""
    done = subprocess.run([*command.split(), "--dry-run"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout


def _on_hosts(command: str, folder: Path) -> None:
    """With small messages over a fast link, or two steps of small batches."""
    if obstacle := obstacle_to_hosts():
        pytest.skip(obstacle)
    _, _, words = command.partition("-m ")
    module, *options = words.split()
    small = {
        "tests.helpers.bench_hosts": ("--ranks-per-host", "1", "--sizes", "64KiB", "--repeats", "1"),
        "tests.helpers.bench_steps_on_hosts": ("--strategies", "ring_ddp", *_TINY_STEP),
    }[module]
    words_run = [sys.executable, "-m", module, *options, *small, "--rate", "10gbit"]
    if "--json" in options:
        words_run[words_run.index("--json") + 1] = str(folder / "hosts.json")
    done = subprocess.run(words_run, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 hosts x 1" in done.stdout
    assert "--json" not in options or (folder / "hosts.json").stat().st_size > 0


_TINY_SUMS = ("--sizes", "4KiB", "--repeats", "2", "--warmup", "1")
_TINY_STEP = ("--batch-size", "2", "--steps", "2", "--warmup", "1", "--rounds", "1")
_TINY_PIPELINE = ("--model", "mlp", "--chunks", "2", "--batch", "4", "--rounds", "1", "--steps", "1", "--warmup", "1")


def _small(*words: str) -> Way:
    def run(command: str, folder: Path) -> None:
        as_script(command, *words, folder=folder, timeout=280.0)

    return run


# By what a command begins with, the first that fits: how it is run in every suite (None: not), and in the long one.
WAYS: dict[str, tuple[Way | None, Way | None]] = {
    "make benchmarks": (_make, None),
    "ringstrategy bench all-reduce ": (None, here(*_TINY_SUMS)),
    "ringstrategy bench train-step ": (None, _small(*_TINY_STEP)),
    "ringstrategy bench pipeline ": (None, _small(*_TINY_PIPELINE)),
    "ringstrategy doctor": (here("--no-self-test"), here()),
    "sudo .venv/bin/python -m tests.helpers.bench_hosts ": (None, _on_hosts),
    "python -m tests.helpers.bench_": (None, _on_hosts),
}
COMMANDS = sorted({command for name in HERE if name != "simulate" for command in commands(DOCS / f"{name}.md")})


def _ways(command: str) -> tuple[Way | None, Way | None]:
    return next(ways for beginning, ways in WAYS.items() if command.startswith(beginning))


def test_every_command_has_a_way() -> None:
    assert [command for command in COMMANDS if not any(_ways(command))] == []


@pytest.mark.parametrize("command", [command for command in COMMANDS if _ways(command)[0]])
def test_a_command(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    way, _ = _ways(command)
    assert way is not None
    way(command, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("command", [command for command in COMMANDS if _ways(command)[1]])
def test_a_command_to_its_end(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    _, way = _ways(command)
    assert way is not None
    way(command, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_measurements_are_simulated(tmp_path: Path) -> None:
    (block,) = blocks(DOCS / "simulate.md")[:1]
    smaller = block.text.replace("64KiB,256KiB,1MiB,4MiB,16MiB,64MiB", "4KiB,16KiB,64KiB,256KiB --repeats 3 --warmup 1")
    smaller = re.sub(r"--model resnet18 --batch-size 16", "--model mlp " + " ".join(_TINY_STEP), smaller)
    assert smaller.count("--repeats 3") == smaller.count("--model mlp") == 1
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euc", smaller], cwd=tmp_path, env={**os.environ, "PATH": path}, capture_output=True, text=True,
        timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "extrapolated" in done.stdout
    assert (tmp_path / "step.json").is_file()


# -- the benchmarks page ---------------------------------------------------------------------------------------------


def _script(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


def test_benchmarks_and_the_readme_say_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    benchmarks = _script("benchmarks", monkeypatch)
    assert (DOCS / "benchmarks.md").read_text() == benchmarks.page(), "run `python docs/benchmarks.py write`"
    readme = (ROOT / "README.md").read_text()
    assert readme == benchmarks.with_tables(readme), "run `python docs/benchmarks.py write`"
    # Not by hand: another number in a file is another page.
    changed = next(iter(benchmarks.BENCHMARKS.values()))
    environment, rows = changed.read()
    monkeypatch.setattr(type(changed), "read", lambda self: (environment | {"torch": "0.0.0"}, rows))
    monkeypatch.setattr(benchmarks, "SECTIONS", benchmarks.SECTIONS[:1])
    assert "torch 0.0.0" in benchmarks.page()


# -- all pages -------------------------------------------------------------------------------------------------------


def test_no_page_with_code_is_left_out() -> None:
    tests = [path.read_text() for folder in ("docs", "recipes") for path in (ROOT / "tests" / folder).glob("*.py")]
    pages = [ROOT / "README.md", ROOT / "recipes" / "README.md", *DOCS.rglob("*.md")]
    with_code = [page for page in pages if any(block.language in RUNNABLE for block in blocks(page))]
    assert len(with_code) > len(HERE)
    left_out = [page.stem for page in with_code if not any(page.stem in text for text in tests)]
    assert left_out == []
