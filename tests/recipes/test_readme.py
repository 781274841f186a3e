"""recipes/README.md holds: every command is understood, its tables are those of the code."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.core.saving import load_hparams_from_yaml
from registry import RECIPES

from ringstrategy.cli.main import main
from ringstrategy.cli.recipes import recipes_folder
from tests.docs.markdown import blocks, commands

README = recipes_folder() / "README.md"
TEXT = README.read_text()
COMMANDS = commands(README)
# torchrun starts the same command as a module.
RUNS = [re.sub(r"^torchrun .* -m ringstrategy\.cli\.main ", "ringstrategy ", command) for command in COMMANDS]


def test_every_command_is_tried_below_or_elsewhere() -> None:
    others = {command for command in RUNS if not command.startswith("ringstrategy run ")}
    elsewhere = {words.split()[1] for words in others}  # tests/recipes/test_commands.py and test_predict.py
    assert elsewhere == {"recipes", "copy", "predict"}
    assert all(command.startswith("ringstrategy ") for command in RUNS)


@pytest.mark.parametrize("command", [command for command in RUNS if command.startswith("ringstrategy run ")])
def test_a_run_is_understood(command: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = shlex.split(command)[1:]
    with pytest.raises(SystemExit) as ended:
        main([*words, "--print_config"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    if "--help" in words:
        assert shown.startswith("usage: ringstrategy run ")
        return
    (tmp_path / "config.yaml").write_text(shown)
    config = load_hparams_from_yaml(tmp_path / "config.yaml")
    for name, value in zip(words[2::2], words[3::2], strict=True):
        place = config
        for part in name.removeprefix("--").split("."):
            place = place[part] if part in place else place["init_args"][part]
        found = place["class_path"] if isinstance(place, dict) else place
        assert found == _parsed(value), name


def _parsed(value: str) -> object:
    """As YAML has it."""
    parser = LightningArgumentParser()
    parser.add_argument("--value", type=bool | int | float | str)
    return parser.parse_args([f"--value={value}"]).value


def _first_cells(head: str) -> list[str]:
    """Names in the first column of the table that begins with that cell."""
    lines = TEXT[re.search(rf"^\| {head} +\|", TEXT, re.MULTILINE).start() :].partition("\n\n")[0]  # type: ignore[union-attr]
    return [name for line in lines.splitlines()[2:] for name in re.findall(r"`([\w.]+)`", line.split("|")[1])]


def test_the_recipes_are_those_of_the_registry() -> None:
    assert _first_cells("name") == [recipe.name for recipe in RECIPES]
    ranks = {recipe.name: recipe.ranks for recipe in RECIPES}
    for line in re.findall(r"^\| `.*\| (\d) \|$", TEXT, re.MULTILINE):
        assert int(line) in ranks.values()


def test_every_file_is_listed() -> None:
    listed = set(re.findall(r"`(\w+\.py)`", TEXT[TEXT.index("\n## The files") :].partition("\n## A new recipe")[0]))
    assert listed == {path.name for path in README.parent.glob("*.py")}


def test_the_first_line_of_a_run_is_as_shown() -> None:
    (shown,) = [block.text.strip() for block in blocks(README) if block.language == "text"]
    config = load_hparams_from_yaml(README.parent / "configs" / "cifar10_resnet18.yaml")
    size, ranks = config["data"]["init_args"]["batch_size"], config["trainer"]["devices"]
    rate, per = config["model"]["learning_rate"], config["model"]["learning_rate_per"]
    total = size * ranks
    expected = f"batch: {size} images per rank x {ranks} = {total} in total; learning rate: {rate:g} x {total}/{per}"
    assert shown == f"{expected} = {rate * total / per:g}"
