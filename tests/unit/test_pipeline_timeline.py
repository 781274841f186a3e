"""Schedules played with known costs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringstrategy.pipeline.schedules import Action, Schedule, gpipe, one_f_one_b
from ringstrategy.pipeline.timeline import Span, Timeline, ideal_bubble, simulate

_both = pytest.mark.parametrize("generate", [gpipe, one_f_one_b])


def _times(timeline: Timeline, stage: int) -> dict[str, tuple[float, float]]:
    return {str(span.action): (span.start, span.end) for span in timeline.spans if span.stage == stage}


@_both
@settings(deadline=None)
@given(
    stages=st.integers(1, 8), micro_batches=st.integers(1, 16), forward=st.integers(1, 9), backward=st.integers(1, 9)
)
def test_equal_stages_have_the_ideal_bubble(
    generate: Callable[[int, int], Schedule], stages: int, micro_batches: int, forward: int, backward: int
) -> None:
    timeline = simulate(generate(stages, micro_batches), [forward] * stages, [backward] * stages)
    assert timeline.makespan == (micro_batches + stages - 1) * (forward + backward)
    assert timeline.bubble == ideal_bubble(stages, micro_batches)
    assert (timeline.stages, timeline.micro_batches) == (stages, micro_batches)


@st.composite
def _costs(draw: st.DrawFn) -> tuple[int, int, list[int], list[int], list[int]]:
    stages, cost = draw(st.integers(1, 5)), st.integers(0, 9)
    forward, backward = (draw(st.lists(cost, min_size=stages, max_size=stages)) for _ in range(2))
    return stages, draw(st.integers(1, 6)), forward, backward, draw(st.lists(cost, min_size=4, max_size=4))


@_both
@settings(deadline=None)
@given(_costs())
def test_nothing_runs_before_its_message_or_beside_another_action(
    generate: Callable[[int, int], Schedule], costs: tuple[int, int, list[int], list[int], list[int]]
) -> None:
    stages, micro_batches, forward, backward, sends = costs
    sends = sends[: stages - 1]
    schedule = generate(stages, micro_batches)
    timeline = simulate(schedule, forward, backward, sends)
    for stage, actions in enumerate(schedule):
        times = _times(timeline, stage)
        starts = 0.0
        for action in actions:
            start, end = times[str(action)]
            assert start >= starts
            assert end - start == (forward if action.kind == "F" else backward)[stage]
            sender = stage - 1 if action.kind == "F" else stage + 1
            arrival = 0.0
            if 0 <= sender < stages:
                arrival = _times(timeline, sender)[str(action)][1] + sends[min(stage, sender)]
            assert start == max(starts, arrival), "an action starts as soon as it can"
            starts = end


def test_two_unequal_stages_by_hand() -> None:
    """The second stage is the slow one; 0.5 s to pass anything on.

    ```text
    0  F0 F1              B1    B0       F0 0-1  F1 1-2              B1 8-9    B0 10.5-11.5 (0.5 s after 10)
    1     F0  F1   B1  B0                F0 1.5-3.5  F1 3.5-5.5  B1 5.5-7.5  B0 7.5-9.5
    ```
    """
    timeline = simulate(gpipe(2, 2), [1.0, 2.0], [1.0, 2.0], 0.5)
    assert _times(timeline, 0) == {"F0": (0, 1), "F1": (1, 2), "B1": (8, 9), "B0": (10, 11)}
    assert _times(timeline, 1) == {"F0": (1.5, 3.5), "F1": (3.5, 5.5), "B1": (5.5, 7.5), "B0": (7.5, 9.5)}
    assert timeline.makespan == 11
    assert timeline.bubble == pytest.approx((2 * 11 - 4 - 8) / 22)


def test_the_backward_of_gpipe_starts_when_all_outputs_and_the_loss_are_there() -> None:
    without = simulate(gpipe(3, 4), [1, 1, 1], [2, 2, 2])
    timeline = simulate(gpipe(3, 4), [1, 1, 1], [2, 2, 2], loss=5)
    last = _times(timeline, 2)
    assert last["F3"] == (5, 6)
    assert last["B3"] == (11, 13)
    assert timeline.makespan == without.makespan + 5


def test_1f1b_has_no_loss_of_the_whole_batch() -> None:
    with pytest.raises(ValueError, match="the last stage runs B0 before its last forward"):
        simulate(one_f_one_b(2, 4), [1, 1], [1, 1], loss=1)


def test_a_recomputed_micro_batch_runs_its_forward_again() -> None:
    timeline = simulate(gpipe(2, 3), [1, 1], [2, 2], recomputed=range(2))
    for stage in range(2):
        lengths = {name: end - start for name, (start, end) in _times(timeline, stage).items()}
        assert lengths == {"F0": 1, "F1": 1, "F2": 1, "B2": 2, "B1": 3, "B0": 3}


def test_a_measured_timeline_counts_from_its_first_span() -> None:
    forward, backward = Action("F", 0), Action("B", 0)
    timeline = Timeline(2, (Span(0, forward, 100.0, 101.0), Span(1, backward, 103.0, 104.0)))
    assert (timeline.start, timeline.makespan, timeline.bubble) == (100.0, 4.0, 0.75)


def test_work_that_costs_nothing_has_no_bubble() -> None:
    assert simulate(gpipe(2, 2), [0, 0], [0, 0]).bubble == 0.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"forward": [1.0]}, "forward needs 2 costs of at least 0 s for 2 stages"),
        ({"backward": [1.0, -1.0]}, "backward needs 2 costs .*, not \\[1.0, -1.0\\]"),
        ({"send": [1.0, 1.0]}, "send needs 1 costs"),
        ({"send": -1.0}, "send needs 1 costs of at least 0 s"),
        ({"loss": -1.0}, "loss needs 1 costs of at least 0 s"),
        ({"schedule": gpipe(2, 2)[:1] + one_f_one_b(2, 2)[1:]}, "disagree on the order"),
    ],
)
def test_costs_that_do_not_fit_are_refused(change: dict[str, object], message: str) -> None:
    arguments = {"schedule": gpipe(2, 2), "forward": [1.0, 1.0], "backward": [1.0, 1.0], **change}
    with pytest.raises(ValueError, match=message):
        simulate(**arguments)  # type: ignore[arg-type]


def test_a_timeline_without_spans_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one span"):
        Timeline(2, ())
