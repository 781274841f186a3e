"""The pages of docs/explanation hold: code prints what they show, pictures and numbers are those of the code."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
import shlex
import sys
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch

from ringstrategy.pipeline.schedules import gpipe, one_f_one_b, peak_in_flight
from ringstrategy.strategies import ring_ddp
from tests.docs.markdown import Block, blocks, commands, links
from tests.helpers.pipelines import Classification, batches, layered
from tests.helpers.ranks import run_ranks
from tests.helpers.scripts import run_script
from tests.helpers.trainers import trainer_on_rank

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = sorted((DOCS / "explanation").glob("*.md"))
BY_NAME = {page.stem: page for page in PAGES}
SCRIPTS = ("draw_checkpoint", "draw_overlap", "draw_ring", "draw_timelines")

CHECKPOINTS = BY_NAME["ordinary-checkpoints"]
PROGRAM, COMPARISON, READER = (block for block in blocks(CHECKPOINTS) if block.language == "python")
OTHERS = [
    (page, block) for page in PAGES if page != CHECKPOINTS for block in blocks(page) if block.language == "python"
]


def _words(name: str) -> str:
    return " ".join(BY_NAME[name].read_text().split())


def _shown_after(page: Path, block: Block) -> str:
    """What the page shows as the output of a block: the next one."""
    following = [other for other in blocks(page) if other.line > block.line]
    assert following[0].language == "text"
    return following[0].text


# -- blocks ----------------------------------------------------------------------------------------------------------


def _execute(text: str, **names: Any) -> str:
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile(text, "a block of the page", "exec"), names)
    return output.getvalue()


def _execute_on_rank(rank: int, world_size: int, text: str, folder: Path, words: tuple[str, ...] = ()) -> str:
    """Run code that trains: its Trainers are those of this rank, a classifier and eight batches are there."""

    def small_trainer(*, accelerator: str, devices: int, **options: Any) -> pl.Trainer:
        assert (accelerator, devices) == ("cpu", world_size)
        return trainer_on_rank(rank, world_size, enable_checkpointing=True, **options)

    os.chdir(folder)
    sys.argv[1:] = words
    model, data = Classification(layered(dtype=torch.float32)), batches(*[8] * 8, dtype=torch.float32)
    return _execute(text.replace("pl.Trainer(", "small_trainer("), small_trainer=small_trainer, model=model, data=data)


@pytest.mark.parametrize(
    ("page", "block"), [pytest.param(*each, id=f"{each[0].stem}, line {each[1].line}") for each in OTHERS]
)
def test_a_block_prints_what_the_page_shows(page: Path, block: Block, tmp_path: Path) -> None:
    shown = _shown_after(page, block)
    if "pl.Trainer(" in block.text:
        assert run_ranks(_execute_on_rank, 2, block.text, tmp_path) == [shown] * 2
    else:
        assert _execute(block.text) == shown


def test_checkpoints_of_three_strategies_have_one_outline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for command in commands(CHECKPOINTS):
        *program, strategy, devices, path = shlex.split(command)
        assert program == ["python", "save.py"]
        ranks, words = int(devices), (strategy, devices, path)
        run_ranks(_execute_on_rank, ranks, PROGRAM.text, tmp_path, words, init=ranks > 1)
    monkeypatch.chdir(tmp_path)
    assert _execute(COMPARISON.text) == _shown_after(CHECKPOINTS, COMPARISON)
    assert _execute(READER.text) == _shown_after(CHECKPOINTS, READER)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_commands_write_these_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "save.py").write_text(PROGRAM.text)
    for command in commands(CHECKPOINTS):
        ended = run_script(Path(sys.executable), *shlex.split(command)[1:], cwd=tmp_path, timeout=100.0)
        assert ended.returncode == 0, ended
    monkeypatch.chdir(tmp_path)
    assert _execute(COMPARISON.text) == _shown_after(CHECKPOINTS, COMPARISON)


# -- pictures --------------------------------------------------------------------------------------------------------


@cache
def _script(name: str) -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(DOCS)
        return importlib.import_module(name)


def _texts(picture: Path) -> list[str]:
    """What is written on a picture, in the order in which it was drawn."""
    return re.findall(r"<!-- (.+?) -->", picture.read_text())


def _fills(picture: Path) -> list[str]:
    return re.findall(r"fill: (#\w+)", picture.read_text())


def _coordinates(picture: Path) -> list[float]:
    """Of everything that is no letter."""
    paths = re.findall(r'<path (?:id="([^"]*)" )?d="([^"]*)"', picture.read_text())
    drawn = [path for name, path in paths if not name.startswith("DejaVu")]
    return [float(number) for path in drawn for number in re.findall(r"-?[\d.]+", path)]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the pictures that all scripts make."""
    folder = tmp_path_factory.mktemp("pictures")
    for name in SCRIPTS:
        _script(name).main(folder)
    return folder


