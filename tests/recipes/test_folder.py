"""The recipes are a folder of scripts that needs nothing from elsewhere."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

from ringstrategy.cli.recipes import recipes_folder
from tests.recipes.recipe_runs import LIBRARIES

FOLDER = recipes_folder()
MODULES = {path.stem for path in FOLDER.glob("*.py")}


def _ids(path: Path) -> str:
    return path.name


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
