"""docs/reference holds: every command, argument, name, variable and error is there, and is as the code has it."""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import inspect
import re
import runpy
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry

import ringstrategy
from ringstrategy.cli.main import main
from ringstrategy.cli.recipes import add_recipes_to_path, recipes_folder
from ringstrategy.registration import register
from tests.docs.markdown import Block, anchors, blocks

pytest.importorskip("sphinx", reason="the extra `docs` is not installed")

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
API, COMMANDS, CONFIGURATION = (DOCS / "reference" / f"{name}.md" for name in ("api", "cli", "configuration"))
add_recipes_to_path()


@cache
def _directives() -> Any:
    spec = importlib.util.spec_from_file_location("directives", DOCS / "reference" / "directives.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _uses(page: Path, directive: str) -> dict[str, Block]:
    """Blocks of a directive by its argument."""
    start = f"{{{directive}}} "
    return {block.language.removeprefix(start): block for block in blocks(page) if block.language.startswith(start)}


def _rows(page: Path, head: str) -> list[list[str]]:
    """Cells of all tables with that head."""
    tables = page.read_text().split(f"{head}\n")[1:]
    lines = [line for table in tables for line in table.partition("\n\n")[0].splitlines()[1:]]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def _code(text: str) -> list[str]:
    return re.findall(r"`(\w+)`", text)


# -- commands --------------------------------------------------------------------------------------------------------


class _Caught(Exception):
    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self.parser = parser


def _parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                yield from _parsers(child)


def test_every_command_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def catch(parser: argparse.ArgumentParser, words: object) -> None:
        raise _Caught(parser)

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", catch)
    monkeypatch.setattr(sys, "argv", ["ringstrategy"])
    with pytest.raises(_Caught) as caught:
        main(["--debug"])
    commands = {parser.prog for parser in _parsers(caught.value.parser)}
    assert len(commands) > 8
    assert _uses(COMMANDS, "help-text").keys() == commands | {"python -m ringstrategy"}


@pytest.mark.parametrize("command", _uses(COMMANDS, "help-text"))
def test_a_command_answers(command: str) -> None:
    text = _directives().help_text(command)
    assert text.startswith(f"usage: {command} [-h]")
    assert max(map(len, text.splitlines())) <= 95  # what fits on a page
    assert re.search(r"^examples?:", text, re.MULTILINE)


def test_a_command_that_is_not_there() -> None:
    for command in ("ringstrategy nothing", "nothing"):
        with pytest.raises(ValueError, match=f"no command '{command}'"):
            _directives().help_text(command)


def test_exit_codes_are_those_of_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    missing = str(tmp_path / "missing.ckpt")
    words = {0: ["recipes"], 1: ["copy", "digits", str(tmp_path)], 2: ["run", "nothing"]}
    assert [main(given) for given in words.values()] == list(words)
    assert main(["predict", missing, missing]) == 1
    with pytest.raises(SystemExit) as ended:
        main(["bench", "all-reduce", "--ranks", "1"])
    assert ended.value.code == 2
    documented = [int(code) for code, _ in _rows(COMMANDS, "| exit code | when |")]
    assert documented == [*words, 143]
    assert "digits_gpipe" in capsys.readouterr().out


# -- arguments -------------------------------------------------------------------------------------------------------

TABLES = _uses(CONFIGURATION, "arguments")


def _class(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("path", TABLES)
def test_every_argument_has_its_row(path: str) -> None:
    further = dict(line.split(": ", 1) for line in TABLES[path].text.splitlines())
    _, _, *rows = _directives().argument_table(_class(path), further)
    parameters = inspect.signature(_class(path)).parameters
    cells = [re.split(r"(?<!\\)\|", row.strip("|")) for row in rows]
    assert [name.strip(" `") for name, *_ in cells] == [name for name in parameters if name != "kwargs"]
    for name, kind, meaning in cells:
        assert re.fullmatch(r" `.+`(?: = `.+`)? ", kind), name
        assert len(meaning) > 5, name
    for link in further.values():
        _, target, anchor = re.fullmatch(r"\[(.+)\]\((.+?\.md)(?:#(.+))?\)", link).groups()  # type: ignore[union-attr]
        page = (CONFIGURATION.parent / target).resolve()
        assert page.is_file(), link
        assert not anchor or anchor in anchors(page), link


def test_rows_say_what_the_code_says() -> None:
    table = _directives().argument_table(
        ringstrategy.RingDDPStrategy, {"average": "[exact averages](../exact-averages.md)"}
    )
    rows = {row.split("`")[1]: row for row in table[2:]}
    assert rows["bucket_cap_mb"].startswith("| `bucket_cap_mb` | `float \\| None` = `None` | most MiB of gradients")
    assert "| `timedelta \\| None` = `timedelta(seconds=1800)` |" in rows["timeout"]
    assert '| `"ranks" \\| "samples" \\| function` = `"ranks"` |' in rows["average"]
    assert rows["average"].endswith("what it counts for. See [exact averages](../exact-averages.md). |")
    assert "{py:class}`~ringstrategy.AtomicCheckpointIO`" in rows["checkpoint_io"]


def test_tables_that_cannot_be_made() -> None:
    class Undocumented:
        """A class.

        Args:
            known: is.
        """

        def __init__(self, known: int, unknown: int = 0) -> None: ...

    with pytest.raises(ValueError, match="does not document its argument 'unknown'"):
        _directives().argument_table(Undocumented)
    with pytest.raises(ValueError, match="has no argument nothing"):
        _directives().argument_table(ringstrategy.RingMonitor, {"nothing": "[nowhere](nowhere.md)"})


def test_every_class_of_the_recipes_is_there() -> None:
    text = CONFIGURATION.read_text()
    configs = (recipes_folder() / "configs").glob("*.yaml")
    paths = {path for config in configs for path in re.findall(r"class_path: ([\w.]+)", config.read_text())}
    own = {path for path in paths if not path.startswith("lightning.")}
    assert len(own) > 6
    for path in own - TABLES.keys():
        assert f"`{path.rpartition('.')[2]}`" in text or f"`{path}`" in text, path
    for file in recipes_folder().glob("*_data.py"):
        names = [node.name for node in ast.parse(file.read_text()).body if isinstance(node, ast.ClassDef)]
        for name in names:
            if name.endswith("DataModule") and name != "ImageDataModule":
                assert re.search(rf"[`.]{name}`", text), name


def test_keys_of_the_recipes_are_those_of_the_configs() -> None:
    listed = {name for key, _ in _rows(CONFIGURATION, "| key | what |") for name in _code(key)}
    used = {
        key for config in (recipes_folder() / "configs").glob("*.yaml") for key in yaml.safe_load(config.read_text())
    }
    assert listed == used | {"ckpt_path"}


# -- names -----------------------------------------------------------------------------------------------------------


def _arguments(text: str) -> dict[str, str]:
    return dict(re.findall(r'(\w+)="(\w+)"', text))


def test_names_are_those_that_are_registered() -> None:
    register()
    expected = {}
    for name, made in _rows(CONFIGURATION, "| name | is |"):
        kind = re.match(r"`(\w+)\(", made)
        assert kind is not None
        for ending, how in _rows(CONFIGURATION, "| ending | is |"):
            full = name.strip("`") + ("" if ending == "none" else ending.strip("`"))
            expected[full] = kind[1], _arguments(made) | _arguments(how)
    for ending in re.findall(r"`(_find_unused_parameters_(?:true|false))`", CONFIGURATION.read_text()):
        flag = {"find_unused_parameters": ending.endswith("true")}
        ring = {
            name: made for name, made in expected.items() if re.fullmatch(r"ring_ddp(_spawn|_fork|_notebook)?", name)
        }
        expected |= {name + ending: (kind, arguments | flag) for name, (kind, arguments) in ring.items()}
    registered = {
        name: (getattr(entry["strategy"], "__name__", ""), entry["init_params"])
        for name, entry in StrategyRegistry.items()
        if entry["strategy"] in (ringstrategy.RingDDPStrategy, ringstrategy.PipelineStrategy)
    }
    assert expected == registered


# -- environment variables -------------------------------------------------------------------------------------------


def _variables(file: Path) -> set[str]:
    """Names of environment variables in a file that asks for some."""
    text = file.read_text()
    if not re.search(r"\b(environ|getenv)\b", text):
        return set()
    strings = {node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant)}
    names = {text for text in strings if isinstance(text, str) and re.fullmatch(r"RANK|[A-Z]+(_[A-Z]+)+", text)}
    return {name for name in names if not re.search(rf"^{name} =", text, re.MULTILINE)}


def test_variables_are_those_of_the_code() -> None:
    files = [*Path(ringstrategy.__file__).parent.rglob("*.py"), *recipes_folder().glob("*.py")]
    used = {name for file in files for name in _variables(file)}
    assert {"RANK", "NCCL_ALGO", "PL_GLOBAL_SEED"} <= used
    listed = {name for row in _rows(CONFIGURATION, "| variable | what for |") for cell in row for name in _code(cell)}
    names = {name for name in listed if name.isupper() and not name.endswith("_")}
    assert names == used


# -- the API ---------------------------------------------------------------------------------------------------------

DESCRIBED = re.findall(r"^\.\. auto(?:class|exception):: (\S+)$", API.read_text(), re.MULTILINE)


def test_everything_public_is_described() -> None:
    assert {f"ringstrategy.{name}" for name in ringstrategy.__all__} <= set(DESCRIBED)
    for path in DESCRIBED:
        assert inspect.getdoc(_class(path)), path


def test_every_error_is_described_or_stays_inside() -> None:
    inside = {"LinkLost", "Interrupted", "WrongMessage", "BenchError"}  # become a RankFailure, or a line of a command
    errors = {
        node.name
        for file in Path(ringstrategy.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ClassDef)
        and not node.name.startswith("_")
        and any(ast.unparse(base).endswith(("Error", "Exception")) for base in node.bases)
    }
    described = {path.rpartition(".")[2] for path in DESCRIBED if issubclass(_class(path), Exception)}
    assert errors == described | inside


def test_members_that_pages_mention_are_described() -> None:
    text = "".join(page.read_text() for page in [ROOT / "README.md", *DOCS.rglob("*.md")])
    own = {*vars(ringstrategy.RingDDPStrategy), *vars(ringstrategy.PipelineStrategy)} - set(dir(DDPStrategy))
    mentioned = own & set(re.findall(r"\bstrategy\.(\w+)", text))
    described = {name for line in re.findall(r":members: (.+)", API.read_text()) for name in line.split(", ")}
    assert {"communication", "has_data", "clip_grad_norm_"} <= mentioned <= described


# -- settings of Sphinx ----------------------------------------------------------------------------------------------


def _mapping(monkeypatch: pytest.MonkeyPatch, answer: Any) -> dict[str, Any]:
    monkeypatch.setattr(urllib.request, "urlopen", answer)
    monkeypatch.setattr(sys, "path", [*sys.path])
    mapping: dict[str, Any] = runpy.run_path(str(DOCS / "conf.py"))["intersphinx_mapping"]
    return mapping


def test_pages_of_others_are_linked_where_they_can_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(url: str, timeout: float) -> Any:
        assert timeout <= 5
        if "//docs.pytorch.org/" in url:
            raise TimeoutError
        return nullcontext()

    assert _mapping(monkeypatch, answer).keys() == {"python", "lightning"}


def test_without_a_network_nothing_is_linked(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(url: str, timeout: float) -> Any:
        raise urllib.error.URLError("no route")

    assert _mapping(monkeypatch, answer) == {}
