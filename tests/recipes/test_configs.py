"""Every config runs through the real command, and the folder stands on its own."""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.core.saving import load_hparams_from_yaml
from registry import RECIPES, Recipe
from train import main

from ringstrategy.cli.recipes import recipes_folder
from tests.helpers.scripts import Completed, run_script

FOLDER = recipes_folder()
MODULES = {path.stem for path in FOLDER.glob("*.py")}
LIBRARIES = {"lightning", "rich", "ringstrategy", "sklearn", "torch", "torchmetrics", "torchvision"}
# The same as the installed command.
COMMAND = """
import sys
from ringstrategy.cli.main import main
if __name__ == "__main__":
    sys.exit(main())
"""
TWO_STEPS = ["--trainer.max_epochs=1", *(f"--trainer.limit_{stage}_batches=2" for stage in ("train", "val", "test"))]


def _run(*arguments: str, cwd: Path, timeout: float = 100.0) -> Completed:
    return run_script(COMMAND, "run", *arguments, cwd=cwd, timeout=timeout)


def _summary(folder: Path) -> dict[str, Any]:
    (file,) = folder.glob("runs/*/*/summary.json")
    summary: dict[str, Any] = json.loads(file.read_text())
    return summary


def _strings(config: Any) -> Iterator[str]:
    if isinstance(config, dict):
        for value in config.values():
            yield from _strings(value)
    elif isinstance(config, list):
        for value in config:
            yield from _strings(value)
    elif isinstance(config, str):
        yield config


def _ids(value: object) -> str | None:
    return value.name if isinstance(value, (Recipe, Path)) else None


@pytest.mark.parametrize("recipe", RECIPES, ids=_ids)
def test_two_steps_of_a_config(recipe: Recipe, tmp_path: Path) -> None:
    ended = _run(recipe.name, *TWO_STEPS, cwd=tmp_path)
    assert ended.returncode == 0, ended
    assert ended.leftover_pids == (), ended
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]

    summary = _summary(tmp_path)
    assert list(summary) == ["test_accuracy", "samples_per_s", "ranks", "communication_share", "checkpoint"]
    assert 0.0 <= summary["test_accuracy"] <= 1.0
    assert summary["samples_per_s"] > 0.0
    assert summary["ranks"] == recipe.ranks
    assert 0.0 <= summary["communication_share"] <= 1.0
    logs = tmp_path / "runs" / recipe.name / "version_0"
    assert Path(summary["checkpoint"]).parent == logs / "checkpoints"
    assert Path(summary["checkpoint"]).is_file()

    names = {path.name.split(".out.")[0] for path in logs.iterdir()}
    assert {"config.yaml", "metrics.csv", "events", "summary.json"} <= names
    assert ended.stdout.count("Summary") == 1  # only one rank speaks
    assert f"{summary['test_accuracy']:.4f}" in ended.stdout


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "strategy",
    ["ddp", "ddp_spawn", "ddp_fork", "ring_ddp_spawn", "ring_ddp_fork", "gpipe_spawn", "pipeline_1f1b_fork"],
)
def test_any_strategy_can_be_swapped_in(strategy: str, tmp_path: Path) -> None:
    ended = _run(
        "digits", *TWO_STEPS, f"--trainer.strategy={strategy}", "--trainer.devices=2", cwd=tmp_path, timeout=250.0
    )
    assert ended.returncode == 0, ended
    assert ended.leftover_pids == (), ended
    summary = _summary(tmp_path)
    assert summary["ranks"] == 2
    assert (summary["communication_share"] is None) == strategy.startswith("ddp")
    assert Path(summary["checkpoint"]).is_file()
    assert "val_accuracy" in (tmp_path / "runs" / "digits" / "version_0" / "metrics.csv").read_text()
    assert "Traceback" not in ended.stderr
    assert "Experiment logs directory" not in ended.stderr


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_run_goes_on_from_a_checkpoint_and_from_its_saved_config(tmp_path: Path) -> None:
    ended = _run("digits", *TWO_STEPS, cwd=tmp_path)
    assert ended.returncode == 0, ended
    before = _summary(tmp_path)["checkpoint"]
    first = tmp_path / "runs" / "digits" / "version_0"
    ended = _run(
        *("digits", f"--config={first / 'config.yaml'}", f"--ckpt_path={before}", "--trainer.max_epochs=2"),
        cwd=tmp_path,
    )
    assert ended.returncode == 0, ended
    steps = [line.split(",") for line in (first.parent / "version_1" / "metrics.csv").read_text().splitlines()]
    epochs = {line[steps[0].index("epoch")] for line in steps[1:]}
    assert "1" in epochs
    assert "0" not in epochs
    assert Path(before).is_file()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("recipe", "seed"), [("digits", 0), ("digits", 1), ("digits", 2), ("digits_gpipe", 0), ("digits_1f1b", 0)]
)
def test_digits_are_learnt(recipe: str, seed: int, tmp_path: Path) -> None:
    ended = _run(recipe, f"--seed_everything={seed}", cwd=tmp_path, timeout=250.0)
    assert ended.returncode == 0, ended
    assert _summary(tmp_path)["test_accuracy"] >= 0.97


