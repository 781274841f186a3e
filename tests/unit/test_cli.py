from __future__ import annotations

import argparse
import importlib.util
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import ringstrategy
from ringstrategy.cli import recipes
from ringstrategy.cli.main import main


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"ringstrategy {ringstrategy.__version__}\n"


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    assert re.findall(r"^    (\w+)  ", capsys.readouterr().out, re.MULTILINE) == [
        *("run", "recipes", "copy", "predict", "plan", "bench", "doctor", "simulate")
    ]


def test_no_command_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 2
    assert "COMMAND" in capsys.readouterr().err


def test_without_arguments_the_command_line_of_the_process_counts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["ringstrategy", "run", "no-such-recipe"])
    assert main() == 2
    assert "no-such-recipe" in capsys.readouterr().err


def test_recipes_are_listed_with_what_they_train(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["recipes"]) == 0
    (digits,) = [line for line in capsys.readouterr().out.splitlines() if "digits" in line.split()[1:2]]
    assert "convolutional" in digits
    assert re.search(r"1797 .*│ +2 │", digits)


def test_an_unknown_recipe_is_one_line_with_the_names_that_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "digit", "--trainer.max_epochs", "1"]) == 2
    captured = capsys.readouterr()
    assert captured.err == (
        "ringstrategy run: unknown recipe 'digit'; there is: digits, digits_gpipe, digits_1f1b, cifar10_resnet18, "
        "cifar10_resnet18_bf16_compressed, cifar100_wideresnet, imagefolder_resnet50, imagefolder_vit_b16_gpipe, "
        "finetune_efficientnet\n"
    )
    assert captured.out == ""


def test_missing_extras_are_named_with_the_command_that_installs_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find_spec = importlib.util.find_spec

    def without_extras(name: str, package: str | None = None) -> Any:
        return None if name in ("torchvision", "jsonargparse") else find_spec(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", without_extras)
    assert main(["run", "digits"]) == 1
    assert capsys.readouterr().err == (
        "ringstrategy run: ModuleNotFoundError: torchvision, jsonargparse not installed; the recipes need"
        " `pip install 'ringstrategy[recipes]'` (--debug shows where)\n"
    )


def test_every_word_after_the_recipe_goes_to_its_script(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[list[str], dict[str, Any]]] = []
    script = SimpleNamespace(main=lambda arguments, **rest: calls.append((arguments, rest)))
    monkeypatch.setitem(sys.modules, "train", script)
    words = ["--help", "--trainer.devices=2", "-c", "my.yaml", "--", "--version"]
    assert main(["run", "digits", *words]) == 0
    ((arguments, rest),) = calls
    assert arguments == words
    assert rest["prog"] == "ringstrategy run digits"
    assert rest["config"] == recipes.recipes_folder() / "configs" / "digits.yaml"


def test_the_installed_folder_comes_before_one_beside_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site-packages" / "ringstrategy"
    monkeypatch.setattr(recipes, "__file__", str(package / "cli" / "recipes.py"))
    with pytest.raises(FileNotFoundError, match=f"the recipes are missing from {re.escape(str(package))}"):
        recipes.recipes_folder()
    strangers = package.parent / "recipes"
    strangers.mkdir(parents=True)
    (strangers / "pancakes.py").touch()
    with pytest.raises(FileNotFoundError):
        recipes.recipes_folder()
    for folder in (package.parent / "recipes", package / "recipes"):  # a checkout, then an installation
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "registry.py").touch()
        assert recipes.recipes_folder() == folder


@pytest.mark.parametrize("module", ["run", "recipes"])
def test_a_subcommand_says_what_to_call(module: str) -> None:
    parser = argparse.ArgumentParser()
    importlib.import_module(f"ringstrategy.cli.{module}").add_parser(parser.add_subparsers())
    words = {"run": ["run", "digits"], "recipes": ["recipes"]}[module]
    assert callable(parser.parse_args(words).func)
