"""When each stage runs what: a schedule played with known costs, and the bubble that is left."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass

from ringstrategy.pipeline.schedules import Action, run_order, source, validate

__all__ = ["Span", "Timeline", "ideal_bubble", "simulate"]


@dataclass(frozen=True, slots=True)
class Span:
    """One action of one stage, in time.

    Args:
        stage: who runs it.
        action: what runs.
        start: in seconds.
        end: in seconds.
    """

    stage: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """The spans of one step, simulated or measured.

    Args:
        stages: number of stages.
        spans: at least one; those of one stage do not overlap.
    """

    stages: int
    spans: tuple[Span, ...]

    def __post_init__(self) -> None:
        if not self.spans:
            raise ValueError("a timeline needs at least one span")

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches."""
        return len({span.action.micro_batch for span in self.spans})

    @property
    def start(self) -> float:
        """When the first action starts, in seconds."""
        return min(span.start for span in self.spans)

    @property
    def makespan(self) -> float:
        """Seconds from the start of the first action to the end of the last."""
        return max(span.end for span in self.spans) - self.start

    @property
    def bubble(self) -> float:
        """Share of all stages' time, from 0 to 1, in which they run neither a forward nor a backward."""
        available = self.stages * self.makespan
        busy = sum(span.end - span.start for span in self.spans)
        return (available - busy) / available if available else 0.0


def ideal_bubble(stages: int, micro_batches: int) -> float:
    """The bubble of GPipe and 1F1B where all stages cost the same and messages nothing.

    Each stage works for ``M`` of ``M + K - 1`` rounds; for the other ``K - 1`` it waits for the pipeline to fill or to
    drain (Huang et al. 2019, section 2.3).

    Args:
        stages: ``K``.
        micro_batches: ``M``.

    Returns:
        ``(K - 1) / (M + K - 1)``.
    """
    return (stages - 1) / (micro_batches + stages - 1)


def simulate(
    schedule: Sequence[Sequence[Action]],
    forward: Sequence[float],
    backward: Sequence[float],
    send: float | Sequence[float] = 0.0,
    *,
    recomputed: Container[int] = (),
    loss: float = 0.0,
) -> Timeline:
    """Play a schedule: every action starts as soon as its stage is free and its message has arrived.

    Messages travel beside the computation: a stage goes on while what it sent is under way.

    Args:
        schedule: the actions by stage.
        forward: seconds of one micro-batch's forward, by stage.
        backward: seconds of one micro-batch's backward, by stage, without recompute.
        send: seconds that a message takes between two neighbours, either way; one number, or one for each of the
            ``K - 1`` pairs of neighbours.
        recomputed: the micro-batches whose forward is run again at the beginning of their backward.
        loss: seconds between the last output and the first backward, where the loss is that of the whole batch, as in
            GPipe. Where a micro-batch has its own loss, that is part of the last stage's forward.

    Returns:
        The timeline, from 0 seconds.

    Raises:
        ValueError: the schedule does not complete, there are too many or too few costs, a cost is negative, or there is
            a ``loss`` although the last stage begins with the backwards before it has all outputs.
    """
    validate(schedule)
    stages = len(schedule)
    sends = [send] * (stages - 1) if isinstance(send, (int, float)) else list(send)
    for name, costs, count in (
        ("forward", forward, stages),
        ("backward", backward, stages),
        ("send", sends, stages - 1),
        ("loss", [loss], 1),
    ):
        if len(costs) != count or any(cost < 0 for cost in costs):
            raise ValueError(f"{name} needs {count} costs of at least 0 s for {stages} stages, not {list(costs)}")
    if loss:
        _check_loss(schedule[-1])

    ends: dict[tuple[int, Action], float] = {}
    free = [0.0] * stages
    spans: list[Span] = []
    for stage, action in run_order(schedule):
        sender = source(action, stage, stages)
        ready = 0.0 if sender is None else ends[sender, action] + sends[min(stage, sender)]
        if sender is None and action.kind == "B" and loss:
            ready = loss + max(end for (where, what), end in ends.items() if where == stage and what.kind == "F")
        start = max(free[stage], ready)
        seconds = forward[stage] if action.kind == "F" else backward[stage]
        if action.kind == "B" and action.micro_batch in recomputed:
            seconds += forward[stage]
        free[stage] = ends[stage, action] = start + seconds
        spans.append(Span(stage, action, start, free[stage]))
    return Timeline(stages, tuple(spans))


def _check_loss(last_stage: Sequence[Action]) -> None:
    """The loss of a whole batch needs all outputs before any backward."""
    kinds = [action.kind for action in last_stage]
    if "F" in kinds[kinds.index("B") :]:
        early = last_stage[kinds.index("B")]
        raise ValueError(
            f"a loss of the whole batch needs all outputs, but the last stage runs {early} before its last forward;"
            " add the loss of a micro-batch to the last stage's forward instead"
        )
