"""What all ranks did when, as a file that chrome://tracing and ui.perfetto.dev show. Pure, but for :func:`write`.

The format is that of ``torch.profiler``: one JSON object with a list of events, complete ones (``"ph": "X"``) with
start and duration in microseconds, and names of processes and threads (``"ph": "M"``). A rank is a process of it, a
lane a thread:

.. code-block:: text

    rank 0   training      forward ─────── backward ────────────────── optimizer
             all-reduce                        bucket 0 ── bucket 1 ──
    rank 1   ...
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["RankTrace", "Span", "chrome_trace", "clock_offsets", "in_lanes", "write"]


class Span(NamedTuple):
    """Something that a rank did.

    Attributes:
        lane: what it lies beside; spans of one lane are nested in each other, or do not overlap.
        name: of it.
        begun: in seconds.
        ended: in seconds.
        details: shown when it is clicked on.
    """

    lane: str
    name: str
    begun: float
    ended: float
    details: Mapping[str, Any] = {}


class RankTrace(NamedTuple):
    """What one rank did.

    Attributes:
        name: of the rank, e.g. with its host.
        spans: by a clock that all ranks share.
    """

    name: str
    spans: Sequence[Span]


def chrome_trace(by_rank: Sequence[RankTrace]) -> dict[str, Any]:
    """Put the traces of all ranks into one file.

    Args:
        by_rank: traces by rank.

    Returns:
        What becomes JSON. Times begin with the first span of any rank.
    """
    origin = min((span.begun for rank in by_rank for span in rank.spans), default=0.0)
    events: list[dict[str, Any]] = []
    for pid, rank in enumerate(by_rank):
        lanes = list(dict.fromkeys(span.lane for span in rank.spans))
        events.append(_named("process_name", pid, 0, name=rank.name))
        events.append(_named("process_sort_index", pid, 0, sort_index=pid))
        for tid, lane in enumerate(lanes):
            events.append(_named("thread_name", pid, tid, name=lane))
            events.append(_named("thread_sort_index", pid, tid, sort_index=tid))
        events += [
            {
                "ph": "X",
                "cat": span.lane,
                "name": span.name,
                "pid": pid,
                "tid": lanes.index(span.lane),
                "ts": round((span.begun - origin) * 1e6, 3),
                "dur": round((span.ended - span.begun) * 1e6, 3),
                "args": dict(span.details),
            }
            for span in rank.spans
        ]
    return {"schemaVersion": 1, "displayTimeUnit": "ms", "traceEvents": events}


def _named(what: str, pid: int, tid: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "ts": 0, "args": args}


def write(path: Path, by_rank: Sequence[RankTrace]) -> None:
    """Write the traces of all ranks to one file; a folder that is missing is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(chrome_trace(by_rank)))


def in_lanes(groups: Sequence[Sequence[Span]]) -> list[Span]:
    """Put groups that overlap into lanes beside each other: ``"all-reduce"``, ``"all-reduce 2"``, and so on.

    Args:
        groups: of nested spans, the outermost first; all of one lane.
    """
    free: list[float] = []  # by lane, from when on
    placed: list[Span] = []
    for group in sorted(groups, key=lambda group: group[0].begun):
        begun, ended = group[0].begun, group[0].ended
        lane = next((number for number, since in enumerate(free) if since <= begun), len(free))
        free[lane : lane + 1] = [ended]
        name = group[0].lane if lane == 0 else f"{group[0].lane} {lane + 1}"
        placed += [span._replace(lane=name) for span in group]
    return placed


def clock_offsets(readings: Sequence[Sequence[float]], hosts: Sequence[Hashable]) -> list[float]:
    """What the clocks of ranks are ahead of rank 0's.

    ``time.perf_counter`` is one clock for all processes of a host. Between hosts, the ranks read it when they leave a
    barrier: the median of several rounds is right to about the time that a message takes.

    Args:
        readings: in seconds, by rank, of every round.
        hosts: by rank.

    Returns:
        Seconds, by rank; 0 on rank 0's host, and the same for all ranks of one host.
    """
    offsets: dict[Hashable, float] = {hosts[0]: 0.0}
    for host, own in zip(hosts, readings, strict=True):
        if host not in offsets:
            offsets[host] = statistics.median(mine - first for mine, first in zip(own, readings[0], strict=True))
    return [offsets[host] for host in hosts]
