"""What the pages on compatibility say of Lightning's features, kept beside the tests that show it.

A test tells the feature it is about::

    @feature("Precision", "bf16-mixed", tried="six steps", outcome="the bits of `ddp`")
    def test_...

The tables are made of these and of nothing else: ``python -m tests.helpers.features`` writes them.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import TypeVar

__all__ = ["PAGES", "Feature", "Page", "feature"]

F = TypeVar("F", bound=Callable[..., None])

ROOT = Path(__file__).resolve().parents[2]
_MARK = "shows_feature"
_RING = """\
# Compatibility with Lightning

What was run with `strategy="ring_ddp"` on two CPU ranks and compared with `strategy="ddp"` on the same ranks, seeds and
data, or with one process. "Same bits" means that parameters, buffers and logged metrics are equal to the last bit. The
table is written from the tests that it names (`python -m tests.helpers.features`), and a test holds it to them.
"""
_PIPELINE = """\
# Compatibility of the pipeline with Lightning

What was run with `strategy="gpipe"`, or `PipelineStrategy`, on two or three CPU ranks and compared with one process on
the same seeds and batches. "Like one process" means that parameters, buffers, logged metrics and progress are the same
on all ranks and within 1e-9 of one process, in double precision. What cannot work is refused when training starts. The
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


@dataclass(frozen=True)
class Page:
    """A page made of one table.

    Attributes:
        path: where it lies.
        tests: pattern of its tests' files.
        introduction: what stands above the table.
    """

    path: Path
    tests: str
    introduction: str

    def documented(self) -> Iterator[tuple[FunctionType, list[Feature]]]:
        """Every test of its files, with its rows."""
        for path in sorted((ROOT / "tests" / "integration").glob(self.tests)):
            module = importlib.import_module(f"tests.integration.{path.stem}")
            for name, test in vars(module).items():
                if name.startswith("test_") and isinstance(test, FunctionType) and test.__module__ == module.__name__:
                    yield test, getattr(test, _MARK, [])

    def text(self) -> str:
        """The whole page."""
        groups: dict[str, list[Feature]] = {}
        for _, rows in self.documented():
            for row in rows:
                groups.setdefault(row.group, []).append(row)
        parts = [self.introduction]
        for group, rows in groups.items():
            parts += [f"\n## {group}\n\n", "| Feature | Tried | Outcome | Test |\n|---|---|---|---|\n"]
            parts += [f"| {r.name} | {r.tried} | {r.outcome} | [`{r.test}`](../{r.file}) |\n" for r in rows]
        return "".join(parts)


PAGES = (
    Page(ROOT / "docs" / "compatibility.md", "test_features_*.py", _RING),
    Page(ROOT / "docs" / "compatibility-pipeline.md", "test_pipeline_features_*.py", _PIPELINE),
)


if __name__ == "__main__":
    for page in PAGES:
        page.path.parent.mkdir(exist_ok=True)
        page.path.write_text(page.text())
