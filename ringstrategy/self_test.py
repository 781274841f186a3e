"""Two ranks that really start, meet and sum: the shortest run that can fail as a long one does."""

from __future__ import annotations

import json
import tempfile
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from ringstrategy.bench import BenchError
from ringstrategy.bench.all_reduce import contribution
from ringstrategy.bench.ranks import run_ranks
from ringstrategy.collectives.base import Collective
from ringstrategy.collectives.choose import open_collective
from ringstrategy.process_group import RankGroup

__all__ = ["Trial", "self_test"]

_RANKS = 2
_ELEMENTS = 2**20
_CALLS = 5
_TIMEOUT = timedelta(seconds=60)


@dataclass(frozen=True)
class Trial:
    """How one all-reduce went.

    Attributes:
        collective: its name, ``"shared_memory"`` or ``"backend"``; that of the backend if the ranks did not even meet.
        device: of the buffers.
        ranks: how many took part.
        nbytes: size of the buffer.
        seconds: of the fastest call on rank 0, where it worked.
        obstacle: why it cannot be had here, else.
        error: what went wrong, although nothing is in the way.
    """

    collective: str
    device: str
    ranks: int
    nbytes: int = 4 * _ELEMENTS
    seconds: float | None = None
    obstacle: str | None = None
    error: str | None = None


def self_test() -> list[Trial]:
    """Start two ranks on the CPU, and as many as there are GPUs for, and compare what they sum with what they should.

    Returns:
        One trial for shared memory and one for each backend. Nothing is raised, and no process left.
    """
    trials = _run("cpu", "gloo", _RANKS, ("shared_memory", "backend"))
    if torch.cuda.is_available() and dist.is_nccl_available():
        trials += _run("cuda", "nccl", min(_RANKS, torch.cuda.device_count()), ("backend",))
    return trials


def _run(device: str, backend: str, ranks: int, names: tuple[str, ...]) -> list[Trial]:
    with tempfile.TemporaryDirectory(prefix="ringstrategy-doctor-") as folder:
        try:
            run_ranks(_run_rank, ranks, ranks, device, backend, names, folder)
            trials = json.loads(Path(folder, "trials.json").read_text())
        except (BenchError, OSError) as error:
            # The last line says what happened; those before it are for whoever debugs a program.
            return [Trial(backend, device, ranks, error=str(error).strip().splitlines()[-1])]
    return [Trial(**trial) for trial in trials]


def _run_rank(rank: int, ranks: int, device: str, backend: str, names: tuple[str, ...], folder: str) -> None:
    torch.set_num_threads(1)
    where = torch.device(device, rank) if device == "cuda" else torch.device(device)
    if where.type == "cuda":
        torch.cuda.set_device(where)
    dist.init_process_group(
        backend, init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks, timeout=_TIMEOUT
    )
    group = RankGroup.connect(where, _TIMEOUT)
    trials = []
    for name in names:
        collective, obstacle = open_collective(group, name)
        if collective is None:
            trials.append(Trial(name, device, ranks, obstacle=obstacle))
            continue
        problems = group.exchange(_try(collective, rank, ranks))
        error = next((problem for problem in problems if isinstance(problem, str)), None)
        seconds = problems[0] if isinstance(problems[0], float) else None
        trials.append(Trial(name, device, ranks, seconds=None if error else seconds, error=error))
        collective.close()
    if rank == 0:
        Path(folder, "trials.json").write_text(json.dumps([asdict(trial) for trial in trials]))
    group.close()
    dist.barrier()
    dist.destroy_process_group()


def _try(collective: Collective, rank: int, ranks: int) -> float | str:
    """The time of the fastest all-reduce, or what was wrong with its result."""
    buffer = collective.allocate(4 * _ELEMENTS).view(torch.float32)
    parts = [contribution(other, ranks, _ELEMENTS, torch.float32).float() for other in range(ranks)]
    expected = torch.stack(parts).sum(0)
    seconds = []
    for _ in range(_CALLS):
        buffer.copy_(parts[rank])
        begun = time.perf_counter()
        collective.all_reduce(buffer, background=False).wait()
        result = buffer.cpu()
        seconds.append(time.perf_counter() - begun)
        if not torch.equal(result, expected):
            wrong = int((result != expected).sum())
            return f"rank {rank} got {wrong} wrong sums of {_ELEMENTS}"
    return min(seconds)
