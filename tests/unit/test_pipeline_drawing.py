"""What a timeline looks like in the terminal and in a file."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from matplotlib import image
from rich.console import Console

from ringstrategy.pipeline.drawing import TimelineText, caption, plot
from ringstrategy.pipeline.schedules import gpipe, one_f_one_b
from ringstrategy.pipeline.timeline import Timeline, simulate


def _timeline() -> Timeline:
    """12 rounds of 1 s."""
    return simulate(one_f_one_b(3, 4), [1, 1, 1], [1, 1, 1])


def _draw(timeline: Timeline, width: int, coloured: bool = False) -> list[str]:
    file = io.StringIO()
    system = "truecolor" if coloured else None
    console = Console(file=file, width=width, force_terminal=coloured, color_system=system)  # type: ignore[arg-type]
    console.print(TimelineText(timeline))
    return [line.rstrip() for line in file.getvalue().splitlines()]


def test_a_row_per_stage_shows_what_runs_when() -> None:
    assert _draw(_timeline(), width=9 + 12 * 4) == [
        "stage 0  F0━━F1━━F2━━········B0━━F3━━B1━━····B2━━····B3━━",
        "stage 1  ····F0━━F1━━····B0━━F2━━B1━━F3━━B2━━····B3━━····",
        "stage 2  ········F0━━B0━━F1━━B1━━F2━━B2━━F3━━B3━━········",
        "         0         3000        6000        9000  12000 ms",
        "          F  forward    B  backward   ··· bubble",
    ]


def test_cells_are_as_wide_as_their_share_of_the_time() -> None:
    timeline = simulate(gpipe(1, 2), [1], [3])
    assert _draw(timeline, width=9 + 80)[0] == "stage 0  " + "".join(
        f"{name}".ljust(width, "━") for name, width in (("F0", 10), ("F1", 10), ("B1", 30), ("B0", 30))
    )


@pytest.mark.parametrize("width", [30, 77, 200])
@pytest.mark.parametrize("micro_batches", [1, 60])
def test_rows_fit_the_console(width: int, micro_batches: int) -> None:
    timeline = simulate(gpipe(11, micro_batches), [1.0] * 11, [1.7] * 11, 0.3)
    lines = _draw(timeline, width)
    rows = [line for line in lines if line.startswith(("stage", " stage"))]
    assert len(rows) == 11
    assert all(len(row) == width for row in rows)


def test_labels_are_left_out_where_there_is_no_room() -> None:
    timeline = simulate(gpipe(1, 16), [1], [1])
    assert _draw(timeline, width=9 + 64)[0].startswith("stage 0  F0F1F2F3F4F5F6F7F8F9F━F━F━F━F━F━B━")
    assert _draw(timeline, width=9 + 32)[0] == "stage 0  " + "F" * 16 + "B" * 16


def test_colours_tell_forwards_backwards_and_neighbours_apart() -> None:
    first, *_ = _draw(simulate(gpipe(1, 2), [1], [1]), width=9 + 40, coloured=True)
    assert "━" not in first
    backgrounds = [part.split("m", 1)[0] for part in first.split("48;2;")[1:]]
    assert len(backgrounds) == len(set(backgrounds)) == 4


def test_work_that_costs_nothing_can_be_drawn(tmp_path: Path) -> None:
    timeline = simulate(gpipe(2, 2), [0, 0], [0, 0])
    assert _draw(timeline, 60)[0] == "stage 0  " + "·" * 51
    plot(timeline, tmp_path / "nothing.png")
    assert image.imread(tmp_path / "nothing.png").size


def test_the_caption_compares_the_bubble_with_the_ideal_one() -> None:
    timeline = simulate(gpipe(2, 4), [0.010, 0.010], [0.020, 0.040])
    assert caption(timeline) == "2 stages, 4 micro-batches: 230 ms, bubble 30.4 % (ideal 20.0 %)"
    assert caption(simulate(gpipe(1, 1), [1], [1])) == "1 stage, 1 micro-batch: 2.00 s, bubble 0.0 % (ideal 0.0 %)"


def test_the_picture_shows_times_in_proportion(tmp_path: Path) -> None:
    path = tmp_path / "timeline.png"
    plot(simulate(gpipe(2, 2), [1, 1], [2, 2]), path, title="a title")
    pixels = np.rint(image.imread(path)[..., :3] * 255).astype(int).reshape(-1, 3)

    def count(*colours: str) -> int:
        wanted = [[int(colour[i : i + 2], 16) for i in (1, 3, 5)] for colour in colours]
        return sum(int((pixels == each).all(axis=1).sum()) for each in wanted)

    forward, backward = count("#1971c2", "#74c0fc"), count("#d9480f", "#ffa94d")
    assert forward > 30_000
    assert backward / forward == pytest.approx(2.0, rel=0.1)
    assert count("#f1f3f5", "#ced4da") > forward / 2, "the bubble is shaded"
