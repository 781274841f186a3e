"""A rank that raises, is killed, or stops ends the run: soon, on every rank, with its name, and nothing is left.

The matrix runs on ranks that exist already, as under torchrun; with a launcher around them a subset runs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path

import pytest

from tests.helpers.fault_script import Setting
from tests.helpers.faults import (
    TIMEOUT,
    assert_ended_with_the_error,
    assert_others_name_the_rank,
    ruin,
    ruin_launcher,
    ruin_script,
)

START_AND_END = ("before meeting", "teardown")
WATCHED = ("setup", "forward", "all-reduce", "validation", "checkpoint", "train end")
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
    setting = Setting(kind, rank, phase, str(tmp_path), TIMEOUT[kind], world_size)
    assert_others_name_the_rank(ruin(setting), setting)


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
    outcome = ruin_launcher(Setting(kind, rank, phase, str(tmp_path), TIMEOUT[kind], world_size, "fork"))
    assert outcome.error_type in ("ProcessRaisedException", "ProcessExitedException"), outcome.error
    named = f"boom-on-rank-{rank}|process {rank} terminated with signal SIGKILL|rank {rank} failed first"
    assert re.search(named, str(outcome.error)), outcome.error


@matrix(
    (*cases(("exception",), START_AND_END, (2,)), *cases(("exception",), ("forward",))),
    {("exception", "forward", 2, 1)},
)
def test_a_script_ends_with_the_error_of_the_rank_that_raised(
    tmp_path: Path, kind: str, phase: str, world_size: int, rank: int
) -> None:
    """Symptom: the main process never ends, and the real error is buried."""
    setting = Setting(kind, rank, phase, str(tmp_path), devices=world_size)
    assert_ended_with_the_error(ruin_script(setting), setting)


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
