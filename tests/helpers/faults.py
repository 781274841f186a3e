"""Ruin a training in one way or another, and see whether it ends as it should."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from ringstrategy import AtomicCheckpointIO
from tests.helpers import fault_script
from tests.helpers.checkpoints import unfinished_in
from tests.helpers.fault_script import PHASES, Ruined, Setting, train_from_launcher, train_on_rank
from tests.helpers.ranks import Outcome, RanksFailedError, run_ranks
from tests.helpers.scripts import Completed, run_script

__all__ = [
    "REASONS",
    "TIMEOUT",
    "assert_ended_with_the_error",
    "assert_others_name_the_rank",
    "ruin",
    "ruin_launcher",
    "ruin_script",
]

# Seconds in which a run must end once the fault can be known. As a script it first starts, and its interpreters end,
# which takes seconds of computing.
END, SCRIPT_END = 10.0, 30.0
# After this a silent rank is given up. In a sound run no rank may keep the others waiting for as long.
TIMEOUT = {"exception": 60.0, "out of memory": 60.0, "kill": 60.0, "stop": 5.0, "pause": 5.0, "sleep": 5.0}
# What the note says of the rank that failed first.
REASONS = {
    "exception": "ValueError: boom-on-rank-{rank}",
    "out of memory": "torch.OutOfMemoryError: boom-on-rank-{rank}",
    "kill": "the process is gone: it was killed, or exited on its own",
    "stop": "(the process is stopped for more than 5 s|did not reach .* within 5 s)",
    "sleep": "did not reach .* within 5 s",
}


def ruin(setting: Setting) -> list[Outcome]:
    """Train on ranks without a launcher, and see how each ends."""
    with pytest.raises(RanksFailedError) as failure:
        run_ranks(train_on_rank, setting.devices, setting, timeout=40.0, grace=20.0)
    _assert_soon(setting, END)
    _assert_checkpoints_are_whole(setting)
    return failure.value.outcomes


def ruin_launcher(setting: Setting) -> Outcome:
    """Train in workers of a process, and see how that ends."""
    with pytest.raises(RanksFailedError) as failure:
        run_ranks(train_from_launcher, 1, setting, init=False, timeout=60.0)
    _assert_soon(setting, END)
    _assert_checkpoints_are_whole(setting)
    (outcome,) = failure.value.outcomes
    assert "left processes behind" not in str(outcome.error)
    return outcome


def ruin_script(setting: Setting, exit_codes: tuple[int, ...] = (1,)) -> Completed:
    """Train as a script of its own that starts its ranks."""
    completed = run_script(Path(fault_script.__file__), setting.to_json(), timeout=90.0, grace=SCRIPT_END)
    assert completed.returncode in exit_codes, completed
    assert not completed.leftover_pids, completed
    _assert_soon(setting, SCRIPT_END)
    _assert_checkpoints_are_whole(setting)
    return completed


def assert_others_name_the_rank(outcomes: list[Outcome], setting: Setting) -> None:
    """Every rank has ended by itself: the one that failed with its own error, the others with its name and reason."""
    rank = setting.rank
    expected = f"rank {rank} failed first .*{REASONS[setting.kind].format(rank=rank)}"
    for outcome in outcomes:
        assert "left processes behind" not in str(outcome.error)
        if outcome.rank != rank:
            assert outcome.error_type in ("RankFailure", None), outcome.error
            assert re.search(expected, f"{outcome.error}\n{outcome.output}"), outcome
            assert "killed" not in (outcome.error or "").replace(REASONS["kill"], ""), "it did not end by itself"
    raised = setting.kind in ("exception", "out of memory")
    assert (f"boom-on-rank-{rank}" if raised else "was killed by SIGKILL") in str(outcomes[rank].error)


def assert_ended_with_the_error(completed: Completed, setting: Setting) -> None:
    """The user's error comes first, and is shown once; the other ranks name its rank."""
    rank = setting.rank
    errors = [line for line in completed.stderr.splitlines() if re.search(r"\w+(Error|Failure): ", line)]
    assert errors
    assert "boom-on-rank" in errors[0], completed
    assert sum(re.fullmatch(rf"(\[rank{rank}\]: )?ValueError: boom-on-rank-{rank}", e) is not None for e in errors) == 1
    if PHASES.index("setup") <= PHASES.index(setting.phase) < PHASES.index("teardown"):
        for other in set(range(setting.devices)) - {rank}:
            assert re.search(rf"rank {other}: rank {rank} failed first .*boom-on-rank-{rank}", completed.stderr)


def _assert_soon(setting: Setting, allowed: float) -> None:
    """The run has just ended, and no later than it may."""
    allowed += setting.timeout if setting.kind in ("stop", "sleep") else 0.0
    took = setting.seconds_since()
    assert took < allowed, f"the last rank ended {took:.1f} s after the fault, more than {allowed:g} s"


def _assert_checkpoints_are_whole(setting: Setting) -> None:
    """Every checkpoint loads, and the next start removes what was left unfinished."""
    folder = setting.checkpoints
    whole = sorted(folder.glob("*.ckpt"))
    # One is written after every batch but the last, from the second on; the fault is in the third, or in the save.
    past = PHASES.index(setting.phase)
    in_save = ("weights", "optimizer state", "checkpoint")
    least = 0 if past < PHASES.index("forward") else 1 if setting.phase in in_save else 2
    assert len(whole) >= least
    names = [name for name, _ in Ruined(setting).named_parameters()]
    for path in whole:
        checkpoint = torch.load(path, weights_only=True)
        (optimizer,) = checkpoint["optimizer_states"]
        momenta = [state["momentum_buffer"] for state in optimizer["state"].values()]
        assert list(checkpoint["state_dict"]) == names
        assert len(momenta) == len(names)
        assert all(tensor.isfinite().all() for tensor in (*checkpoint["state_dict"].values(), *momenta))
    # While one rank makes its optimizers, another may not have let go of the layers of others yet.
    if setting.schedule is not None and PHASES.index("optimizers") < past < PHASES.index("making whole"):
        assert not setting.after_failure.exists(), "a stage cannot save what the others hold"
    assert len(unfinished_in(folder)) <= 1
    AtomicCheckpointIO().save_checkpoint({}, folder / "next.ckpt")
    assert sorted(folder.iterdir()) == sorted([*whole, folder / "next.ckpt"])
