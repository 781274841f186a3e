"""The notebook runs, cell by cell, and holds what it printed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.ranks import run_ranks
from tests.helpers.scripts import run_script

NOTEBOOK = Path(__file__).resolve().parents[2] / "docs" / "notebooks" / "digits.ipynb"
CELLS: list[dict[str, Any]] = json.loads(NOTEBOOK.read_text())["cells"]
CODE = [cell for cell in CELLS if cell["cell_type"] == "code"]
SOURCES = ["".join(cell["source"]) for cell in CODE]


def _run(rank: int, world_size: int) -> tuple[float, int]:
    """All cells in one process, which forks the ranks.

    Returns:
        Accuracy of the test, and how many pictures of a batch this process gets right.
    """
    import matplotlib

    matplotlib.use("Agg")
    cells: dict[str, Any] = {"__name__": "__main__"}
    for number, source in enumerate(SOURCES, start=1):
        exec(compile(source, f"cell {number}", "exec"), cells)
    return cells["metrics"]["accuracy"], int((cells["guesses"] == cells["truth"]).sum())


def test_the_cells_run() -> None:
    ((accuracy, right),) = run_ranks(_run, 1, init=False)
    assert accuracy > 0.9
    assert right > 50


@pytest.mark.slow
def test_the_cells_run_in_an_interactive_session() -> None:
    """Where Lightning accepts no strategy that would start the script once more."""
    session = "import sys\nsys.ps1 = '>>> '\n" + "\n".join(f"exec({source!r})" for source in SOURCES)
    ended = run_script(session, env={"MPLBACKEND": "Agg"}, timeout=100.0)
    assert ended.returncode == 0, ended
    assert not ended.leftover_pids, ended
    assert "on 2 ranks" in ended.stdout, ended


def test_it_is_a_notebook_that_was_run_from_top_to_bottom() -> None:
    assert [cell["execution_count"] for cell in CODE] == list(range(1, len(CODE) + 1))
    assert len({cell["id"] for cell in CELLS}) == len(CELLS)
    printed = "".join(text for cell in CODE for output in cell["outputs"] for text in output.get("text", []))
    assert "on 2 ranks" in printed
    assert "Error" not in NOTEBOOK.read_text()
    assert sys.prefix not in NOTEBOOK.read_text()
