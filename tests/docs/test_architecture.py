"""docs/architecture.md names every file, in an order in which imports point downwards, and all of its imports."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "architecture.md"
PACKAGE = "ringstrategy"


def _on_the_page() -> dict[str, list[str]]:
    """What each file imports, by file from top to bottom, as the page has it."""
    files: dict[str, list[str]] = {}
    for block in re.findall(r"^```text\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL):
        for line in block.splitlines():
            if named := re.match(r"(\S+\.py)  \S", line):
                assert named[1] not in files, f"{named[1]} stands on the page twice"
                files[named[1]] = []
            elif re.match(r"    (──▶|    )\s*\S+\.py", line):
                files[list(files)[-1]] += re.findall(r"\S+\.py", line)
    return files


def _short(path: Path) -> str:
    """A file as the page calls it: relative to the package, recipes with their folder."""
    return path.relative_to(ROOT).as_posix().removeprefix(f"{PACKAGE}/")


@cache
def _files() -> dict[str, Path]:
    """Every file that holds more than a docstring, by name on the page."""
    paths = [*(ROOT / PACKAGE).rglob("*.py"), *(ROOT / "recipes").glob("*.py")]
    return {_short(path): path for path in paths if len(ast.parse(path.read_text()).body) > 1}


@cache
def _modules() -> dict[str, str]:
    """Names on the page by the names under which modules are imported."""
    modules = {}
    for name in _files():
        dotted = name.removesuffix(".py").replace("/", ".")
        if dotted.startswith("recipes."):
            modules[dotted.removeprefix("recipes.")] = name  # a folder of scripts
        else:
            modules[f"{PACKAGE}.{dotted}".removesuffix(".__init__")] = name
    return modules


def _imported(tree: ast.AST) -> Iterator[str]:
    """Dotted names of what a module imports, also inside functions, but not for its types alone."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        else:
            yield from _imported(node)


def _imports(path: Path) -> set[str]:
    """What a file imports of this project, as the page calls it."""
    modules = _modules()
    found = (
        modules.get(name) or modules.get(name.rpartition(".")[0]) for name in _imported(ast.parse(path.read_text()))
    )
    return {name for name in found if name is not None}


def test_every_file_is_on_the_page() -> None:
    page, files = _on_the_page().keys(), _files().keys()
    assert files - page == set(), "files that the page does not name"
    assert page - files == set(), "names on the page that are no files"


def test_imports_point_downwards() -> None:
    seen: set[str] = set()
    for name in _on_the_page():
        seen.add(name)
        upwards = _imports(_files()[name]) & seen
        assert not upwards, f"{name} imports {', '.join(upwards)}, which the page has above it"


def test_the_arrows_are_the_imports() -> None:
    for name, arrows in _on_the_page().items():
        imports = _imports(_files()[name])
        assert sorted(arrows) == sorted(imports), f"{name} ──▶ {', '.join(sorted(imports)) or 'nothing'}"


def test_private_modules_of_lightning_are_imported_in_one_file() -> None:
    for name, path in _files().items():
        private = [
            dotted
            for dotted in _imported(ast.parse(path.read_text()))
            if dotted.startswith("lightning.") and any(part.startswith("_") for part in dotted.split("."))
        ]
        assert not private or name == "_lightning.py", f"{name} imports {private}"