def test_the_scripts_make_the_pictures_of_the_pages(made: Path) -> None:
    on_pages = {Path(link).name for page in PAGES for link in links(page) if "images/" in link}
    assert {path.name for path in made.iterdir()} == on_pages
    for name in on_pages:
        there = DOCS / "images" / name
        assert _texts(there) == _texts(made / name) != [], name
        assert _fills(there) == _fills(made / name), name
        assert _coordinates(there) == pytest.approx(_coordinates(made / name), abs=1.0), name
        assert there.stat().st_size < 150_000


# -- the ring --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", range(2, 7))
def test_a_ring_sums_each_shard_in_one_order(ranks: int) -> None:
    moments = _script("draw_ring").play([[(rank,)] * ranks for rank in range(ranks)])
    assert len(moments) == 1 + 2 * (ranks - 1)
    assert (
        moments[-1].values
        == [[tuple((shard + step) % ranks for step in range(ranks)) for shard in range(ranks)]] * ranks
    )


def test_the_numbers_on_the_picture_are_sums(made: Path) -> None:
    """Symptom: a panel shows numbers that no ring has at that moment."""
    ring = _script("draw_ring")
    moments = ring.play(ring.start_values(ring.RANKS))
    assert moments[-1].values == [[1111, 2222, 3333, 4444]] * 4
    # In the order in which panels are drawn: row by row, after the key the reduce-scatter beside the all-gather.
    panels = [0, 1, 4, 2, 5, 3, 6]
    drawn = [int(text) for text in _texts(made / "ring-steps.svg") if text.isdigit()]
    key = [1, 11, 111, 1111]
    expected = [value for panel in panels for own in moments[panel].values for value in own]
    assert drawn == expected[:16] + key + expected[16:]
    for before, after in pairwise(moments):
        for rank, shard in enumerate(after.arrived):
            sent = before.values[rank - 1][shard]
            assert after.values[rank][shard] in (sent, sent + before.values[rank][shard])
            before.values[rank][shard] = after.values[rank][shard]
        assert before.values == after.values  # nothing else has changed


def test_all_ranks_of_a_ring_hold_the_same_bits() -> None:
    parts = np.random.default_rng(0).normal(size=(5, 5)).astype(np.float32) * np.float32(10) ** np.arange(5)
    *_, end = _script("draw_ring").play(parts.tolist())
    assert len({tuple(own) for own in end.values}) == 1


@pytest.mark.parametrize("ranks", range(2, 17))
def test_what_the_busiest_rank_sends(ranks: int) -> None:
    busiest = _script("draw_ring").busiest
    assert busiest("ring", ranks) == pytest.approx(2 * (ranks - 1) / ranks)
    assert busiest("naive", ranks) == ranks - 1
    assert busiest("tree", ranks) == (1 if ranks == 2 else 2 if ranks < 5 else 3)


def test_the_page_of_the_ring_has_the_numbers_of_its_formula() -> None:
    words = _words("ring-all-reduce")
    assert "S for two ranks, 1.5 S for four, 1.875 S for sixteen" in words
    assert [2 * (n - 1) / n for n in (2, 4, 16)] == [1.0, 1.5, 1.875]


# -- buckets ---------------------------------------------------------------------------------------------------------


def test_waits_are_those_of_a_calculation_by_hand() -> None:
    overlap = _script("draw_overlap")
    waits = [overlap.exposed(sent) for sent in overlap.WAYS.values()]
    assert waits == pytest.approx([1 + 15, 2 + 10 * 2.5 - 20, 2.5 + 2, 18 + 7 + 2.5 - 20])


@pytest.mark.parametrize("name", ["an all-reduce per gradient", "buckets of at most 2 MiB", "buckets of at most 4 MiB"])
def test_a_bucket_leaves_when_it_is_full_and_the_one_before_is_through(name: str) -> None:
    sent = _script("draw_overlap").WAYS[name]
    assert [gradient for bucket in sent for gradient in bucket.gradients] == list(range(9, -1, -1))
    free = 0.0
    for bucket in sent:
        assert bucket.ready == 2.0 * (10 - min(bucket.gradients))
        assert bucket.begun == max(bucket.ready, free)
        assert bucket.ended - bucket.begun == pytest.approx(1 + 1.5 * len(bucket.gradients))
        free = bucket.ended


