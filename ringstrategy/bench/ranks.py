"""Processes for a measurement: forked from a server that has imported torch once, so that they start at once."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, start_processes

from ringstrategy.bench import BenchError

__all__ = ["run_ranks"]

_GRACE_S = 3.0  # for the other ranks to end by themselves when one has died


def run_ranks(run: Callable[..., None], ranks: int, *args: Any) -> None:
    """Run ``run(rank, *args)`` in a new process for each rank, and wait.

    Args:
        run: a function of a module, which the server imports.
        ranks: how many processes.
        *args: what pickles.

    Raises:
        BenchError: a rank died or raised. No rank is left, whatever happens.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([run.__module__])
    processes = start_processes(  # type: ignore[no-untyped-call]
        run, args, nprocs=ranks, join=False, daemon=True, start_method="forkserver"
    )
    try:
        while not processes.join(grace_period=_GRACE_S):
            pass
    except ProcessRaisedException as error:
        # The last line of the rank's traceback; an error of ours explains itself.
        last = str(error).strip().splitlines()[-1]
        prefix = f"{BenchError.__module__}.{BenchError.__qualname__}: "
        message = last.removeprefix(prefix) if last.startswith(prefix) else str(error).strip()
        raise BenchError(message) from error
    except ProcessExitedException as error:
        raise BenchError(f"rank {error.error_index} (pid {error.error_pid}) died: {error}") from error
    finally:
        for process in processes.processes:
            process.kill()
            process.join()
        for file in processes.error_files:
            Path(file).unlink(missing_ok=True)
