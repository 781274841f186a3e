"""A rank that raises, is killed, or stops ends the run: soon, on every rank, with its name, and nothing is left.

The matrix runs on ranks that exist already, as under torchrun; with a launcher around them a subset runs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path

import pytest
import torch

from ringstrategy import AtomicCheckpointIO
from tests.helpers import fault_script
from tests.helpers.checkpoints import unfinished_in
from tests.helpers.fault_script import PHASES, Setting, train_from_launcher, train_on_rank
from tests.helpers.ranks import Outcome, RanksFailedError, run_ranks
from tests.helpers.scripts import Completed, run_script

# Seconds in which a run must end once the fault can be known. As a script it first starts, and its interpreters end,
# which takes seconds of computing.
END, SCRIPT_END = 10.0, 30.0
# After this a silent rank is given up. In a sound run no rank may keep the others waiting for as long.
TIMEOUT = {"exception": 60.0, "kill": 60.0, "stop": 5.0, "sleep": 5.0}
# What the note says of the rank that failed first.
REASONS = {
    "exception": "ValueError: boom-on-rank-{rank}",
    "kill": "the process is gone: it was killed, or exited on its own",
    "stop": "(the process is stopped for more than 5 s|did not reach .* within 5 s)",
    "sleep": "did not reach .* within 5 s",
}
START_AND_END = ("before meeting", "teardown")
WATCHED = ("setup", *PHASES[PHASES.index("forward") : PHASES.index("teardown")])
Case = tuple[str, str, int, int]  # kind, phase, number of ranks, the one that fails


def cases(kinds: tuple[str, ...], phases: tuple[str, ...], worlds: tuple[int, ...] = (2, 3)) -> Iterator[Case]:
    for kind, phase, world_size in product(kinds, phases, worlds):
        for rank in range(world_size):
            yield kind, phase, world_size, rank


def matrix(all_cases: Iterable[Case], quick: set[Case] | None = None) -> pytest.MarkDecorator:
    """Parametrize with cases; all but the quick ones are slow."""
    marked = [
        pytest.param(
            kind,
            phase,
            world_size,
            rank,
            id=f"{kind} in {phase} on rank {rank} of {world_size}",
            marks=[] if (kind, phase, world_size, rank) in (quick or set()) else [pytest.mark.slow],
        )
        for kind, phase, world_size, rank in all_cases
    ]
    return pytest.mark.parametrize(("kind", "phase", "world_size", "rank"), marked)


def assert_soon(setting: Setting, allowed: float = END) -> None:
    """The run has just ended, and no later than it may."""
    allowed += setting.timeout if setting.kind in ("stop", "sleep") else 0.0
    took = setting.seconds_since()
    assert took < allowed, f"the last rank ended {took:.1f} s after the fault, more than {allowed:g} s"


def assert_checkpoints_are_whole(setting: Setting) -> None:
    """Every checkpoint loads, and the next start removes what was left unfinished."""
    folder = setting.checkpoints
    whole = sorted(folder.glob("*.ckpt"))
    # One is written after every batch but the last, from the second on; the fault is in the third, or in the save.
    past = PHASES.index(setting.phase)
    least = 0 if past < PHASES.index("forward") else 1 if setting.phase == "checkpoint" else 2
    assert len(whole) >= least
    for path in whole:
        assert len(torch.load(path, weights_only=True)["state_dict"]) == 4
    assert len(unfinished_in(folder)) <= 1
    AtomicCheckpointIO().save_checkpoint({}, folder / "next.ckpt")
    assert sorted(folder.iterdir()) == sorted([*whole, folder / "next.ckpt"])


def ruin(setting: Setting) -> list[Outcome]:
    """Train on ranks without a launcher, and see how each ends."""
    with pytest.raises(RanksFailedError) as failure:
        run_ranks(train_on_rank, setting.devices, setting, timeout=40.0, grace=20.0)
    assert_soon(setting)
    assert_checkpoints_are_whole(setting)
    return failure.value.outcomes


QUICK: set[Case] = {
    ("exception", "forward", 2, 0),
    ("exception", "all-reduce", 2, 1),
    ("kill", "all-reduce", 3, 1),
    ("kill", "checkpoint", 2, 0),
    ("stop", "validation", 2, 1),
}


@matrix((*cases(("exception", "kill", "stop"), WATCHED), *cases(("exception",), ("optimizers",))), QUICK)
def test_every_other_rank_ends_and_names_the_one_that_failed(
    tmp_path: Path, kind: str, phase: str, world_size: int, rank: int
) -> None:
    outcomes = ruin(Setting(kind, rank, phase, str(tmp_path), TIMEOUT[kind], world_size))
    expected = f"rank {rank} failed first .*{REASONS[kind].format(rank=rank)}"
    for outcome in outcomes:
        if outcome.rank != rank:
            assert outcome.error_type in ("RankFailure", None), outcome.error
            assert re.search(expected, f"{outcome.error}\n{outcome.output}"), outcome
            assert "killed" not in (outcome.error or "").replace(REASONS["kill"], ""), "it did not end by itself"
    own = outcomes[rank].error or ""
    assert (f"boom-on-rank-{rank}" if kind == "exception" else "was killed by SIGKILL") in own


@matrix(("sleep", phase, 3, rank) for rank, phase in enumerate(("setup", "forward", "validation")))
def test_a_rank_that_stays_away_is_named_and_ended(
    tmp_path: Path, kind: str, phase: str, world_size: int, rank: int
) -> None:
    """Symptom: silence."""
    outcomes = ruin(Setting(kind, rank, phase, str(tmp_path), TIMEOUT[kind], world_size))
    awaited = {"setup": "barrier 'post_setup'", "forward": r"gradient bucket 0 \(net", "validation": "a reduced value"}
    for outcome in outcomes:
        said = f"{outcome.error}\n{outcome.output}"
        assert re.search(f"rank {rank} failed first .* did not reach {awaited[phase]}.* within 5 s", said), outcome
    assert "in strike" in outcomes[rank].output, "where it was is shown"


@matrix(cases(("exception", "kill"), ("teardown",)), {("exception", "teardown", 2, 1)})
def test_after_the_last_collective_the_others_finish(
    tmp_path: Path, kind: str, phase: str, world_size: int, rank: int
) -> None:
    outcomes = ruin(Setting(kind, rank, phase, str(tmp_path), TIMEOUT[kind], world_size))
    assert [outcome.rank for outcome in outcomes if outcome.error is not None] == [rank]


# -- with a launcher -------------------------------------------------------------------------------------------------


@matrix(
    cases(("exception", "kill", "stop"), ("before meeting", "all-reduce", "checkpoint", "teardown"), (2,)),
    {("kill", "all-reduce", 2, 0)},
)
def test_forked_workers_end_and_the_launching_process_raises(
    tmp_path: Path, kind: str, phase: str, world_size: int, rank: int
) -> None:
    setting = Setting(kind, rank, phase, str(tmp_path), TIMEOUT[kind], world_size, "fork")
    with pytest.raises(RanksFailedError) as failure:
        run_ranks(train_from_launcher, 1, setting, init=False, timeout=60.0)
    assert_soon(setting)
    assert_checkpoints_are_whole(setting)
    (outcome,) = failure.value.outcomes
    assert "left processes behind" not in str(outcome.error)
    assert outcome.error_type in ("ProcessRaisedException", "ProcessExitedException"), outcome.error
    named = f"boom-on-rank-{rank}|process {rank} terminated with signal SIGKILL|rank {rank} failed first"
    assert re.search(named, str(outcome.error)), outcome.error


def ruin_script(setting: Setting, exit_codes: tuple[int, ...] = (1,)) -> Completed:
    """Train as a script of its own that starts its ranks."""
    completed = run_script(Path(fault_script.__file__), setting.to_json(), timeout=90.0, grace=SCRIPT_END)
    assert completed.returncode in exit_codes, completed
    assert not completed.leftover_pids, completed
    assert_soon(setting, SCRIPT_END)
    assert_checkpoints_are_whole(setting)
    return completed


@matrix(
    (*cases(("exception",), START_AND_END, (2,)), *cases(("exception",), ("forward",))),
    {("exception", "forward", 2, 1)},
)
def test_a_script_ends_with_the_error_of_the_rank_that_raised(
    tmp_path: Path, kind: str, phase: str, world_size: int, rank: int
) -> None:
    """Symptom: the main process never ends, and the real error is buried."""
    completed = ruin_script(Setting(kind, rank, phase, str(tmp_path), devices=world_size))
    errors = [line for line in completed.stderr.splitlines() if re.search(r"\w+(Error|Failure): ", line)]
    assert errors
    assert "boom-on-rank" in errors[0], completed
    assert sum(re.fullmatch(rf"(\[rank{rank}\]: )?ValueError: boom-on-rank-{rank}", e) is not None for e in errors) == 1
    if phase == "forward":
        for other in set(range(world_size)) - {rank}:
            assert re.search(rf"rank {other}: rank {rank} failed first .*boom-on-rank-{rank}", completed.stderr)


@matrix((*cases(("kill",), START_AND_END, (2,)), ("kill", "forward", 3, 0), ("kill", "forward", 3, 1)))
def test_a_script_whose_rank_is_killed_fails(tmp_path: Path, kind: str, phase: str, world_size: int, rank: int) -> None:
    """Symptom: survivors keep running."""
    completed = ruin_script(Setting(kind, rank, phase, str(tmp_path), devices=world_size), (-9,) if rank == 0 else (1,))
    if phase == "forward":
        for other in set(range(world_size)) - {rank}:
            assert re.search(rf"rank {other}: rank {rank} failed first .*the process is gone", completed.stderr)
    elif rank != 0:
        assert re.search(rf"rank {rank} \(pid \d+\) ended with exit code -9", completed.stderr)
    elif phase == "before meeting":
        assert "which started this process, ended before the ranks had met" in completed.stderr


# A launching process that is stopped when the others are done harms none of them; who stopped it can have it go on.
@matrix(case for case in cases(("stop",), (*START_AND_END, "forward"), (2,)) if case != ("stop", "teardown", 2, 0))
def test_a_script_whose_rank_is_stopped_fails(
    tmp_path: Path, kind: str, phase: str, world_size: int, rank: int
) -> None:
    setting = Setting(kind, rank, phase, str(tmp_path), TIMEOUT[kind], world_size)
    completed = ruin_script(setting, (-9,) if rank == 0 else (1,))
    assert re.search(rf"rank {rank} failed first|process \d+ is stopped for more than 5 s", completed.stderr), completed


@pytest.mark.slow
def test_a_script_whose_rank_stays_away_fails(tmp_path: Path) -> None:
    """Symptom: the sleeping rank is left behind."""
    completed = ruin_script(Setting("sleep", 1, "forward", str(tmp_path), TIMEOUT["sleep"], 3))
    for other in (0, 2):
        assert re.search(
            rf"rank {other}: rank 1 failed first .* did not reach gradient bucket 0 \(net", completed.stderr
        ), completed


@pytest.mark.slow
def test_processes_that_load_data_for_a_killed_rank_end_too(tmp_path: Path) -> None:
    """They hold its sockets open, and must neither hide its death nor outlive it for long."""
    completed = ruin_script(Setting("kill", 1, "forward", str(tmp_path), workers=1))
    assert re.search(r"rank 0: rank 1 failed first .*the process is gone", completed.stderr), completed
