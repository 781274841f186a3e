"""All-reduce bandwidth of several collectives, measured side by side.

Conventions are those of nccl-tests: ``algbw`` is the buffer's size over the time of one all-reduce, ``busbw`` is
``algbw * 2(n-1)/n``, which is what each rank has to send at least and therefore comparable between numbers of ranks.

One repeat of one collective is: an all-reduce of numbers that differ by rank and element, every sum of which is
compared with the exact one; a barrier; and some all-reduces of the same buffer one after the other, each waited for.
Its time is that of the slowest rank over the number of the latter, so that ranks leaving the barrier one after the
other do not weigh. The collectives take turns repeat by repeat: whatever else the machine does meets all of them.

With ``"measure"`` among the algorithms, each size begins with what ``algorithm="measure"`` does when training starts,
and the row of the collective that it chooses says so.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from ringstrategy.bench import BenchError
from ringstrategy.bench.environment import command_line
from ringstrategy.bench.ranks import run_ranks
from ringstrategy.bench.sizes import format_size
from ringstrategy.collectives.base import Collective
from ringstrategy.collectives.choose import CANDIDATES, open_collective
from ringstrategy.collectives.measure import fastest
from ringstrategy.process_group import RankGroup

__all__ = ["ALGORITHMS", "AllReduceConfig", "AllReduceRow", "contribution", "measure", "modulus"]

_CHOICE = "measure"
ALGORITHMS = (*CANDIDATES, _CHOICE)
_SMALL = 2**23  # all-reduces of less than this are timed several at a time ...
_MIN_CALLS, _MAX_CALLS = 5, 64  # ... within these bounds


@dataclass(frozen=True)
class AllReduceConfig:
    """What to measure.

    Attributes:
        ranks: number of processes.
        sizes: buffer sizes in bytes.
        algorithms: names of collectives, e.g. ``"shared_memory"`` and ``"backend"``; ``"measure"`` marks the one among
            them that a run would choose by measuring.
        dtype: floating-point dtype of the elements.
        repeats: timed repeats per size and collective.
        warmup: repeats before them that are checked, but not timed.
        timeout_s: how long a rank waits for another before it gives up.
    """

    ranks: int = 2
    sizes: tuple[int, ...] = (2**16, 2**20, 2**22, 25 * 2**20, 2**26)
    algorithms: tuple[str, ...] = ("shared_memory", "backend")
    dtype: str = "float32"
    repeats: int = 20
    warmup: int = 5
    timeout_s: float = 120.0

    def __post_init__(self) -> None:
        if self.ranks < 2:
            raise ValueError(f"an all-reduce needs at least 2 ranks, not {self.ranks}")
        for name in self.algorithms:
            if name not in ALGORITHMS:
                raise ValueError(f"unknown algorithm {name!r}: choose from {', '.join(ALGORITHMS)}")
        if len(set(self.algorithms)) < len(self.algorithms):
            raise ValueError(f"an algorithm is named twice: {', '.join(self.algorithms)}")
        if not self.collectives:
            raise ValueError(f"{_CHOICE!r} chooses from the other algorithms that are named; name some")
        for size in self.sizes:
            if size % self.torch_dtype.itemsize:
                raise ValueError(
                    f"{format_size(size)} is no whole number of {self.dtype} elements"
                    f" of {self.torch_dtype.itemsize} bytes"
                )

    @property
    def collectives(self) -> tuple[str, ...]:
        """The algorithms that are measured."""
        return tuple(name for name in self.algorithms if name != _CHOICE)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as torch knows it."""
        dtype = getattr(torch, self.dtype, None)
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise ValueError(f"{self.dtype!r} is no floating-point dtype of torch")
        return dtype

    @property
    def command(self) -> str:
        """The command line that measures this."""
        options: dict[str, object] = {
            "ranks": self.ranks,
            "sizes": [format_size(size) for size in self.sizes],
            "algorithms": self.algorithms,
            "dtype": self.dtype,
            "repeats": self.repeats,
            "warmup": self.warmup,
        }
        return command_line("all-reduce", options)


@dataclass(frozen=True)
class AllReduceRow:
    """One line of the result.

    Attributes:
        collective: its name.
        ranks: number of processes.
        bytes: size of the whole buffer.
        median_s: median over the repeats of the slowest rank's time of one all-reduce.
        algbw_GBps: ``bytes / median_s``, in units of 1e9 bytes per second.
        busbw_GBps: ``algbw * 2(n-1)/n``.
        chosen: ``"measure"`` was among the algorithms, and chose this collective for this size.
    """

    collective: str
    ranks: int
    bytes: int
    median_s: float
    algbw_GBps: float
    busbw_GBps: float
    chosen: bool = False

    @classmethod
    def of(cls, collective: str, ranks: int, nbytes: int, median_s: float, chosen: bool = False) -> AllReduceRow:
        """Work out the bandwidths from a time in seconds."""
        algbw = nbytes / median_s / 1e9
        return cls(collective, ranks, nbytes, median_s, algbw, algbw * 2 * (ranks - 1) / ranks, chosen)