@pytest.mark.slow
def test_without_loggers_and_checkpoints_only_the_table_is_left(tmp_path: Path) -> None:
    ended = _run("digits", "--trainer.fast_dev_run=true", cwd=tmp_path)
    assert ended.returncode == 0, ended
    assert "not saved" in ended.stdout
    assert list(tmp_path.iterdir()) == []


def test_an_argument_that_does_not_exist_ends_the_run_before_it_starts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--trainer.no_such_argument=1"], prog="ringstrategy run digits")
    assert ended.value.code == 2
    assert "no_such_argument" in capsys.readouterr().err


def test_help_shows_the_arguments_of_trainer_model_and_data(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"], config=RECIPES[0].config, prog="ringstrategy run digits")
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert shown.startswith("usage: ringstrategy run digits ")
    for argument in ("--trainer.strategy", "--model.learning_rate", "--data CONFIG", "--ckpt_path"):
        assert argument in shown


def test_registry_and_configs_agree() -> None:
    assert {recipe.config for recipe in RECIPES} == set(FOLDER.glob("configs/*.yaml"))
    for recipe in RECIPES:
        trainer = load_hparams_from_yaml(recipe.config)["trainer"]
        assert recipe.ranks == trainer["devices"] * trainer.get("num_nodes", 1)
        strategy = trainer["strategy"]
        assert (strategy if isinstance(strategy, str) else strategy["init_args"]["schedule"]) in recipe.summary


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=_ids)
def test_a_script_imports_the_folder_and_installed_libraries_alone(path: Path) -> None:
    imported = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "a script has no package to import from"
            imported.add(node.module or "")
    roots = {name.split(".")[0] for name in imported}
    assert roots <= MODULES | LIBRARIES | sys.stdlib_module_names
    assert not any(name.startswith("ringstrategy.") for name in imported), "recipes use the public names"


@pytest.mark.parametrize(
    "path", sorted(path for path in FOLDER.rglob("*") if path.suffix in {".py", ".yaml", ".md"}), ids=_ids
)
def test_a_file_names_no_place_outside(path: Path) -> None:
    text = path.read_text()
    assert re.findall(r"\w+://\S+", text) == []
    assert re.findall(r"(?<![\w.}>])(?:~|\.\.)?/\w+/\S*", text) == []


@pytest.mark.parametrize("recipe", RECIPES, ids=_ids)
def test_a_config_names_classes_that_are_there(recipe: Recipe) -> None:
    names = [text for text in _strings(load_hparams_from_yaml(recipe.config)) if re.fullmatch(r"\w+(\.\w+)+", text)]
    assert names
    assert {name.split(".")[0] for name in names} <= MODULES | LIBRARIES
