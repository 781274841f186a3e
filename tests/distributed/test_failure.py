"""The monitor: the first failure of any rank is known on all, and nothing waits beyond it."""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch

from ringstrategy.control import Control
from ringstrategy.failure import FailureMonitor, RankFailure
from ringstrategy.mailbox import Mailbox
from ringstrategy.process_group import RankGroup
from tests.helpers.ranks import RanksFailedError, run_ranks


def monitor_of(timeout: float = 30.0, where: str = "", **options: Any) -> tuple[RankGroup, FailureMonitor]:
    group = RankGroup.connect(torch.device("cpu"), timedelta(seconds=timeout))
    return group, FailureMonitor(group, lambda: where, **options)


def failure_of(monitor: FailureMonitor, seconds: float = 10.0) -> RankFailure:
    """What this rank learns of a failure."""
    deadline = time.monotonic() + seconds
    while not monitor.failed and time.monotonic() < deadline:
        time.sleep(0.01)
    with pytest.raises(RankFailure) as failure:
        monitor.check()
    return failure.value


def _report(rank: int, world_size: int) -> tuple[str, int]:
    group, monitor = monitor_of(where="training, epoch 2, step 17")
    heard: list[BaseException] = []
    monitor.on_failure(heard.append)
    group.exchange("everybody listens")
    if rank == 1:
        monitor.report(ValueError("the loss is NaN"))
    failure = failure_of(monitor)
    with pytest.raises(RankFailure), monitor.waiting("anything that is entered later"):
        pass
    while not heard:
        time.sleep(0.01)
    assert str(heard[0]) == str(failure)
    pids = group.exchange(os.getpid())
    monitor.close()
    return str(failure), pids[1]


def test_an_exception_is_known_on_all_ranks_with_place_and_reason() -> None:
    for text, pid in run_ranks(_report, 3):
        assert text == (
            f"rank 1 failed first (pid {pid} on {socket.gethostname()}, training, epoch 2, step 17): "
            "ValueError: the loss is NaN"
        )


def _report_two(rank: int, world_size: int) -> str:
    group, monitor = monitor_of()
    group.exchange("everybody listens")
    if rank == 2:
        monitor.report(KeyError("first"))
    failure = failure_of(monitor)
    monitor.report(ValueError("second"))  # another rank's error, and the consequence of the first
    monitor.report(failure)
    time.sleep(0.3)
    assert monitor.leaving
    group.exchange("everybody has reported")
    monitor.close()
    return str(failure_of(monitor))


def test_the_first_failure_is_final() -> None:
    for text in run_ranks(_report_two, 3):
        assert "rank 2 failed first" in text
        assert "KeyError: 'first'" in text


def _lose_a_rank(rank: int, world_size: int) -> str:
    group, monitor = monitor_of()
    control = Control(group, monitor)
    control.barrier("everybody watches")
    if rank == 0:
        if os.fork() == 0:  # as a DataLoader worker, it keeps sockets open and the rank's death from being seen
            time.sleep(2)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(RankFailure) as failure:
        control.barrier("the lost one")
    assert time.monotonic() - began < 2
    monitor.leave()
    monitor.close()
    return str(failure.value)


def test_a_killed_rank_is_missed_at_once_although_its_child_lives() -> None:
    with pytest.raises(RanksFailedError) as failure:
        run_ranks(_lose_a_rank, 3, grace=10.0)
    killed, *others = failure.value.outcomes
    assert "was killed by SIGKILL" in str(killed.error)
    for other in others:
        assert "rank 0 failed first" in other.value
        assert "the process is gone" in other.value
        assert "[this rank waited for barrier 'the lost one']" in other.value


def _stop_a_rank(rank: int, world_size: int) -> str:
    group, monitor = monitor_of(timeout=1.5)
    control = Control(group, monitor)
    control.barrier("everybody watches")
    if rank == 1:
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
    with pytest.raises(RankFailure) as failure:
        control.barrier("the stopped one")
    monitor.leave()
    monitor.close()
    return str(failure.value)


def test_a_stopped_rank_is_given_up_after_the_timeout_and_ended() -> None:
    with pytest.raises(RanksFailedError) as failure:
        run_ranks(_stop_a_rank, 3, grace=10.0)
    stopped = failure.value.outcomes.pop(1)
    assert "was killed by SIGKILL" in str(stopped.error)
    for other in failure.value.outcomes:
        assert "rank 1 failed first" in other.value
        assert re.search(r"stopped for more than 1.5 s|did not reach .* within 1.5 s", other.value)


def _come_late(rank: int, world_size: int) -> str:
    group, monitor = monitor_of(timeout=2.0)
    control = Control(group, monitor)
    control.barrier("everybody watches")
    if rank == 2:
        text = str(failure_of(monitor))
    else:
        with pytest.raises(RankFailure) as failure:
            control.barrier("the finish")
        text = str(failure.value)
    monitor.leave()
    monitor.close()
    return text  # and end, although an operation that was given up stays behind in the threads of gloo


def test_a_rank_that_does_not_come_is_named_by_those_who_wait() -> None:
    for text in run_ranks(_come_late, 3):
        assert "rank 2 failed first" in text
        assert "did not reach barrier 'the finish' within 2 s" in text


