"""Run a function in several processes that form a process group.

The processes are forked from a server that has torch and Lightning imported already, so that a test with two ranks
costs a tenth of a second. They meet through a file, never through a guessed port.
"""

from __future__ import annotations

import contextlib
import faulthandler
import math
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist

from tests.helpers.processes import Family

__all__ = ["Outcome", "RanksFailedError", "run_ranks"]

T = TypeVar("T")

# torch._dynamo is imported by the first optimizer, at more than a second per process.
_PRELOADED = ["torch", "torch._dynamo", "lightning.pytorch", "pytest"]
_DUMP_STACKS = signal.SIGUSR2


@dataclass(frozen=True)
class Outcome:
    """How one rank ended.

    Attributes:
        rank: its rank.
        value: what the function returned, ``None`` if it did not return.
        error: traceback, or why there is none; ``None`` if the function returned.
        error_type: name of the exception's class, e.g. ``"ValueError"``.
        skip: reason, if the function called ``pytest.skip``.
        stacks: where every thread of the rank stood when it was given up, else empty.
        output: what the rank wrote to stdout and stderr.
    """

    rank: int
    value: Any = None
    error: str | None = None
    error_type: str | None = None
    skip: str | None = None
    stacks: str = ""
    output: str = ""


class RanksFailedError(AssertionError):
    """At least one rank did not return; carries the outcome of every rank."""

    def __init__(self, outcomes: list[Outcome]) -> None:
        self.outcomes = outcomes
        super().__init__("\n".join(_describe(outcome) for outcome in outcomes))


def run_ranks(
    fn: Callable[..., T],
    world_size: int,
    *args: Any,
    timeout: float = 60.0,
    init: bool = True,
    grace: float = 5.0,
    **kwargs: Any,
) -> list[T]:
    """Run ``fn(rank, world_size, *args, **kwargs)`` in ``world_size`` new processes.

    Each rank has one thread, the environment variables and the folder of the caller, and a session of its own.

    Args:
        fn: a function at module level; it, its arguments and its result must be picklable.
        world_size: number of ranks.
        *args: further positional arguments of ``fn``.
        timeout: seconds after which all ranks are killed.
        init: whether the ranks form a gloo process group before ``fn`` runs.
        grace: seconds that the others get to end by themselves after the first rank has failed.
        **kwargs: keyword arguments of ``fn``.

    Returns:
        What ``fn`` returned, by rank.

    Raises:
        RanksFailedError: a rank raised, died, left a process behind or ran for longer than ``timeout``.
    """
    # Plain pickle, because multiprocessing's own would move tensors through shared memory.
    call = pickle.dumps((fn, args, kwargs))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    with tempfile.TemporaryDirectory(prefix="ranks-") as name:
        folder = _Folder(Path(name))
        rank_arguments = (world_size, folder, call, init, timeout, dict(os.environ))
        ranks = [context.Process(target=_run_rank, args=(rank, *rank_arguments)) for rank in range(world_size)]
        try:
            for process in ranks:
                process.start()
            _supervise(ranks, folder, timeout, grace)
            outcomes = [folder.outcome(rank) for rank in range(world_size)]
        finally:
            for process in ranks:
                if process.pid is not None:
                    Family(process.pid).send(signal.SIGKILL)
                    process.join()
                    process.close()
    if any(outcome.error is not None for outcome in outcomes):
        raise RanksFailedError(outcomes)
    for outcome in outcomes:
        sys.stdout.write(outcome.output)
        if outcome.skip is not None:
            pytest.skip(outcome.skip)
    return [outcome.value for outcome in outcomes]


@dataclass(frozen=True)
class _Folder:
    """The files through which the ranks and their parent talk."""

    path: Path

    @property
    def rendezvous(self) -> Path:
        return self.path / "rendezvous"

    def output(self, rank: int) -> Path:
        return self.path / f"output.{rank}"

    def stacks(self, rank: int) -> Path:
        return self.path / f"stacks.{rank}"

    def has_outcome(self, rank: int) -> bool:
        return self._outcome(rank).exists()

    def write_outcome(self, outcome: Outcome) -> None:
        """Record how a rank ended; a later record replaces an earlier one."""
        unfinished = self.path / f"outcome.{outcome.rank}.{os.getpid()}"
        unfinished.write_bytes(pickle.dumps(outcome))
        unfinished.replace(self._outcome(outcome.rank))

    def outcome(self, rank: int) -> Outcome:
        """The record of a rank, with what it wrote and where it stood."""
        outcome: Outcome = pickle.loads(self._outcome(rank).read_bytes())
        return replace(
            outcome,
            output=self.output(rank).read_text(errors="replace"),
            stacks=self.stacks(rank).read_text(errors="replace"),
        )

    def _outcome(self, rank: int) -> Path:
        return self.path / f"outcome.{rank}"


