"""Schedules complete, hold few micro-batches, and broken ones are refused with the stages that break them."""

from __future__ import annotations

import graphlib
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringstrategy.pipeline.schedules import (
    Action,
    Schedule,
    gpipe,
    one_f_one_b,
    peak_in_flight,
    run_order,
    source,
    validate,
)

_STAGES, _MICRO_BATCHES = st.integers(1, 8), st.integers(1, 16)
_both = pytest.mark.parametrize("generate", [gpipe, one_f_one_b])


def _read(*rows: str) -> Schedule:
    """``"F0 B0"`` for each stage."""
    return tuple(tuple(Action("F" if word[0] == "F" else "B", int(word[1:])) for word in row.split()) for row in rows)


def _write(schedule: Schedule) -> list[str]:
    return [" ".join(map(str, actions)) for actions in schedule]


@_both
@settings(deadline=None)
@given(stages=_STAGES, micro_batches=_MICRO_BATCHES)
def test_a_schedule_completes_and_runs_everything_once(
    generate: Callable[[int, int], Schedule], stages: int, micro_batches: int
) -> None:
    schedule = generate(stages, micro_batches)
    validate(schedule)
    assert len(schedule) == stages
    everything = sorted(f"{kind}{index}" for kind in "FB" for index in range(micro_batches))
    assert all(sorted(map(str, actions)) == everything for actions in schedule)


@_both
@settings(deadline=None)
@given(stages=_STAGES, micro_batches=_MICRO_BATCHES)
def test_every_action_runs_after_what_it_needs(
    generate: Callable[[int, int], Schedule], stages: int, micro_batches: int
) -> None:
    order = run_order(generate(stages, micro_batches))
    when = {each: position for position, each in enumerate(order)}
    assert len(when) == len(order) == 2 * stages * micro_batches
    for stage, action in order:
        if action.kind == "F" and stage > 0:
            assert when[stage - 1, action] < when[stage, action]
        if action.kind == "B" and stage < stages - 1:
            assert when[stage + 1, action] < when[stage, action]
        if action.kind == "B":
            assert when[stage, Action("F", action.micro_batch)] < when[stage, action]


@settings(deadline=None)
@given(stages=_STAGES, micro_batches=_MICRO_BATCHES)
def test_gpipe_holds_all_micro_batches_and_1f1b_as_many_as_stages_follow(stages: int, micro_batches: int) -> None:
    assert peak_in_flight(gpipe(stages, micro_batches)) == (micro_batches,) * stages
    bounds = tuple(min(micro_batches, stages - stage) for stage in range(stages))
    assert peak_in_flight(one_f_one_b(stages, micro_batches)) == bounds


def test_gpipe_runs_the_backwards_from_the_last_micro_batch_to_the_first() -> None:
    assert _write(gpipe(2, 3)) == ["F0 F1 F2 B2 B1 B0"] * 2


def test_1f1b_alternates_between_filling_and_draining() -> None:
    assert _write(one_f_one_b(3, 4)) == [
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]


def test_1f1b_takes_fewer_micro_batches_than_stages() -> None:
    assert _write(one_f_one_b(4, 2)) == ["F0 F1 B0 B1", "F0 F1 B0 B1", "F0 F1 B0 B1", "F0 B0 F1 B1"]


@_both
@pytest.mark.parametrize(("stages", "micro_batches", "message"), [(0, 1, "1 stage, not 0"), (2, 0, "1 micro-batch")])
def test_there_is_something_to_schedule(
    generate: Callable[[int, int], Schedule], stages: int, micro_batches: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        generate(stages, micro_batches)


def test_forwards_come_from_the_stage_before_and_backwards_from_the_one_after() -> None:
    forward, backward = Action("F", 3), Action("B", 3)
    assert [source(forward, stage, 3) for stage in range(3)] == [None, 0, 1]
    assert [source(backward, stage, 3) for stage in range(3)] == [1, 2, None]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "has no stages"),
        ([""], "stage 0 has nothing to run"),
        (["F0 B0", ""], "stage 1 never runs F0; there are 1 micro-batches"),
        (["F0 F1 B1 B0", "F0 F1 B1"], "stage 1 never runs B0"),
        (["F0 B0", "F0 B0 F0"], "stage 1 runs F0 twice"),
        (["B0 F0"], "stage 0 runs B0 before F0"),
        (["F-1 B-1 F0 B0"], "stage 0 runs F-1; micro-batches are counted from 0"),
        (
            ["F0 F1 B1 B0", "F0 F1 B1 B0", "F1 F0 B1 B0"],
            "stages 1 and 2 disagree .*: F0 comes first on stage 1, F1 on stage 2",
        ),
        (["F0 F1 B1 B0", "F0 F1 B0 B1"], "stages 0 and 1 disagree .*: B1 comes first on stage 0, B0 on stage 1"),
        (
            ["F0 B0 F1 B1", "F0 F1 B0 B1"],
            "cannot complete: stage 0 waits at B0 for stage 1, which waits at F1 for stage 0",
        ),
        (
            ["F0 F1 F2 B0 B1 B2", "F0 F1 B0 F2 B1 B2", "F0 F1 F2 B0 B1 B2"],
            "cannot complete: stage 1 waits at B0 for stage 2, which waits at F2 for stage 1",
        ),
    ],
)
def test_a_broken_schedule_is_refused_with_its_stages(rows: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        validate(_read(*rows))


def test_an_order_needs_the_sender() -> None:
    with pytest.raises(ValueError, match="stage 1 waits at F1 for stage 0, which never runs it"):
        run_order(_read("F0", "F1"))


@st.composite
def _interleaved(draw: st.DrawFn) -> Schedule:
    """Forwards and backwards in order, merged anew on each stage: some complete, some do not."""
    micro_batches = draw(st.integers(1, 5))

    def stage() -> list[str]:
        row, forwards, backwards = list[str](), 0, 0
        while backwards < micro_batches:
            may_go_on = forwards < micro_batches
            if may_go_on and (forwards == backwards or draw(st.booleans())):
                row.append(f"F{forwards}")
                forwards += 1
            else:
                row.append(f"B{backwards}")
                backwards += 1
        return row

    return _read(*(" ".join(stage()) for _ in range(draw(st.integers(1, 4)))))


@settings(deadline=None)
@given(_interleaved())
def test_exactly_the_schedules_without_a_cycle_of_waits_are_accepted(schedule: Schedule) -> None:
    waits_for: dict[tuple[int, Action], set[tuple[int, Action]]] = {}
    for stage, actions in enumerate(schedule):
        for position, action in enumerate(actions):
            before = {(stage, actions[position - 1])} if position else set()
            if action.kind == "F" and stage:
                before.add((stage - 1, action))
            if action.kind == "B" and stage + 1 < len(schedule):
                before.add((stage + 1, action))
            waits_for[stage, action] = before
    try:
        graphlib.TopologicalSorter(waits_for).prepare()
    except graphlib.CycleError:
        with pytest.raises(ValueError, match=r"cannot complete: stage \d waits at [FB]\d for stage \d, which waits"):
            validate(schedule)
    else:
        validate(schedule)