def test_the_best_bucket_is_neither_small_nor_large() -> None:
    curve = _script("draw_overlap").CURVE
    best = min(curve, key=curve.__getitem__)
    assert 1.5 <= best <= 2.5
    assert curve[0.25] == pytest.approx(0.5 + 40 * 1.375 - 20)
    assert curve[10] == pytest.approx(1 + 9 * 1.5)  # the first bucket has left before
    assert curve[best] < curve[0.25] / 5
    assert curve[best] < curve[10] / 3


def test_the_page_of_buckets_has_the_sizes_of_the_code() -> None:
    words = _words("buckets-and-overlap")
    assert f"**{ring_ddp._BACKEND_CAP_MB:g} MiB** where gradients travel through a process group" in words
    assert f"**{ring_ddp._SHARED_MEMORY_CAP_MB:g} MiB** in shared memory" in words


# -- pipelines -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("stages", "micro_batches"), [(4, 8), (3, 5), (2, 2), (5, 3)])
def test_the_bubble_is_that_of_the_formula(stages: int, micro_batches: int) -> None:
    steps = _script("draw_timelines").steps(stages, micro_batches)
    for name in ("timeline-gpipe", "timeline-1f1b"):
        assert steps[name].timeline.bubble == pytest.approx((stages - 1) / (micro_batches + stages - 1))
        assert steps[name].timeline.makespan == pytest.approx((micro_batches + stages - 1) * 0.003)


@pytest.mark.parametrize(("stages", "micro_batches"), [(4, 8), (3, 5), (5, 3)])
def test_what_is_kept_is_what_is_in_flight(stages: int, micro_batches: int) -> None:
    timelines = _script("draw_timelines")
    steps = timelines.steps(stages, micro_batches)
    for name, schedule in (("timeline-gpipe", gpipe), ("timeline-1f1b", one_f_one_b)):
        kept = timelines.kept(steps[name])
        assert tuple(max(m.activations for m in own) for own in kept) == peak_in_flight(schedule(stages, micro_batches))
        assert all(m.inputs == 0 for own in kept for m in own)
    for own in timelines.kept(steps["timeline-recompute"]):
        assert max(m.activations for m in own) == 1
        assert max(m.inputs for m in own) == micro_batches - 1
        assert (own[-1].activations, own[-1].inputs) == (0, 0)


def test_the_table_of_steps_is_that_of_the_timelines() -> None:
    timelines = _script("draw_timelines")
    lines = [line for line in BY_NAME["pipeline-timelines"].read_text().splitlines() if line.startswith("| ")]
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]
    names = {"GPipe": "timeline-gpipe", "twice": "timeline-recompute", "1F1B": "timeline-1f1b"}
    assert [row[0] for row in table] == list(names)
    for title, time, bubble, kept in table:
        step = timelines.steps()[names[title]]
        assert time == f"{step.timeline.makespan * 1e3:.0f} ms"
        assert bubble == f"{step.timeline.bubble * 100:.1f} %"
        most = [max(moment.activations for moment in own) for own in timelines.kept(step)]
        assert kept == ", ".join(map(str, most))
    words = _words("pipeline-timelines")
    assert "8 · 4 · 3 = 96 ms: four ranks are 2.9 times as fast" in words
    assert round(96 / 33, 1) == 2.9


# -- checkpoints -----------------------------------------------------------------------------------------------------


def test_the_table_of_tensors_is_that_of_the_checkpoint() -> None:
    rows = _script("draw_checkpoint").rows()
    stages = {"scale": (0, 1), "net.0": (0,), "net.1": (0,), "net.3": (1,)}
    assert [row.stages for row in rows] == [stages[row.name.rpartition(".")[0] or row.name] for row in rows]
    _, *listed = _shown_after(CHECKPOINTS, COMPARISON).splitlines()
    shapes = dict(line.split(maxsplit=1) for line in listed)
    assert [name for name in shapes if name.startswith("/state_dict")] == [f"/state_dict/{row.name}" for row in rows]
    numbered = [row for row in rows if row.number is not None]
    assert [row.number for row in numbered] == list(range(len(numbered)))
    assert len([name for name in shapes if name.endswith("/exp_avg")]) == len(numbered)
    for row in numbered:
        assert shapes[f"/optimizer_states/0/state/{row.number}/exp_avg"] == shapes[f"/state_dict/{row.name}"]
