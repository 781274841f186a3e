"""The harness itself: ranks, scripts and guards do what the other tests rely on."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time

import pytest
import torch
import torch.distributed as dist

from tests.helpers.assertions import assert_close_to_single_process, assert_ranks_identical
from tests.helpers.processes import live_processes
from tests.helpers.ranks import RanksFailedError, run_ranks
from tests.helpers.scripts import run_script, start_script


def _sum_of_ranks(rank: int, world_size: int, scale: float, offset: float = 0.0) -> tuple[float, int]:
    value = torch.tensor(rank * scale + offset)
    dist.all_reduce(value)
    return value.item(), torch.get_num_threads()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ranks_form_a_group_and_return_in_order(world_size: int) -> None:
    expected = sum(rank * 2.0 + 1.0 for rank in range(world_size))
    assert run_ranks(_sum_of_ranks, world_size, 2.0, offset=1.0) == [(expected, 1)] * world_size


def _rank_and_tensor(rank: int, world_size: int, tensor: torch.Tensor) -> torch.Tensor:
    assert not dist.is_initialized()
    return tensor * rank


def test_without_init_there_is_no_process_group_and_tensors_pass_by_value() -> None:
    first, second = run_ranks(_rank_and_tensor, 2, torch.arange(3.0), init=False)
    assert torch.equal(first, torch.zeros(3))
    assert torch.equal(second, torch.arange(3.0))


def _fail_on(rank: int, world_size: int, failing: int) -> None:
    if rank == failing:
        raise ValueError(f"boom on rank {rank}")
    dist.all_reduce(torch.zeros(1))


def test_a_failure_carries_the_traceback_of_every_rank() -> None:
    with pytest.raises(RanksFailedError) as failure:
        run_ranks(_fail_on, 3, 1)
    outcomes = failure.value.outcomes
    assert [outcome.error_type for outcome in outcomes] == ["RuntimeError", "ValueError", "RuntimeError"]
    assert "boom on rank 1" in str(failure.value)
    assert "rank 0" in str(failure.value)
    assert str(failure.value).count("Traceback") == 3


def _sleep_on(rank: int, world_size: int, sleeper: int) -> int:
    if rank == sleeper:
        print("going to sleep", flush=True)
        _sleep_where_it_can_be_seen()
    return os.getpid()


def _sleep_where_it_can_be_seen() -> None:
    time.sleep(600)


@pytest.mark.slow
def test_a_timeout_kills_all_ranks_and_shows_where_they_stood() -> None:
    began = time.monotonic()
    with pytest.raises(RanksFailedError, match=r"rank 1: still running after 3 s; killed") as failure:
        run_ranks(_sleep_on, 2, 1, timeout=3.0)
    assert time.monotonic() - began < 20
    returned, slept = failure.value.outcomes
    assert returned.error is None
    assert "_sleep_where_it_can_be_seen" in slept.stacks
    assert "going to sleep" in slept.output


def _die(rank: int, world_size: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 2:
        os._exit(7)


def test_a_rank_that_dies_without_a_word_is_named_with_its_signal_or_code() -> None:
    with pytest.raises(RanksFailedError) as failure:
        run_ranks(_die, 3)
    returned, killed, exited = failure.value.outcomes
    assert returned.error is None
    assert killed.error == "was killed by SIGKILL before the function returned"
    assert exited.error == "exited with code 7 before the function returned"


def _fail_fast(rank: int, world_size: int) -> None:
    if rank == 0:
        raise ValueError("no")
    time.sleep(600)


def test_the_others_get_a_grace_period_after_the_first_failure() -> None:
    with pytest.raises(RanksFailedError) as failure:
        run_ranks(_fail_fast, 2, grace=0.5)
    assert failure.value.outcomes[0].error_type == "ValueError"
    assert failure.value.outcomes[1].error == "still running 0.5 s after rank 0 had failed; killed"
    assert "_fail_fast" in failure.value.outcomes[1].stacks


def _leave_a_process(rank: int, world_size: int) -> int:
    return subprocess.Popen(["sleep", "600"]).pid


@pytest.mark.slow
def test_a_process_left_behind_is_reported_and_ended() -> None:
    with pytest.raises(RanksFailedError, match=r"left processes behind: \d+ \(sleep 600\)"):
        run_ranks(_leave_a_process, 1)


def _skip(rank: int, world_size: int) -> None:
    if rank == 1:
        pytest.skip("not here")


def test_a_skip_is_forwarded() -> None:
    with pytest.raises(pytest.skip.Exception, match="not here"):
        run_ranks(_skip, 2)


def _variable(rank: int, world_size: int) -> str:
    return os.environ["FOR_THE_RANKS"]


def test_ranks_have_the_variables_of_their_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("first", "second"):
        monkeypatch.setenv("FOR_THE_RANKS", value)
        assert run_ranks(_variable, 1, init=False) == [value]


def _unpicklable(rank: int, world_size: int) -> object:
    return lambda: None


def test_a_result_that_cannot_be_pickled_is_an_error() -> None:
    with pytest.raises(RanksFailedError, match="cannot be pickled"):
        run_ranks(_unpicklable, 1, init=False)


def _hang_after_returning(rank: int, world_size: int) -> None:
    threading.Thread(target=time.sleep, args=(600,)).start()


@pytest.mark.slow
def test_a_rank_that_returns_but_does_not_end_is_an_error() -> None:
    with pytest.raises(RanksFailedError, match="still running after 2 s"):
        run_ranks(_hang_after_returning, 1, timeout=2.0)


def test_a_script_returns_its_status_and_output() -> None:
    ended = run_script(
        """
        import os, sys
        print(sys.argv[1], os.environ["OMP_NUM_THREADS"], os.environ["MINE"])
        sys.exit("to stderr")
        """,
        "argument",
        env={"MINE": "42"},
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (1, "argument 1 42\n", "to stderr\n")
    assert ended.leftover_pids == ()


@pytest.mark.parametrize("new_session", [False, True])
def test_a_script_that_leaves_a_process_is_found_out_and_cleaned_up(new_session: bool) -> None:
    ended = run_script(
        f"""
        import subprocess
        print(subprocess.Popen(["sleep", "600"], start_new_session={new_session}).pid)
        """,
        grace=0.2,
    )
    assert ended.returncode == 0
    assert ended.leftover_pids == (int(ended.stdout),)
    assert int(ended.stdout) not in {process.pid for process in live_processes()}


@pytest.mark.slow
def test_a_script_that_hangs_is_killed_and_shows_its_stacks() -> None:
    ended = run_script(
        """
        import time
        def stuck():
            time.sleep(600)
        stuck()
        """,
        timeout=2.0,
    )
    assert ended.timed_out
    assert "in stuck" in ended.stderr
    assert len(ended.leftover_pids) == 1


def test_a_running_script_can_be_watched_and_signalled() -> None:
    source = """
        import time
        print("ready")
        time.sleep(600)
        """
    with start_script(source) as running:
        running.wait_for("ready")
        assert [process.pid for process in running.processes()] == [running.pid]
        running.send_signal(signal.SIGTERM)
        assert running.finish(timeout=10.0).returncode == -signal.SIGTERM
        with pytest.raises(AssertionError, match="before the script ended"):
            running.wait_for("never written")


def test_ranks_that_differ_in_one_bit_are_not_identical() -> None:
    state = {"weight": torch.ones(3), "bias": torch.zeros(0)}
    assert_ranks_identical([state, {name: tensor.clone() for name, tensor in state.items()}])
    other = {**state, "weight": torch.nextafter(torch.ones(3), torch.tensor(2.0))}
    with pytest.raises(AssertionError, match=r"weight on rank 2 is off rank 0's by 1\.19e-07"):
        assert_ranks_identical([state, state, other])
    with pytest.raises(AssertionError, match=r"rank 1 has other names: \{'bias'\}"):
        assert_ranks_identical([state, {"weight": torch.ones(3)}])


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        (torch.tensor([1.0, 2.1]), "w is off by 0.1, more than 1e-06"),
        (torch.tensor([1.0, float("nan")]), "w is off by nan"),
        (torch.tensor([1.0, 2.0]).double(), "w: torch.float64 instead of torch.float32"),
        (torch.tensor([[1.0, 2.0]]), "w: torch.Size"),
    ],
)
def test_what_is_not_close_to_one_process_is_told(value: torch.Tensor, complaint: str) -> None:
    expected = {"w": torch.tensor([1.0, 2.0])}
    assert_close_to_single_process({"w": torch.tensor([1.0, 2.0000005])}, expected)
    with pytest.raises(AssertionError, match=complaint):
        assert_close_to_single_process({"w": value}, expected)
