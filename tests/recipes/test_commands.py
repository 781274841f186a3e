"""The commands about recipes: ``copy`` makes a project that stands on its own, ``recipes`` lists all."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
from registry import RECIPES, Recipe

from ringstrategy.cli.copy import copy_recipe
from ringstrategy.cli.main import main
from tests.helpers.ranks import run_ranks
from tests.helpers.scripts import run_script
from tests.recipes.recipe_runs import TWO_STEPS


def _ids(recipe: Recipe) -> str:
    return recipe.name


@pytest.mark.parametrize("recipe", RECIPES, ids=_ids)
def test_a_copy_has_script_config_and_readme_and_no_more_than_it_needs(recipe: Recipe, tmp_path: Path) -> None:
    files = {path.name for path in copy_recipe(recipe.name, tmp_path / "project")}
    assert {"train.py", "predict.py", "config.yaml", "README.md", "image_classifier.py"} <= files
    assert "registry.py" not in files
    assert ("digits_data.py" in files) == recipe.name.startswith("digits")
    assert ("frozen_backbone.py" in files) == (recipe.name == "finetune_efficientnet")
    text = (tmp_path / "project" / "README.md").read_text()
    assert all(f"`{name}`: " in text for name in files if name.endswith(".py"))
    config = (tmp_path / "project" / "config.yaml").read_text()
    assert "ringstrategy run" not in config
    assert "ringstrategy.cli" not in config
    assert "python train.py" in config


def _print_config(rank: int, world_size: int, project: Path) -> str:
    """As ``python train.py --print_config`` in that folder, in a process that knows no other recipes."""
    assert "train" not in sys.modules
    sys.path.insert(0, str(project))
    sys.argv = ["train.py", "--print_config"]
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(project / "train.py"), run_name="__main__")
    assert ended.value.code == 0
    used = [Path(module.__file__) for name, module in sys.modules.items() if name == "image_classifier"]  # type: ignore[arg-type]
    return str(used[0].parent)


def test_the_script_of_a_copy_uses_its_own_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    project = tmp_path / "project"
    assert main(["copy", "cifar100_wideresnet", str(project)]) == 0
    assert f"cd {project} && python train.py" in capsys.readouterr().out
    assert run_ranks(_print_config, 1, project, init=False) == [str(project)]
    assert "network: wide_resnet50_2" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_copy_trains_and_predicts_at_once(tmp_path: Path) -> None:
    project = tmp_path / "project"
    copy_recipe("digits", project)
    ended = run_script(project / "train.py", *TWO_STEPS, cwd=project, timeout=200.0)
    assert ended.returncode == 0, ended
    (checkpoint,) = project.glob("runs/digits/version_0/checkpoints/*.ckpt")
    picture = next(project.glob("runs/digits/version_0/*.png"))  # any picture has some class
    ended = run_script(project / "predict.py", str(checkpoint), str(picture), "--plot", "sheet.png", cwd=project)
    assert ended.returncode == 0, ended
    assert "%" in ended.stdout
    assert (project / "sheet.png").is_file()


def test_a_folder_that_is_in_use_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    assert main(["copy", "digits", str(tmp_path)]) == 1
    assert f"FileExistsError: {tmp_path} is there already and not empty" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_an_unknown_recipe_is_named_with_those_that_exist(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["copy", "digit", str(tmp_path / "project")]) == 2
    assert "unknown recipe 'digit'; there is: digits, " in capsys.readouterr().err
    assert not (tmp_path / "project").exists()


@pytest.mark.parametrize("command", ["run", "recipes", "copy", "predict", "plan", "bench all-reduce"])
def test_help_has_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*command.split(), "--help"])
    assert ended.value.code == 0
    assert f"example: ringstrategy {command}" in " ".join(capsys.readouterr().out.split())


def test_the_list_has_every_recipe_and_what_was_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes"]) == 0
    shown = capsys.readouterr().out
    for recipe in RECIPES:
        assert recipe.name in shown
    assert shown.count("not measured") == sum(recipe.measured is None for recipe in RECIPES)
