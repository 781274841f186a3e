"""docs/exact-averages.md and docs/uneven-data.md hold: their code runs, their messages are those of the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ringstrategy.uneven.lengths import Length, UnevenData, agree_on, more_text
from tests.docs.markdown import Block, blocks
from tests.docs.ways import STEPS, execute
from tests.helpers.ranks import run_ranks

DOCS = Path(__file__).resolve().parents[2] / "docs"
UNEVEN = " ".join((DOCS / "uneven-data.md").read_text().split())
BLOCKS = [block for name in ("exact-averages", "uneven-data") for block in blocks(DOCS / f"{name}.md")]


@pytest.mark.parametrize(
    "block", [block for block in BLOCKS if block.language == "python"], ids=lambda block: f"line {block.line}"
)
def test_a_block_trains(block: Block) -> None:
    window = int((re.findall(r"accumulate_grad_batches=(\d+)", block.text) or ["1"])[0])
    assert run_ranks(execute, 2, block) == [-(-STEPS // window)] * 2


def test_errors_are_those_that_are_shown() -> None:
    with pytest.raises(UnevenData) as error:
        agree_on([Length(16, certain=True), Length(8, certain=True)], "error", 1.0)
    assert str(error.value) in UNEVEN
    shown = more_text([1, 0], 8, "train, epoch 0, step 7").partition(". ")[0]
    assert f"{shown}." in UNEVEN
