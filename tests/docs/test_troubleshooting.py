"""docs/troubleshooting.md names messages that the code has."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from lightning.pytorch.trainer.connectors import accelerator_connector

import ringstrategy

PAGE = Path(__file__).resolve().parents[2] / "docs" / "troubleshooting.md"
HEADINGS = re.findall(r"^### (.+)$", PAGE.read_text(), re.MULTILINE)
MESSAGES = [message for heading in HEADINGS for message in re.findall(r"`(.+?)`", heading)]


def _texts(node: ast.AST) -> Iterator[str]:
    """Strings of a file, with \\0 for what is put in."""
    if isinstance(node, ast.JoinedStr):
        yield "".join(str(part.value) if isinstance(part, ast.Constant) else "\0" for part in node.values)
        return
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    for child in ast.iter_child_nodes(node):
        yield from _texts(child)


@cache
def _written() -> tuple[str, ...]:
    files = [*Path(ringstrategy.__file__).parent.rglob("*.py"), Path(accelerator_connector.__file__)]
    return tuple(text for file in files for text in _texts(ast.parse(file.read_text())))


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_is_one_of_the_code(message: str) -> None:
    pattern = re.compile(".+".join(map(re.escape, message.split("…"))), re.DOTALL)
    assert any(pattern.search(text) for text in _written()), message


def test_every_heading_names_a_message() -> None:
    assert len(HEADINGS) > 30
    assert all(heading.startswith("`") for heading in HEADINGS)
    assert len(MESSAGES) >= len(HEADINGS)