def _supervise(ranks: list[Any], folder: _Folder, timeout: float, grace: float) -> None:
    """Return once every rank has ended and has an outcome."""
    for rank in range(len(ranks)):
        folder.output(rank).touch()
        folder.stacks(rank).touch()
    running = dict(enumerate(ranks))
    deadline = time.monotonic() + timeout
    reason = f"still running after {timeout:g} s"
    while running:
        left = deadline - time.monotonic()
        wait([process.sentinel for process in running.values()], timeout=max(left, 0.0))
        ended = [rank for rank, process in running.items() if process.exitcode is not None]
        for rank in ended:
            _record_end(rank, running.pop(rank), folder)
            if folder.outcome(rank).error is not None and time.monotonic() + grace < deadline:
                deadline = time.monotonic() + grace
                reason = f"still running {grace:g} s after rank {rank} had failed"
        if not ended and left <= 0:
            _give_up(running, len(ranks), folder, reason)
            return


def _give_up(running: dict[int, Any], world_size: int, folder: _Folder, reason: str) -> None:
    """Kill the ranks that still run, after they have shown where they stand."""
    for process in running.values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, _DUMP_STACKS)
    time.sleep(0.3)  # the dump is written by a signal handler, which nothing acknowledges
    # A rank that has returned waits for the others; only when all have returned is it late itself.
    late = [rank for rank in range(world_size) if not folder.has_outcome(rank)] or list(running)
    for rank, process in running.items():
        Family(process.pid).send(signal.SIGKILL)
        process.join()
        if rank in late:
            folder.write_outcome(Outcome(rank, error=f"{reason}; killed"))


def _record_end(rank: int, process: Any, folder: _Folder) -> None:
    """Give a rank that ended without a word an outcome, and look for what it left behind."""
    if not folder.has_outcome(rank):
        code = process.exitcode
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        folder.write_outcome(Outcome(rank, error=f"{how} before the function returned"))
    if left := Family(process.pid).wait_until_gone(seconds=2.0):
        error = folder.outcome(rank).error
        names = ", ".join(f"{process.pid} ({process.command})" for process in left)
        folder.write_outcome(Outcome(rank, error=f"{error or 'returned'}\nleft processes behind: {names}"))


def _run_rank(
    rank: int, world_size: int, folder: _Folder, call: bytes, init: bool, timeout: float, environ: dict[str, str]
) -> None:
    """The life of one rank."""
    os.setsid()
    os.environ.clear()  # a forked server has the variables of the time when it was started
    os.environ.update(environ, OMP_NUM_THREADS="1")
    torch.set_num_threads(1)
    output = os.open(folder.output(rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    # The parent asks for the stacks by signal. A Trainer resets signal handlers when it ends, so a watchdog writes
    # them as well; and an alarm ends the rank if nobody is left to do it.
    stacks = open(folder.stacks(rank), "a")  # noqa: SIM115  (faulthandler needs it for as long as the process lives)
    faulthandler.register(_DUMP_STACKS, file=stacks, all_threads=True)
    faulthandler.dump_traceback_later(max(timeout - 0.5, 0.1), file=stacks)
    signal.alarm(math.ceil(timeout) + 10)
    try:
        if init:
            dist.init_process_group(
                "gloo",
                init_method=folder.rendezvous.as_uri(),
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=timeout),
            )
        fn, args, kwargs = pickle.loads(call)
        outcome = Outcome(rank, value=fn(rank, world_size, *args, **kwargs))
    except pytest.skip.Exception as skip:
        outcome = Outcome(rank, skip=str(skip))
    except BaseException as error:
        outcome = Outcome(rank, error=traceback.format_exc(), error_type=type(error).__name__)
    try:
        folder.write_outcome(outcome)
    except Exception as error:
        text = f"the function returned something that cannot be pickled:\n{traceback.format_exc()}"
        folder.write_outcome(Outcome(rank, error=text, error_type=type(error).__name__))
    sys.stdout.flush()
    sys.stderr.flush()
    # Nobody hangs up while another rank may still be reading from it, unless to say that it has failed.
    patience = time.monotonic() + 5.0
    while outcome.error is None and not all(map(folder.has_outcome, range(world_size))) and time.monotonic() < patience:
        time.sleep(0.002)
    if dist.is_initialized():
        dist.destroy_process_group()


def _describe(outcome: Outcome) -> str:
    """One rank's part of the error message."""
    if outcome.skip is not None:
        ending = f"skipped: {outcome.skip}"
    else:
        ending = outcome.error if outcome.error is not None else "returned"
    parts = [f"--- rank {outcome.rank}: {ending.strip()}"]
    if outcome.stacks.strip():
        parts.append(f"stacks of rank {outcome.rank}:\n{outcome.stacks.strip()}")
    if outcome.output.strip():
        lines = outcome.output.strip().splitlines()[-30:]
        parts.append(f"last output of rank {outcome.rank}:\n" + "\n".join(lines))
    return "\n".join(parts)
