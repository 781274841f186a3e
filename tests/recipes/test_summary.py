from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console
from summary import Summary


def _shown(summary: Summary) -> str:
    console = Console(width=100)
    with console.capture() as capture:
        console.print(summary.table())
    return capture.get()


def test_the_file_holds_every_field(tmp_path: Path) -> None:
    summary = Summary(0.75, 1234.5, 4, 0.125, "/runs/best.ckpt")
    summary.write(tmp_path / "new" / "summary.json")
    assert json.loads((tmp_path / "new" / "summary.json").read_text()) == {
        "test_accuracy": 0.75,
        "samples_per_s": 1234.5,
        "ranks": 4,
        "communication_share": 0.125,
        "checkpoint": "/runs/best.ckpt",
    }


def test_the_table_shows_numbers_as_people_read_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shown = _shown(Summary(0.98765, 12345.6, 4, 0.125, str(tmp_path / "runs" / "best.ckpt")))
    for value in ("0.9877", "12,346", "4", "12.5%", " runs/best.ckpt"):
        assert value in shown


def test_what_was_not_measured_is_said(tmp_path: Path) -> None:
    summary = Summary(None, None, 1, None, None)
    summary.write(tmp_path / "summary.json")
    assert json.loads((tmp_path / "summary.json").read_text())["communication_share"] is None
    assert _shown(summary).count("not measured") == 3
    assert "not saved" in _shown(summary)
