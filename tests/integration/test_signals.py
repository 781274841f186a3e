"""An interrupted job ends on all ranks, does not look successful, and leaves no process."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Literal

import pytest

from tests.helpers import signal_script
from tests.helpers.launch_script import Sharded
from tests.helpers.models import Batch
from tests.helpers.ranks import RanksFailedError, run_ranks
from tests.helpers.scripts import RunningScript, start_script
from tests.helpers.signal_script import TRAINING, Slow
from tests.helpers.trainers import trainer_on_rank

Receiver = Literal["main process", "whole group", "other rank"]
# What a program returns that ends itself because of the signal, or that the signal ends.
EXIT_CODES = {signal.SIGINT: (1, 130, -2), signal.SIGTERM: (143, -15)}
EXCEPTIONS = {signal.SIGINT: "KeyboardInterrupt", signal.SIGTERM: "SIGTERMException"}


def send(signum: signal.Signals, running: RunningScript, receiver: Receiver) -> None:
    if receiver == "main process":
        running.send_signal(signum)
    elif receiver == "whole group":
        os.killpg(running.pid, signum)  # as a terminal or a scheduler does
    else:
        (other,) = (process.pid for process in running.processes() if process.parent == running.pid)
        os.kill(other, signum)


SIGNALS = [
    pytest.param(
        strategy,
        signum,
        receiver,
        marks=[] if quick else [pytest.mark.slow],
        id=f"{strategy} {signum.name} to {receiver}",
    )
    for strategy, receiver, signum, quick in [
        ("ring_ddp", "main process", signal.SIGTERM, True),
        ("ring_ddp", "main process", signal.SIGINT, False),
        ("ring_ddp", "whole group", signal.SIGTERM, False),
        ("ring_ddp", "whole group", signal.SIGINT, False),
        ("ring_ddp_spawn", "main process", signal.SIGTERM, False),
        ("ring_ddp_spawn", "main process", signal.SIGINT, False),
        ("ring_ddp_spawn", "whole group", signal.SIGTERM, False),
        ("ring_ddp_spawn", "whole group", signal.SIGINT, False),
        ("gpipe", "main process", signal.SIGTERM, False),
        ("gpipe", "whole group", signal.SIGINT, False),
        ("pipeline_1f1b", "main process", signal.SIGINT, False),
        ("pipeline_1f1b_spawn", "whole group", signal.SIGTERM, False),
    ]
]


@pytest.mark.parametrize(("strategy", "signum", "receiver"), SIGNALS)
def test_an_interrupted_job_ends_on_all_ranks_and_fails(
    strategy: str, signum: signal.Signals, receiver: Receiver
) -> None:
    with start_script(Path(signal_script.__file__), strategy) as running:
        for rank in range(2):
            running.wait_for(TRAINING.format(rank))
        send(signum, running, receiver)
        began = time.monotonic()
        completed = running.finish(timeout=30.0, grace=10.0)
    assert time.monotonic() - began < 15, completed
    assert completed.returncode in EXIT_CODES[signum], completed
    assert not completed.leftover_pids, completed
    assert f"on_exception on rank 0: {EXCEPTIONS[signum]}" in completed.stdout, completed
    assert "finished" not in completed.stdout, completed


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ring_ddp", "gpipe"])
def test_a_signal_to_another_rank_fails_the_job(strategy: str) -> None:
    with start_script(Path(signal_script.__file__), strategy) as running:
        for rank in range(2):
            running.wait_for(TRAINING.format(rank))
        send(signal.SIGTERM, running, "other rank")
        completed = running.finish(timeout=30.0, grace=10.0)
    assert completed.returncode == 1, completed
    assert not completed.leftover_pids, completed
    assert "rank 0: rank 1 failed first" in completed.stderr


class Apart(Sharded):
    """Rank 0 computes while the others wait for it in a collective."""

    def on_validation_start(self) -> None:
        # The signal comes in between.
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        if self.trainer.is_global_zero and batch_idx == 0:
            end = time.monotonic() + 1.0
            while time.monotonic() < end:
                time.sleep(0.05)
        super().validation_step(batch, batch_idx)

    def on_validation_epoch_end(self) -> None:
        self.log("value", 1.0, sync_dist=True)


def _be_terminated_apart(rank: int, world_size: int, strategy: str) -> None:
    trainer_on_rank(rank, world_size, strategy=strategy).fit(Apart())


@pytest.mark.parametrize("strategy", ["ring_ddp", "gpipe"])
def test_ranks_that_are_apart_when_terminated_do_not_wait_for_each_other(strategy: str) -> None:
    """Symptom: a broadcast in the signal handler is paired with another collective, and both ranks hang."""
    with pytest.raises(RanksFailedError) as failure:
        run_ranks(_be_terminated_apart, 2, strategy, timeout=30.0, grace=10.0)
    assert [outcome.error_type for outcome in failure.value.outcomes] == ["SIGTERMException"] * 2


def _be_terminated_in(rank: int, world_size: int, strategy: str, hook: str, entry_point: str) -> None:
    terminated = type("Terminated", (Slow,), {hook: lambda self, *_: os.kill(os.getpid(), signal.SIGTERM)})
    getattr(trainer_on_rank(rank, world_size, strategy=strategy), entry_point)(terminated())


@pytest.mark.parametrize(
    ("strategy", "hook", "entry_point"),
    [
        ("ring_ddp", "on_predict_start", "predict"),
        ("ring_ddp", "on_train_end", "fit"),
        ("ring_ddp", "on_test_end", "test"),
        ("gpipe", "on_predict_start", "predict"),
        ("pipeline_1f1b", "on_train_end", "fit"),
    ],
)
def test_a_signal_that_no_loop_looks_for_still_ends_the_job(strategy: str, hook: str, entry_point: str) -> None:
    """Symptom: a job that was told to end goes on, and looks successful."""
    with pytest.raises(RanksFailedError) as failure:
        run_ranks(_be_terminated_in, 2, strategy, hook, entry_point, timeout=30.0)
    # A rank may hear of the other's end before its own signal.
    assert {outcome.error_type for outcome in failure.value.outcomes} - {"RankFailure"} == {"SIGTERMException"}
    assert all("SIGTERMException" in str(outcome.error) for outcome in failure.value.outcomes)
