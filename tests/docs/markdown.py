"""Code blocks and links of a Markdown file."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Block", "anchors", "blocks", "commands", "links"]


@dataclass(frozen=True)
class Block:
    """A fenced code block.

    Attributes:
        language: what stands behind the fence.
        text: the lines between the fences.
        line: number of its first line, from 1.
    """

    language: str
    text: str
    line: int


def blocks(page: Path) -> list[Block]:
    """All fenced code blocks, from top to bottom."""
    text = page.read_text()
    found = re.finditer(r"^```([^\n]*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [Block(match[1].strip(), match[2], text[: match.start()].count("\n") + 2) for match in found]


def commands(page: Path) -> list[str]:
    """The commands of all blocks for a shell, each in one line and without its comment."""
    lines = [
        line
        for block in blocks(page)
        if block.language in ("console", "bash", "sh")
        for line in re.sub(r"\s*\\\n\s*", " ", block.text).splitlines()
    ]
    stripped = [re.sub(r"(^|\s+)#.*", "", line).strip() for line in lines]
    return [command for command in stripped if command]


def links(page: Path) -> list[str]:
    """Targets of all links that lead to no other site."""
    prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return [target for target in re.findall(r"\]\(([^)\s]+)\)", prose) if "://" not in target]


def anchors(page: Path) -> set[str]:
    """The anchors that headings get: lower case, hyphens for spaces, nothing but letters, digits and hyphens."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
