"""Directives of the reference, which ask the code anew at every build.

`help-text` shows the answer of a command to ``--help``, `arguments` a table of what a class takes.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints
from unittest.mock import patch

from docutils import nodes  # type: ignore[import-untyped]
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from ringstrategy import program
from ringstrategy.cli import main as command_line
from ringstrategy.cli.recipes import add_recipes_to_path

__all__ = ["argument_table", "help_text", "setup", "type_text"]

_PROGRAMS: dict[str, Callable[[list[str]], object]] = {
    "python -m ringstrategy": program.main,
    "ringstrategy": command_line.main,
}
_COLUMNS = "88"  # as wide as a page


def help_text(command: str) -> str:
    """What a command prints with ``--help``.

    Args:
        command: e.g. ``"ringstrategy bench all-reduce"``.

    Raises:
        ValueError: there is no such command.
    """
    name = next((name for name in _PROGRAMS if f"{command} ".startswith(f"{name} ")), None)
    printed = io.StringIO()
    if name is not None:
        words = [*command.removeprefix(name).split(), "--help"]
        environment = patch.dict(os.environ, COLUMNS=_COLUMNS)
        with environment, contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
            _PROGRAMS[name](words)
    if not printed.getvalue():
        raise ValueError(f"there is no command {command!r}")
    return printed.getvalue()


def argument_table(kind: type, further: Mapping[str, str] | None = None) -> list[str]:
    """A table of what a class takes, as lines of Markdown: argument, type and default, meaning.

    Args:
        kind: the class, with the arguments in its docstring or in that of a class it inherits from.
        further: by argument, where to read on.

    Raises:
        ValueError: an argument is not documented, or there is more to read on one that is not there.
    """
    further, meanings = dict(further or {}), _meanings(kind)
    rows = ["| argument | type = default | meaning |", "|---|---|---|"]
    for name, parameter in inspect.signature(kind, eval_str=True).parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            continue
        if name not in meanings:
            raise ValueError(f"{kind.__name__} does not document its argument {name!r}")
        default = "" if parameter.default is parameter.empty else f" = `{_written(parameter.default)}`"
        meaning = f"{meanings[name]} See {further.pop(name)}." if name in further else meanings[name]
        cells = [f"`{name}`", f"`{type_text(parameter.annotation)}`{default}", meaning]
        rows.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    if further:
        raise ValueError(f"{kind.__name__} has no argument {', '.join(further)}")
    return rows


def type_text(hint: Any) -> str:
    """A type as one writes it; of a function only that it is one.

    >>> type_text(Literal["ranks", "samples"] | Callable[[Any], float])
    '"ranks" | "samples" | function'
    """
    if get_origin(hint) in (UnionType, Union):
        return " | ".join(map(type_text, get_args(hint)))
    if get_origin(hint) is Literal:
        return " | ".join(map(_written, get_args(hint)))
    if get_origin(hint) is Callable:
        return "function"
    if hint is NoneType:
        return "None"
    return hint.__name__ if isinstance(hint, type) and not get_args(hint) else _short(str(hint))


def _written(value: object) -> str:
    """A value as one writes it."""
    return _short(repr(value)).replace("'", '"')


def _short(text: str) -> str:
    """Names without the modules that they come from."""
    return re.sub(r"\b(?:[a-z_]+\.)+(?=[A-Za-z_])", "", text)


def _meanings(kind: type) -> dict[str, str]:
    """What the docstring says of each argument, in Markdown."""
    documented = next((base.__doc__ for base in kind.__mro__ if "Args:" in (base.__doc__ or "")), None)
    section = re.search(r"^Args:\n(.*?)(?=^\S|\Z)", inspect.cleandoc(documented or ""), re.MULTILINE | re.DOTALL)
    entries = re.findall(r"^    (\w+): (.*?)(?=^    \S|\Z)", section[1] if section else "", re.MULTILINE | re.DOTALL)
    return {name: re.sub(r":(\w+):`", r"{py:\1}`", " ".join(text.split())) for name, text in entries}


class HelpText(SphinxDirective):
    """The answer of the command to ``--help``."""

    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        """Ask the command."""
        try:
            text = help_text(self.arguments[0])
        except ValueError as error:
            raise self.error(str(error)) from error
        for file in (Path(program.__file__), *Path(command_line.__file__).parent.glob("*.py")):
            self.env.note_dependency(file)  # a change there makes the page anew
        return [nodes.literal_block(text, text, language="text")]


class Arguments(SphinxDirective):
    """What the class takes. The content has lines ``argument: [where to read on](page)``."""

    required_arguments = 1
    has_content = True

    def run(self) -> list[nodes.Node]:
        """Ask the class."""
        module, _, name = self.arguments[0].rpartition(".")
        further = dict(line.split(": ", 1) for line in self.content if line)
        try:
            kind = getattr(importlib.import_module(module), name)
            table = argument_table(kind, further)
        except (ImportError, AttributeError, ValueError) as error:
            raise self.error(str(error)) from error
        self.env.note_dependency(inspect.getfile(kind))
        shown = self.parse_text_to_nodes("\n".join(table))
        for node in shown:
            node["classes"].append("arguments")  # for the style sheet
        return shown


def _resolve_hints(app: Sphinx, function: Any, bound_method: bool) -> None:
    """Have autodoc show what a type hint means, and not the name that our code has given to it."""
    if inspect.isfunction(function) and function.__module__.startswith("ringstrategy."):
        function.__annotations__ = get_type_hints(function)


def _shorten(app: Sphinx, page: nodes.document) -> None:
    """Behind a Literal, Sphinx leaves ``~typing.Any`` as it is."""
    for text in list(page.findall(nodes.Text)):
        if re.match(r"~\w+\.", text):
            text.parent.replace(text, nodes.Text(_short(text[1:])))


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    add_recipes_to_path()
    app.add_directive("help-text", HelpText)
    app.add_directive("arguments", Arguments)
    app.connect("autodoc-before-process-signature", _resolve_hints)
    app.connect("doctree-read", _shorten)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
