"""Which stage runs which micro-batch when: schedules as data, and the proof that they complete.

A schedule is one list of actions per stage. ``F2`` is the forward of micro-batch 2 through the stage, ``B2`` its
backward. With three stages, four micro-batches and equal costs (time runs to the right, a dot is the bubble):

```text
             GPipe: all forwards, the loss, all backwards       1F1B: one forward, one backward, in turn

    stage 0  F0 F1 F2 F3  .  .  .  . B3 B2 B1 B0               F0 F1 F2  .  . B0 F3 B1  . B2  . B3
    stage 1   . F0 F1 F2 F3  .  . B3 B2 B1 B0  .                . F0 F1  . B0 F2 B1 F3 B2  . B3  .
    stage 2   .  . F0 F1 F2 F3 B3 B2 B1 B0  .  .                .  . F0 B0 F1 B1 F2 B2 F3 B3  .  .
```

Both take as long; 1F1B holds the activations of at most as many micro-batches as there are stages from here to the
last, GPipe those of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, TypeAlias

__all__ = ["Action", "Schedule", "gpipe", "one_f_one_b", "peak_in_flight", "run_order", "source", "validate"]


@dataclass(frozen=True, slots=True)
class Action:
    """One micro-batch through one stage.

    Args:
        kind: ``"F"`` for the forward, ``"B"`` for the backward.
        micro_batch: its index in the batch, from 0.
    """

    kind: Literal["F", "B"]
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.micro_batch}"


Schedule: TypeAlias = tuple[tuple[Action, ...], ...]
"""The actions of each stage, in the order in which it runs them."""


def gpipe(stages: int, micro_batches: int) -> Schedule:
    """All forwards, then all backwards.

    Huang et al. 2019, "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism". The backwards
    run from the last micro-batch to the first: the last one's activations are still at hand when its backward begins,
    so recomputing "all except the last" is never done right after the forward.

    Args:
        stages: number of stages, at least 1.
        micro_batches: number of micro-batches, at least 1.

    Returns:
        The actions by stage; each stage holds up to ``micro_batches`` micro-batches.

    Raises:
        ValueError: a number is below 1.
    """
    _check(stages, micro_batches)
    forwards = [Action("F", index) for index in range(micro_batches)]
    backwards = [Action("B", index) for index in reversed(range(micro_batches))]
    return ((*forwards, *backwards),) * stages


def one_f_one_b(stages: int, micro_batches: int) -> Schedule:
    """One forward, one backward in turn, with a flush at the end of each batch: PipeDream-Flush, or 1F1B.

    Narayanan et al. 2021, "Memory-Efficient Pipeline-Parallel DNN Training"; the alternation is that of Narayanan et
    al. 2019, "PipeDream: Generalized Pipeline Parallelism for DNN Training". A stage first runs as many forwards as
    there are stages after it, then alternates between a forward and a backward, then runs the backwards that are left.

    Args:
        stages: number of stages, at least 1.
        micro_batches: number of micro-batches, at least 1; there may be fewer than stages.

    Returns:
        The actions by stage; stage ``s`` holds up to ``min(micro_batches, stages - s)`` micro-batches.

    Raises:
        ValueError: a number is below 1.
    """
    _check(stages, micro_batches)
    forwards = [Action("F", index) for index in range(micro_batches)]
    backwards = [Action("B", index) for index in range(micro_batches)]

    def of_stage(stage: int) -> tuple[Action, ...]:
        ahead = min(stages - 1 - stage, micro_batches)
        alternating = [action for pair in zip(forwards[ahead:], backwards, strict=False) for action in pair]
        return (*forwards[:ahead], *alternating, *backwards[micro_batches - ahead :])

    return tuple(of_stage(stage) for stage in range(stages))


def source(action: Action, stage: int, stages: int) -> int | None:
    """The neighbour that must run the same action before ``stage`` can.

    Args:
        action: what ``stage`` runs next.
        stage: who runs it.
        stages: number of stages.

    Returns:
        The stage that sends the activations or gradients; None where nothing is received: for a forward of the first
        stage and a backward of the last.
    """
    neighbour = stage - 1 if action.kind == "F" else stage + 1
    return neighbour if 0 <= neighbour < stages else None


def peak_in_flight(schedule: Sequence[Sequence[Action]]) -> tuple[int, ...]:
    """The largest number of micro-batches whose activations each stage holds at once: forward begun, backward not done.

    Args:
        schedule: the actions by stage.

    Returns:
        One number per stage.
    """
    changes = ((1 if action.kind == "F" else -1 for action in actions) for actions in schedule)
    return tuple(max(accumulate(each, initial=0)) for each in changes)


def validate(schedule: Sequence[Sequence[Action]]) -> None:
    """Prove that a schedule completes where a send never waits, a receive does, and messages keep their order.

    Args:
        schedule: the actions by stage.

    Raises:
        ValueError: an action is missing, run twice or run too early, two neighbours disagree on the order of their
            messages, or stages wait for each other; the message names stages and actions.
    """
    if not schedule:
        raise ValueError("the schedule has no stages; it needs at least one")
    micro_batches = max((action.micro_batch for actions in schedule for action in actions), default=-1) + 1
    for stage, actions in enumerate(schedule):
        _check_stage(stage, actions, micro_batches)
    for kind in ("F", "B"):
        for stage in range(len(schedule) - 1):
            _check_order(schedule, stage, kind)
    run_order(schedule)


def run_order(schedule: Sequence[Sequence[Action]]) -> list[tuple[int, Action]]:
    """One order in which all actions of all stages can run, each after what it waits for.

    Args:
        schedule: the actions by stage.

    Returns:
        Stage and action, for each action of the schedule.

    Raises:
        ValueError: there is no such order, because stages wait for each other; the message names them.
    """
    stages = len(schedule)
    order: list[tuple[int, Action]] = []
    done: set[tuple[int, Action]] = set()
    position = [0] * stages
    waits: dict[int, int] = {}  # for whom a stage that cannot go on waits
    moved = True
    while moved:
        moved, waits = False, {}
        for stage, actions in enumerate(schedule):
            for action in actions[position[stage] :]:
                sender = source(action, stage, stages)
                if sender is not None and (sender, action) not in done:
                    waits[stage] = sender
                    break
                done.add((stage, action))
                order.append((stage, action))
                position[stage] += 1
                moved = True
    for stage, sender in waits.items():
        # In a row, a chain of stages that wait for a neighbour ends at two that wait for each other, or at one that is
        # through and never sends.
        if waits.get(sender) in (None, stage):
            here = f"the schedule cannot complete: stage {stage} waits at {schedule[stage][position[stage]]} for stage"
            if sender not in waits:
                raise ValueError(f"{here} {sender}, which never runs it")
            there = schedule[sender][position[sender]]
            raise ValueError(f"{here} {sender}, which waits at {there} for stage {stage}")
    return order


def _check(stages: int, micro_batches: int) -> None:
    if stages < 1:
        raise ValueError(f"a pipeline needs at least 1 stage, not {stages}")
    if micro_batches < 1:
        raise ValueError(f"a batch needs at least 1 micro-batch, not {micro_batches}")


def _check_stage(stage: int, actions: Sequence[Action], micro_batches: int) -> None:
    """Each micro-batch has one forward and, later, one backward."""
    if micro_batches < 1:
        raise ValueError(f"stage {stage} has nothing to run; a batch needs at least 1 micro-batch")
    seen: set[Action] = set()
    for action in actions:
        if action in seen:
            raise ValueError(f"stage {stage} runs {action} twice")
        if action.micro_batch < 0:
            raise ValueError(f"stage {stage} runs {action}; micro-batches are counted from 0")
        if action.kind == "B" and Action("F", action.micro_batch) not in seen:
            raise ValueError(f"stage {stage} runs {action} before F{action.micro_batch}")
        seen.add(action)
    for index in range(micro_batches):
        for action in (Action("F", index), Action("B", index)):
            if action not in seen:
                raise ValueError(f"stage {stage} never runs {action}; there are {micro_batches} micro-batches")


def _check_order(schedule: Sequence[Sequence[Action]], stage: int, kind: str) -> None:
    """The messages between ``stage`` and the next are taken in the order in which they are sent."""
    here, there = ([action for action in schedule[each] if action.kind == kind] for each in (stage, stage + 1))
    for ours, theirs in zip(here, there, strict=True):
        if ours != theirs:
            raise ValueError(
                f"stages {stage} and {stage + 1} disagree on the order of what they pass on: {ours} comes first on"
                f" stage {stage}, {theirs} on stage {stage + 1}"
            )
