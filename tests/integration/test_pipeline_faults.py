"""A stage that raises, is killed, or stops ends the run: soon, on every rank, with its name, and nothing is left.

Each case names who fails, in what way, and when. Most run on ranks that exist already, as under torchrun.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from tests.helpers.fault_script import Schedule, Setting, train_on_rank
from tests.helpers.faults import (
    REASONS,
    TIMEOUT,
    assert_ended_with_the_error,
    assert_others_name_the_rank,
    ruin,
    ruin_launcher,
    ruin_script,
)
from tests.helpers.ranks import run_ranks

SCHEDULES: tuple[Schedule, ...] = ("gpipe", "1f1b")
# From the first moment in which the stages depend on each other to the last.
WATCHED = (
    *("setup", "optimizers", "forward", "first micro-batch", "middle micro-batch", "backward", "validation"),
    *("validation layers", "weights", "optimizer state", "checkpoint", "train end", "making whole"),
)


def case(kind: str, phase: str, schedule: Schedule, rank: int, devices: int = 2, stages: int | None = None) -> Setting:
    return Setting(kind, rank, phase, "", TIMEOUT[kind], devices, schedule=schedule, stages=stages)


def cases(
    kinds: Sequence[str],
    phases: Sequence[str],
    worlds: Sequence[int] = (2, 3),
    schedules: Sequence[Schedule] = SCHEDULES,
    stages: int | None = None,
) -> Iterator[Setting]:
    for kind, phase, devices, schedule in product(kinds, phases, worlds, schedules):
        for rank in range(devices):
            yield case(kind, phase, schedule, rank, devices, stages)


def matrix(slow: Iterable[Setting], quick: Iterable[Setting] = ()) -> pytest.MarkDecorator:
    """Parametrize with settings that lack a folder."""
    marked = dict.fromkeys(slow, (pytest.mark.slow,)) | dict.fromkeys(quick, ())
    return pytest.mark.parametrize(
        "setting",
        [
            pytest.param(
                setting,
                id=f"{setting.schedule}, {setting.kind} in {setting.phase} on rank {setting.rank} of {setting.devices}",
                marks=marks,
            )
            for setting, marks in marked.items()
        ],
    )


QUICK = (
    case("exception", "optimizers", "gpipe", 0),
    case("exception", "first micro-batch", "1f1b", 0),
    case("exception", "middle micro-batch", "gpipe", 1, 3),
    case("exception", "backward", "1f1b", 1),
    case("kill", "middle micro-batch", "1f1b", 2, 3),
    case("kill", "backward", "gpipe", 0),
    case("kill", "weights", "gpipe", 1),
    case("exception", "optimizer state", "1f1b", 1),
    case("exception", "checkpoint", "gpipe", 0),
    case("exception", "making whole", "1f1b", 0),
    case("stop", "middle micro-batch", "gpipe", 1, 3),
)


@matrix(
    (
        *cases(("exception",), WATCHED),
        *cases(("kill",), WATCHED, (3,)),
        *cases(("stop",), ("optimizers", "validation layers", "weights", "making whole"), (3,), ("gpipe",)),
        *cases(("stop",), ("first micro-batch", "middle micro-batch", "backward"), (3,), ("gpipe",)),
        *cases(("stop",), ("middle micro-batch", "backward"), (2,), ("1f1b",)),
    ),
    QUICK,
)
def test_every_other_rank_ends_and_names_the_stage_that_failed(tmp_path: Path, setting: Setting) -> None:
    setting = replace(setting, folder=str(tmp_path))
    assert_others_name_the_rank(ruin(setting), setting)


@matrix(
    (
        *cases(("exception",), ("middle micro-batch", "weights"), (4,), ("gpipe",), stages=2),
        *cases(("kill",), ("all-reduce", "making whole"), (4,), ("1f1b",), stages=2),
    ),
    (case("kill", "all-reduce", "gpipe", 3, 4, stages=2),),
)
def test_replicas_of_the_pipeline_end_as_well(tmp_path: Path, setting: Setting) -> None:
    setting = replace(setting, folder=str(tmp_path))
    assert_others_name_the_rank(ruin(setting), setting)


@matrix(
    (
        *cases(("exception", "kill"), ("optimizers", "backward", "weights", "making whole"), (3,), ("gpipe",)),
        *cases(("exception", "kill"), ("middle micro-batch",), (3,), ("1f1b",)),
        *cases(("stop",), ("middle micro-batch", "weights"), (3,), ("gpipe",)),
    ),
    (case("kill", "middle micro-batch", "gpipe", 1),),
)
def test_stages_that_talk_over_the_backend_end_as_well(tmp_path: Path, setting: Setting) -> None:
    setting = replace(setting, folder=str(tmp_path), transport="backend")
    assert_others_name_the_rank(ruin(setting), setting)


@matrix(case("sleep", phase, "gpipe", rank, 3) for rank, phase in enumerate(("weights", "backward", "optimizers")))
def test_a_stage_that_stays_away_is_named_and_ended(tmp_path: Path, setting: Setting) -> None:
    """Symptom: silence; or the stage is blamed that waits for another one."""
    for outcome in ruin(replace(setting, folder=str(tmp_path))):
        said = f"{outcome.error}\n{outcome.output}"
        assert re.search(rf"rank {setting.rank} failed first .* did not reach .* within 5 s", said), outcome
        assert ("in strike" in outcome.output) == (outcome.rank == setting.rank), "where it was is shown"


@matrix(case("pause", phase, "gpipe", 1, 3) for phase in ("middle micro-batch", "backward", "weights"))
def test_a_stage_that_is_stopped_for_less_than_the_timeout_goes_on(tmp_path: Path, setting: Setting) -> None:
    setting = replace(setting, folder=str(tmp_path))
    run_ranks(train_on_rank, setting.devices, setting)
    assert 2 < setting.seconds_since() < 10


@matrix(
    cases(("out of memory",), ("first micro-batch", "middle micro-batch")),
    (case("out of memory", "first micro-batch", "gpipe", 1), case("out of memory", "middle micro-batch", "1f1b", 1, 3)),
)
def test_an_error_in_a_stage_is_fatal_although_training_step_catches_it(tmp_path: Path, setting: Setting) -> None:
    """Symptom: the stage goes on to the next batch, and the others wait for it."""
    setting = replace(setting, folder=str(tmp_path))
    assert_others_name_the_rank(ruin(setting), setting)


WENT_DIFFERENT_WAYS = {
    "gpipe": "WrongMessage: The ranks went different ways",
    "1f1b": "ValueError: Ruined.training_step",
}


@matrix(
    (
        *cases(("out of memory",), ("forward",)),
        *cases(("out of memory",), ("loss",), schedules=("gpipe",)),
        *(case("out of memory", "loss", "1f1b", devices - 1, devices) for devices in (2, 3)),
    ),
    (case("out of memory", "loss", "gpipe", 0),),
)
def test_an_error_around_the_pipeline_that_one_stage_catches_ends_the_run(tmp_path: Path, setting: Setting) -> None:
    """Symptom: one stage skips the backward that another waits for."""
    for outcome in ruin(replace(setting, folder=str(tmp_path))):
        assert outcome.error_type in ("WrongMessage", "ValueError", "RankFailure"), outcome
        assert WENT_DIFFERENT_WAYS[str(setting.schedule)] in str(outcome.error)


@matrix(cases(("exception", "kill"), ("teardown",), (2,)))
def test_after_the_last_collective_the_others_finish(tmp_path: Path, setting: Setting) -> None:
    outcomes = ruin(replace(setting, folder=str(tmp_path)))
    assert [outcome.rank for outcome in outcomes if outcome.error is not None] == [setting.rank]


# -- with a launcher -------------------------------------------------------------------------------------------------


@matrix(cases(("exception", "kill", "stop"), ("middle micro-batch", "weights", "making whole"), (2,), ("1f1b",)))
def test_forked_workers_end_and_the_launching_process_raises(tmp_path: Path, setting: Setting) -> None:
    outcome = ruin_launcher(replace(setting, folder=str(tmp_path), start_method="fork"))
    assert outcome.error_type in ("ProcessRaisedException", "ProcessExitedException"), outcome.error
    rank = setting.rank
    named = f"boom-on-rank-{rank}|process {rank} terminated with signal SIGKILL|rank {rank} failed first"
    assert re.search(named, str(outcome.error)), outcome.error


@matrix(
    (
        *cases(("exception",), ("optimizers", "validation layers", "weights", "making whole"), (2,), ("gpipe",)),
        *cases(("exception",), ("first micro-batch", "backward"), (3,), ("1f1b",)),
    )
)
def test_a_script_ends_with_the_error_of_the_stage_that_raised(tmp_path: Path, setting: Setting) -> None:
    """Symptom: the real error is buried under others, on tensors without values for instance."""
    setting = replace(setting, folder=str(tmp_path))
    assert_ended_with_the_error(ruin_script(setting), setting)


@matrix(cases(("kill", "stop"), ("middle micro-batch", "weights"), (2,), ("gpipe",)))
def test_a_script_whose_stage_is_killed_or_stopped_fails(tmp_path: Path, setting: Setting) -> None:
    """Symptom: survivors keep running."""
    completed = ruin_script(replace(setting, folder=str(tmp_path)), (-9,) if setting.rank == 0 else (1,))
    assert re.search(rf"rank {setting.rank} failed first .*{REASONS[setting.kind]}", completed.stderr), completed


@pytest.mark.slow
def test_processes_that_load_data_for_a_killed_stage_end_too(tmp_path: Path) -> None:
    """They hold its sockets open, and must neither hide its death nor outlive it for long."""
    setting = replace(case("kill", "middle micro-batch", "gpipe", 1), folder=str(tmp_path), workers=1)
    assert re.search(r"rank 0: rank 1 failed first .*the process is gone", ruin_script(setting).stderr)
