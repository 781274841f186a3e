"""Numbers for loggers. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ringstrategy.communication import Communication
from ringstrategy.monitor.costs import RankCosts, StepCosts, bubble, sum_of

__all__ = ["epoch_metrics", "step_metrics"]

_MIB = 1024 * 1024


def step_metrics(steps: Sequence[StepCosts]) -> dict[str, float]:
    """What a step has cost this rank, on the average.

    Args:
        steps: at least one.

    Returns:
        Numbers by name, of those that are known.
    """
    communication, count = sum_of([step.communication for step in steps]), len(steps)
    all_reduce_seconds = sum(step.all_reduce_seconds for step in steps)
    bubbles = [step.bubble for step in steps if step.bubble is not None]
    metrics = _common(communication, all_reduce_seconds, count, pipeline=bool(bubbles))
    waited = [step.waited_seconds for step in steps if step.waited_seconds is not None]
    if waited:
        metrics["waited_ms"] = sum(waited) / len(waited) * 1e3
    slowest = Counter(step.slowest for step in steps if step.slowest is not None)
    if slowest:
        metrics["slowest_rank"] = float(slowest.most_common(1)[0][0])
    if bubbles:
        metrics["bubble"] = sum(bubbles) / len(bubbles)
    return {f"ring/{name}_step": value for name, value in metrics.items()}


def epoch_metrics(costs: Sequence[RankCosts]) -> dict[str, float]:
    """What a step has cost, on the average over steps and ranks.

    Args:
        costs: by rank; of at least one step.

    Returns:
        Numbers by name, of those that are known.
    """
    communication = sum_of([rank.communication for rank in costs])
    steps, all_reduce_seconds = sum(rank.steps for rank in costs), sum(rank.all_reduce_seconds for rank in costs)
    idle = bubble(costs)
    metrics = _common(communication, all_reduce_seconds, steps, pipeline=idle is not None)
    if compared := sum(rank.compared for rank in costs):
        metrics["waited_ms"] = sum(rank.waited_seconds for rank in costs) / compared * 1e3
        metrics["slowest_rank"] = float(max(range(len(costs)), key=lambda rank: costs[rank].slowest))
    if idle is not None:
        metrics["bubble"] = idle
    return {f"ring/{name}_epoch": value for name, value in metrics.items()}


def _common(communication: Communication, all_reduce_seconds: float, steps: int, pipeline: bool) -> dict[str, float]:
    metrics = {
        "sent_MiB": communication.bytes_sent / steps / _MIB,
        "exposed_ms": communication.exposed_seconds / steps * 1e3,
    }
    if communication.all_reduces:
        metrics["buckets"] = communication.all_reduces / steps
    if all_reduce_seconds:
        metrics["all_reduce_ms"] = all_reduce_seconds / steps * 1e3
        if not pipeline:  # whose stages send as well
            metrics["busbw_GBps"] = communication.bytes_sent / all_reduce_seconds / 1e9
    return metrics
