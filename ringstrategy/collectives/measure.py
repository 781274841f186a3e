"""Which of several collectives is the fastest here, for the buckets of this run.

Each collective sums buckets as a training step would: all are started one after the other, then all are waited for. The
collectives take turns, so that whatever else the machine does meets all of them. What counts is the slowest rank's
time, and of several rounds the median. Ranks exchange their times after every round: all of them come to the same
conclusion.

.. code-block:: text

    round 0, first bucket     A  B  C  D     connects, and is not counted
    round 1                   A  B  C  D     what takes more than twice the best is out
    rounds 2 and 3            A  B  C        what has been slower than the best every time is out
    rounds 4, 5, ...          A  B
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ringstrategy.collectives.base import Collective
from ringstrategy.process_group import RankGroup

__all__ = ["BucketSizes", "fastest", "sample"]

# Given a collective's name, the buckets of a step: elements and dtype of each.
BucketSizes = Callable[[str], Sequence[tuple[int, torch.dtype]]]

_ROUNDS = 5
_ROUNDS_IF_FEW_BYTES = 15  # short times vary more, and cost less
_ENOUGH = 3  # after so many, what has never been as fast as the best is out
_HOPELESS = 2.0  # times the best: no noise makes up for that
_MOST_BYTES = 32 * 2**20  # that are summed in a round; more would take long, and tell no more
_FEW_BYTES = 4 * 2**20  # less than this is summed several times in a round ...
_MOST_CALLS = 4  # ... but not more often than this


def fastest(group: RankGroup, collectives: Mapping[str, Collective], buckets: BucketSizes) -> dict[str, float]:
    """Try collectives on the buckets of a step. Collective.

    Args:
        group: the ranks; CPU only.
        collectives: by name, the same on all ranks. The memory that they have allocated is replaced.
        buckets: what a step sends, which may depend on the collective.

    Returns:
        Seconds that the all-reduces of a step take with each, the fastest first; the same on all ranks.
    """
    sizes = {name: list(buckets(name)) for name in collectives}
    samples = {name: sample(sizes[name], _MOST_BYTES) for name in collectives}
    parts = {name: _allocate(collective, samples[name]) for name, collective in collectives.items()}
    whole = {name: max(_nbytes(sizes[name]), 1) / max(_nbytes(samples[name]), 1) for name in collectives}
    calls = max(1, min(_MOST_CALLS, _FEW_BYTES // max(_nbytes(next(iter(samples.values()))), 1)))

    for name, collective in collectives.items():
        _seconds(group, collective, parts[name][:1], 1)
    seconds: dict[str, list[float]] = {name: [] for name in collectives}
    running = list(collectives)
    for _ in range(_ROUNDS if calls == 1 else _ROUNDS_IF_FEW_BYTES):
        mine = [_seconds(group, collectives[name], parts[name], calls) * whole[name] for name in running]
        for name, times in zip(running, zip(*group.exchange(mine), strict=True), strict=True):
            seconds[name].append(max(times))
        running = _still_possible({name: seconds[name] for name in running})
        if len(running) == 1:
            break
    for collective in collectives.values():
        collective.bytes_sent, collective.busy_seconds = 0, 0.0  # these were no gradients
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    return dict(sorted(medians.items(), key=lambda item: item[1]))


def _still_possible(seconds: Mapping[str, Sequence[float]]) -> list[str]:
    """Those that may yet turn out to be the fastest, given their times so far."""
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    best = min(medians, key=medians.__getitem__)
    return [
        name
        for name, times in seconds.items()
        if medians[name] <= _HOPELESS * medians[best]
        and (len(times) < _ENOUGH or name == best or min(times) <= max(seconds[best]))
    ]


def sample(buckets: Sequence[tuple[int, torch.dtype]], most_bytes: int) -> list[tuple[int, torch.dtype]]:
    """The first buckets, as many as have room; the last of them is cut.

    >>> sample([(10, torch.float32), (20, torch.float32), (30, torch.float32)], most_bytes=100)
    [(10, torch.float32), (15, torch.float32)]
    """
    taken = []
    for numel, dtype in buckets:
        numel = min(numel, most_bytes // dtype.itemsize)
        if numel > 0:
            taken.append((numel, dtype))
            most_bytes -= numel * dtype.itemsize
    return taken


def _nbytes(buckets: Sequence[tuple[int, torch.dtype]]) -> int:
    return sum(numel * dtype.itemsize for numel, dtype in buckets)


def _allocate(collective: Collective, buckets: Sequence[tuple[int, torch.dtype]]) -> list[Tensor]:
    """One piece of memory for all buckets, aligned for each."""
    sizes = [numel * dtype.itemsize for numel, dtype in buckets]
    padded = [-(-size // 64) * 64 for size in sizes]
    pieces = torch.split(collective.allocate(sum(padded)), padded)
    return [piece[:size].view(dtype) for piece, size, (_, dtype) in zip(pieces, sizes, buckets, strict=True)]


def _seconds(group: RankGroup, collective: Collective, buckets: Sequence[Tensor], calls: int) -> float:
    """How long this rank takes, from when all ranks are ready."""
    dist.barrier(group=group.control)
    begun = time.perf_counter()
    for _ in range(calls):
        for work in [collective.all_reduce(bucket) for bucket in buckets]:
            work.wait()
    return (time.perf_counter() - begun) / calls
