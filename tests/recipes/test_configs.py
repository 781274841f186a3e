"""Every config runs for two steps on data in its real format, and the folder stands on its own."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.core.saving import load_hparams_from_yaml
from registry import RECIPES, Recipe
from train import main

from ringstrategy.cli.recipes import recipes_folder
from tests.helpers.ranks import run_ranks
from tests.helpers.scripts import Completed, run_script
from tests.recipes.recipe_runs import LIBRARIES, SMALL, TINY, TWO_STEPS, RecipeRun, run_recipes, write_data

FOLDER = recipes_folder()
MODULES = {path.stem for path in FOLDER.glob("*.py")}
# The same as the installed command.
COMMAND = """
import sys
from ringstrategy.cli.main import main
if __name__ == "__main__":
    sys.exit(main())
"""
KEYS = ["test_accuracy", "samples_per_s", "ranks", "communication_share", "checkpoint"]


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


@pytest.fixture(scope="module")
def tiny_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which every config has been run on two ranks, one after the other."""
    folder = tmp_path_factory.mktemp("runs")
    write_data(folder, "shufflenet_v2_x0_5")
    runs = [RecipeRun(recipe.name, (*TINY[recipe.name], *SMALL.get(recipe.name, ()))) for recipe in RECIPES]
    run_ranks(run_recipes, 2, folder, runs, timeout=250.0)
    return folder


@pytest.mark.timeout(300)
@pytest.mark.parametrize("recipe", RECIPES, ids=_ids)
def test_two_steps_of_a_config(recipe: Recipe, tiny_runs: Path) -> None:
    logs = tiny_runs / "runs" / recipe.name / "version_0"
    _assert_complete(logs, ranks=2)
    classes = [line.partition(",")[0] for line in (logs / "classes.csv").read_text().splitlines()[1:]]
    assert len(classes) == load_hparams_from_yaml(logs / "config.yaml")["model"]["num_classes"]
    assert ("cat" in classes) == ("pictures" in recipe.data)


def _assert_complete(logs: Path, ranks: int) -> dict[str, Any]:
    """Everything that a run leaves is in its folder; returns its summary."""
    summary: dict[str, Any] = json.loads((logs / "summary.json").read_text())
    assert list(summary) == KEYS
    assert 0.0 <= summary["test_accuracy"] <= 1.0
    assert summary["samples_per_s"] > 0.0
    assert summary["ranks"] == ranks
    assert 0.0 <= summary["communication_share"] <= 1.0
    assert Path(summary["checkpoint"]).parent == logs / "checkpoints"
    assert Path(summary["checkpoint"]).is_file()
    names = {path.name.split(".out.")[0] for path in logs.iterdir()}
    tables = {"confusion.png", "confusion.csv", "classes.csv"}
    assert {"config.yaml", "metrics.csv", "events", "summary.json", *tables} <= names
    assert "val_calibration_error" in (logs / "metrics.csv").read_text()
    return summary


@pytest.mark.timeout(300)
def test_the_fine_tuning_config_has_two_learning_rates_and_gets_past_the_thaw(tiny_runs: Path) -> None:
    logs = tiny_runs / "runs" / "finetune_efficientnet" / "version_0"
    with (logs / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["epoch"] for row in rows} >= {"0", "1", "2"}
    rates = [{float(value) for name, value in row.items() if name.startswith("lr-") and value} for row in rows]
    assert {len(of_step) for of_step in rates} == {0, 2}  # head and backbone
    for high, low in (sorted(of_step, reverse=True) for of_step in rates if of_step):
        assert high == pytest.approx(10 * low)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", SMALL)
def test_two_steps_of_the_network_of_a_config(name: str, tmp_path: Path) -> None:
    (recipe,) = [recipe for recipe in RECIPES if recipe.name == name]
    write_data(tmp_path, "efficientnet_b0")
    run_ranks(run_recipes, recipe.ranks, tmp_path, [RecipeRun(name, TINY[name])], timeout=580.0)
    _assert_complete(tmp_path / "runs" / name / "version_0", recipe.ranks)


@pytest.mark.slow
def test_the_real_command(tmp_path: Path) -> None:
    ended = _run("digits", *TWO_STEPS, cwd=tmp_path)
    assert ended.returncode == 0, ended
    assert ended.leftover_pids == (), ended
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]
    summary = _assert_complete(tmp_path / "runs" / "digits" / "version_0", ranks=2)
    assert ended.stdout.count("Summary") == 1  # only one rank speaks
    assert f"{summary['test_accuracy']:.4f}" in ended.stdout
    assert "batch: 32 images per rank x 2 = 64 in total; learning rate: 0.003, not scaled" in ended.stderr


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
        if not isinstance(strategy, str):
            is_pipeline = strategy["class_path"] == "ringstrategy.PipelineStrategy"
            strategy = strategy["init_args"]["schedule"] if is_pipeline else "ring_ddp"
        assert strategy in recipe.summary


@pytest.mark.parametrize("recipe", RECIPES, ids=_ids)
def test_a_config_says_how_many_images_a_step_has_and_how_the_learning_rate_follows(recipe: Recipe) -> None:
    text = recipe.config.read_text()
    config = load_hparams_from_yaml(recipe.config)
    size, comment = re.findall(r"batch_size: (\d+)  # (.*)", text)[0]
    stages = 1
    if not isinstance(config["trainer"]["strategy"], str):
        arguments = config["trainer"]["strategy"]["init_args"]
        stages = arguments.get("num_stages", recipe.ranks if "schedule" in arguments else 1)
    total = int(size) * recipe.ranks // stages
    assert f"{total} in total" in comment or (stages == recipe.ranks and "of the whole pipeline" in comment)
    model = config["model"]
    (said,) = re.findall(r"learning_rate_per: \S+  # (.*)", text)
    assert said.startswith("not scaled" if model["learning_rate_per"] is None else "linear scaling")
    if model["learning_rate_per"] is not None:
        rate = model["learning_rate"] * total / model["learning_rate_per"]
        assert rate in [pytest.approx(float(number)) for number in re.findall(r"\d[\d.]*(?:e-\d+)?", said)]
        assert str(total) in said or "two ranks" in said


@pytest.mark.parametrize("recipe", RECIPES, ids=_ids)
def test_a_config_names_classes_that_are_there(recipe: Recipe) -> None:
    names = [text for text in _strings(load_hparams_from_yaml(recipe.config)) if re.fullmatch(r"\w+(\.\w+)+", text)]
    assert names
    assert {name.split(".")[0] for name in names} <= MODULES | LIBRARIES
