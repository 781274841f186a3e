"""What docs/compatibility.md says of Lightning's features, kept beside the tests that show it.

A test tells the feature it is about::

    @feature("Precision", "bf16-mixed", tried="six steps", outcome="the bits of `ddp`")
    def test_...

The table is made of these and of nothing else: ``python -m tests.helpers.features`` writes it.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import TypeVar

__all__ = ["TABLE", "Feature", "documented", "feature", "table"]

F = TypeVar("F", bound=Callable[..., None])

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "docs" / "compatibility.md"

_MARK = "shows_feature"
_INTRODUCTION = """\
# Compatibility with Lightning

What was run with `strategy="ring_ddp"` on two CPU ranks and compared with `strategy="ddp"` on the same ranks, seeds and
data, or with one process. "Same bits" means that parameters, buffers and logged metrics are equal to the last bit. The
table is written from the tests that it names (`python -m tests.helpers.features`), and a test holds it to them.
"""


@dataclass(frozen=True)
class Feature:
    """One row of the table.

    Attributes:
        group: heading under which it stands.
        name: the feature, as Lightning calls it.
        tried: what the test does with it.
        outcome: what it found.
        test: name of the test.
        file: its module's file, relative to the root.
    """

    group: str
    name: str
    tried: str
    outcome: str
    test: str
    file: str


def feature(group: str, name: str, *, tried: str, outcome: str) -> Callable[[F], F]:
    """Give a test its row of the table; see :class:`Feature`."""

    def mark(test: F) -> F:
        file = Path(inspect.getfile(test)).relative_to(ROOT).as_posix()
        rows = test.__dict__.setdefault(_MARK, [])
        rows.insert(0, Feature(group, name, tried, outcome, test.__name__, file))
        return test

    return mark


def documented() -> Iterator[tuple[FunctionType, list[Feature]]]:
    """Every test of the files ``test_features_*.py``, with its rows."""
    for path in sorted((ROOT / "tests" / "integration").glob("test_features_*.py")):
        module = importlib.import_module(f"tests.integration.{path.stem}")
        for name, test in vars(module).items():
            if name.startswith("test_") and isinstance(test, FunctionType) and test.__module__ == module.__name__:
                yield test, getattr(test, _MARK, [])


def table() -> str:
    """The whole page."""
    groups: dict[str, list[Feature]] = {}
    for _, rows in documented():
        for row in rows:
            groups.setdefault(row.group, []).append(row)
    parts = [_INTRODUCTION]
    for group, rows in groups.items():
        parts += [f"\n## {group}\n\n", "| Feature | Tried | Outcome | Test |\n|---|---|---|---|\n"]
        parts += [f"| {r.name} | {r.tried} | {r.outcome} | [`{r.test}`](../{r.file}) |\n" for r in rows]
    return "".join(parts)


if __name__ == "__main__":
    TABLE.parent.mkdir(exist_ok=True)
    TABLE.write_text(table())