def _go_different_ways(rank: int, world_size: int) -> str:
    group, monitor = monitor_of(timeout=2.0)
    control = Control(group, monitor)
    control.barrier("everybody watches")
    with monitor.waiting("gradients" if rank == 0 else "a logged value"):
        failure = failure_of(monitor)
    monitor.leave()
    group.exchange("everybody knows")
    monitor.close()
    return str(failure)


def test_ranks_that_wait_for_different_things_are_told_so() -> None:
    texts = run_ranks(_go_different_ways, 2)
    assert any("(it waits for a logged value)" in t or "(it waits for gradients)" in t for t in texts), texts


def _wait_in_a_chain(rank: int, world_size: int) -> str:
    group, monitor = monitor_of(timeout=2.0)
    group.exchange("everybody watches")
    if rank == 1:  # it has come further than the others by their count, and has made them wait before
        for _ in range(20):
            with monitor.waiting("what is there at once"):
                pass
        with monitor.waiting("something", on=0):
            time.sleep(1.0)
        failure = failure_of(monitor)
    else:
        with monitor.waiting(f"a message of rank {2 - rank // 2}", on=2 - rank // 2):
            failure = failure_of(monitor)
    monitor.leave()
    group.exchange("everybody knows")
    monitor.close()
    return str(failure)


def test_the_rank_at_the_end_of_a_chain_of_waits_is_named() -> None:
    """Symptom: stage 0 waits for stage 2, which waits for stage 1, and stage 2 is blamed."""
    for text in run_ranks(_wait_in_a_chain, 3):
        assert re.search(r"rank 1 failed first .* did not reach a message of rank [12] within 2 s", text)
        assert "it waits for" not in text


def _name_the_missing(rank: int, world_size: int) -> None:
    group, monitor = monitor_of(warn_after=1.0)
    control = Control(group, monitor)
    control.barrier("everybody watches")
    if rank == 1:
        time.sleep(2.6)
    control.barrier("the finish")
    monitor.close()


def test_a_late_rank_is_named_in_the_log_and_again(capsys: pytest.CaptureFixture[str]) -> None:
    run_ranks(_name_the_missing, 2)
    warnings = re.findall(
        r"rank 0: waiting for rank 1 \(pid \d+ on .*\) to reach barrier 'the finish'", capsys.readouterr().out
    )
    assert len(warnings) == 2


def _sit_elsewhere(rank: int, world_size: int) -> None:
    group, monitor = monitor_of(grace=0.5)
    group.exchange("everybody listens")
    if rank == 1:
        monitor.report(ValueError("boom"))
        monitor.close()
        raise ValueError("boom")
    threading.Event().wait(60)  # nothing of ours, and nothing that a failure could interrupt


def test_a_rank_that_sits_elsewhere_is_ended_with_its_stack_after_a_grace_period() -> None:
    with pytest.raises(RanksFailedError) as failure:
        run_ranks(_sit_elsewhere, 2, grace=10.0)
    outcome = failure.value.outcomes[0]
    assert "exited with code 1" in str(outcome.error)
    assert "rank 0: rank 1 failed first" in outcome.output
    assert "ValueError: boom; this rank did not return within 0.5 s" in outcome.output
    assert "in _sit_elsewhere" in outcome.output


def _leave(rank: int, world_size: int) -> bool:
    group, monitor = monitor_of()
    group.exchange("everybody watches")
    monitor.leave()
    group.exchange("everybody has left")
    if rank == 1:
        monitor.close()
        monitor.close()
        return False
    deadline = time.monotonic() + 1.0
    while time.monotonic() < deadline and not monitor.failed:
        time.sleep(0.01)
    monitor.close()
    return monitor.failed


def test_after_leaving_the_end_of_another_rank_is_no_failure() -> None:
    assert run_ranks(_leave, 2) == [False, False]


def _hear_strangers(rank: int, world_size: int) -> list[tuple[int, dict[str, Any]]]:
    group = RankGroup.connect(torch.device("cpu"), timedelta(seconds=30))
    mailbox = Mailbox(group, group.neighbours)
    addresses = group.exchange(mailbox.address)
    if rank == 0:
        child = os.fork()  # a process of the same user, and yet no rank
        if child == 0:
            message = b'{"reason": "a stranger says so"}'
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(message, addresses[1])
            os._exit(0)
        os.waitpid(child, 0)
        mailbox.send({"reason": "a rank says so"})
    group.exchange("everything is sent")
    heard = list(mailbox.receive())
    mailbox.close()
    return heard


def test_only_ranks_of_the_run_are_heard() -> None:
    assert run_ranks(_hear_strangers, 2) == [[], [(0, {"reason": "a rank says so"})]]


def _say_much(rank: int, world_size: int) -> str:
    group, monitor = monitor_of()
    group.exchange("everybody listens")
    if rank == 0:
        monitor.report(ValueError("x" * 100_000))
    text = str(failure_of(monitor))
    group.exchange("everybody knows")
    monitor.close()
    return text


def test_a_reason_that_is_too_long_for_a_message_is_cut() -> None:
    own, other = run_ranks(_say_much, 2)
    assert len(own) > 100_000
    assert "ValueError: xxx" in other
    assert len(other) < 2_000