def measure(config: AllReduceConfig, enter: Callable[[int], None] | None = None) -> list[AllReduceRow]:
    """Start the ranks, measure, and end them.

    Args:
        config: what to measure.
        enter: called first in the process of each rank, with the rank, e.g. to move it to another network namespace. A
            function of a module, or a partial of one.

    Returns:
        One row per size and collective, by size and then as named.

    Raises:
        BenchError: a rank died or failed, a sum was wrong, or a collective is not available here. No rank is left.
    """
    with tempfile.TemporaryDirectory(prefix="ringstrategy-bench-") as folder:
        run_ranks(_run_rank, config.ranks, config, folder, enter)
        medians = json.loads(_result_file(folder).read_text())
    return [AllReduceRow.of(name, config.ranks, size, seconds, chosen) for size, name, seconds, chosen in medians]


def modulus(ranks: int, dtype: torch.dtype) -> int:
    """The period of :func:`contribution`, such that sums over the ranks are exact in ``dtype``.

    It is odd: no power of two, as sizes of chunks tend to be, is a multiple of it, so that a chunk in another's place
    is seen.
    """
    exact = int(2 / torch.finfo(dtype).eps)  # every integer up to this has a representation of its own
    return (exact // ranks - 1) | 1


def contribution(rank: int, ranks: int, count: int, dtype: torch.dtype) -> Tensor:
    """What one rank brings: integers that differ between neighbouring elements and between ranks.

    Returns:
        ``int64`` tensor of shape ``(count,)``, each element below :func:`modulus`.
    """
    period = modulus(ranks, dtype)
    return (torch.arange(count) + rank * (period // ranks)) % period


def _run_rank(rank: int, config: AllReduceConfig, folder: str, enter: Callable[[int], None] | None) -> None:
    """One process: joins the others, measures every size, and rank 0 writes the medians."""
    if enter is not None:
        enter(rank)
    torch.set_num_threads(1)
    timeout = timedelta(seconds=config.timeout_s)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=config.ranks, timeout=timeout
    )
    group = RankGroup.connect(torch.device("cpu"), timeout)
    collectives = [_open(group, name) for name in config.collectives]
    medians: list[tuple[int, str, float, bool]] = []
    for size in config.sizes:
        choice = _choice(group, collectives, size, config)
        found = _measure_size(collectives, size, rank, config)
        medians += [(size, name, seconds, name == choice) for name, seconds in found.items()]
    for collective in collectives:
        collective.close()
    if rank == 0:
        _result_file(folder).write_text(json.dumps(medians))
    dist.barrier()
    dist.destroy_process_group()


def _open(group: RankGroup, name: str) -> Collective:
    """The collective of this name, or an error that says it cannot be had."""
    collective, obstacle = open_collective(group, name)
    if collective is None:
        raise BenchError(f"{name!r} is not available here: {obstacle}")
    return collective


def _choice(group: RankGroup, collectives: list[Collective], nbytes: int, config: AllReduceConfig) -> str | None:
    """What a run with one bucket of this size would choose by measuring, if that is asked for."""
    if _CHOICE not in config.algorithms:
        return None
    bucket = nbytes // config.torch_dtype.itemsize, config.torch_dtype
    return next(iter(fastest(group, {each.name: each for each in collectives}, lambda _: [bucket])))


def _measure_size(collectives: list[Collective], nbytes: int, rank: int, config: AllReduceConfig) -> dict[str, float]:
    """The median time in seconds of an all-reduce of ``nbytes``, by name of the collective."""
    dtype, count = config.torch_dtype, nbytes // config.torch_dtype.itemsize
    mine = contribution(rank, config.ranks, count, dtype).to(dtype)
    each = (contribution(other, config.ranks, count, dtype) for other in range(config.ranks))
    expected = sum(each, start=torch.zeros(count, dtype=torch.int64)).to(dtype)
    calls = max(_MIN_CALLS, min(_MAX_CALLS, _SMALL // nbytes))
    buffers = [collective.allocate(nbytes).view(dtype) for collective in collectives]

    seconds: list[list[float]] = [[] for _ in collectives]
    problem: str | None = None
    for _ in range(config.warmup + config.repeats):
        for collective, buffer, times in zip(collectives, buffers, seconds, strict=True):
            buffer.copy_(mine)
            collective.all_reduce(buffer, background=False).wait()
            problem = problem or _difference(buffer, expected, collective.name, rank)
            buffer.zero_()  # sums of sums would grow beyond all numbers
            dist.barrier()
            start = time.perf_counter()
            for _ in range(calls):
                collective.all_reduce(buffer, background=False).wait()
            times.append((time.perf_counter() - start) / calls)
            problem = problem or _difference(buffer, torch.zeros_like(expected), collective.name, rank)

    of_all_ranks: list[tuple[list[list[float]], str | None]] = [([], None)] * config.ranks
    dist.all_gather_object(of_all_ranks, (seconds, problem))
    # Every rank raises the same error, so that no rank's broken connection hides it.
    for _, found in of_all_ranks:
        if found:
            raise BenchError(found)
    medians = {}
    for index, collective in enumerate(collectives):
        slowest = map(max, zip(*(times[index] for times, _ in of_all_ranks), strict=True))
        medians[collective.name] = statistics.median(list(slowest)[config.warmup :])
    return medians


def _difference(buffer: Tensor, expected: Tensor, name: str, rank: int) -> str | None:
    """Says where the result is wrong, or nothing."""
    if torch.equal(buffer, expected):
        return None
    wrong = (buffer != expected).nonzero()
    element = int(wrong[0])
    return (
        f"{name} summed wrongly: rank {rank}, {format_size(expected.nbytes)}, element {element} is"
        f" {buffer[element].item()} instead of {expected[element].item()} ({len(wrong)} elements differ)"
    )


def _result_file(folder: str) -> Path:
    return Path(folder, "medians.json")
