"""Word of failures, and signs of life, between hosts: hosts here are ranks that are told to share nothing."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
import torch

from ringstrategy.control import Control
from ringstrategy.failure import FailureMonitor, RankFailure
from ringstrategy.host_links import HostLinks
from ringstrategy.process_group import Host, RankGroup
from tests.helpers.ranks import RanksFailedError, run_ranks


@pytest.fixture(autouse=True)
def _address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")


def group_of(rank: int, hosts: str, seconds: float = 20.0) -> RankGroup:
    """All ranks, each on the host that its letter names."""
    host = replace(Host.here(), name=f"host-{hosts[rank]}")
    with patch.object(Host, "here", lambda: host):
        return RankGroup.connect(torch.device("cpu"), timedelta(seconds=seconds))


def wait_until(condition: Callable[[], Any], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def hear(links: HostLinks, heard: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add what has arrived."""
    heard.extend(links.receive())
    return heard


# -- the connections -------------------------------------------------------------------------------------------------


def _gossip(rank: int, world_size: int) -> list[dict[str, Any]]:
    group = group_of(rank, "aabc")
    links = HostLinks(group)
    assert links.connected
    links.send({"from": rank, "text": "größer\nthan a line"})
    heard: list[dict[str, Any]] = []
    wait_until(lambda: len(hear(links, heard)) == world_size - 1)
    group.exchange("all have heard all")
    links.close()
    return heard


def test_every_rank_hears_every_other_once() -> None:
    for rank, heard in enumerate(run_ranks(_gossip, 4)):
        assert sorted(message["from"] for message in heard) == [other for other in range(4) if other != rank]
        assert {message["text"] for message in heard} == {"größer\nthan a line"}


def _alone(rank: int, world_size: int) -> tuple[bool, int]:
    links = HostLinks(group_of(rank, "aa"))
    links.send({"to": "nobody"})
    links.beat()
    assert list(links.receive()) == []
    links.close()
    return links.connected, len(links.descriptors)


def test_one_host_needs_none() -> None:
    assert run_ranks(_alone, 2) == [(False, 0)] * 2


def _quiet(rank: int, world_size: int) -> list[list[int]]:
    group = group_of(rank, "abc", seconds=1.0)
    links = HostLinks(group)
    seen: list[list[int]] = []

    def look() -> bool:
        links.beat()
        assert list(links.receive()) == []
        if links.quiet() != (seen[-1] if seen else []):
            seen.append(links.quiet())
        return bool(seen)

    if rank == 1:
        time.sleep(2.0)  # a process that does nothing, or whose link is cut
    else:
        wait_until(look)
        assert links.quiet(seconds=20.0) == []
    group.exchange("all have seen")
    links.close()
    return seen


def test_a_quiet_rank_is_known_on_all_hosts() -> None:
    assert run_ranks(_quiet, 3) == [[[1]], [], [[1]]]


def _leave(rank: int, world_size: int) -> tuple[list[dict[str, Any]], set[int]]:
    group = group_of(rank, "abc")
    links = HostLinks(group)
    heard: list[dict[str, Any]] = []
    if rank == 2:
        links.send({"last": "word"})
        links.close()
    elif rank == 0:
        wait_until(lambda: hear(links, heard) and links.lost)
    group.exchange("one has left")
    links.close()
    return heard, links.lost


def test_the_last_word_of_a_rank_comes_before_its_end() -> None:
    assert run_ranks(_leave, 3) == [([{"last": "word"}], {2}), ([], set()), ([], set())]


def _stranger(rank: int, world_size: int) -> bool:
    group = group_of(rank, "ab")
    exchange, calls = group.exchange, []

    def exchange_and_intrude(value: Any) -> list[Any]:
        values = exchange(value)
        calls.append(values)
        if len(calls) == 1 and rank == 1:
            with socket.create_connection(("127.0.0.1", values[0][1])) as stranger:
                stranger.sendall(b"0" * 32 + b" 1\n")
        return values

    group.exchange = exchange_and_intrude  # type: ignore[method-assign]
    links = HostLinks(group)
    links.send({"from": rank})
    heard: list[dict[str, Any]] = []
    wait_until(lambda: hear(links, heard))
    group.exchange("both have heard")
    links.close()
    return heard == [{"from": 1 - rank}]


def test_a_stranger_at_the_port_is_turned_away() -> None:
    assert run_ranks(_stranger, 2) == [True, True]


def _unreachable(rank: int, world_size: int) -> bool:
    with patch.dict(os.environ, {"MASTER_ADDR": "host.invalid"}), patch.object(socket, "gethostname", lambda: ""):
        links = HostLinks(group_of(rank, "ab"))
    links.send({"to": "nobody"})
    links.close()
    return links.connected


def test_without_a_way_to_rank_0_training_goes_on_and_the_log_says_what_is_missing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_ranks(_unreachable, 2) == [False, False]
    said = capsys.readouterr().out
    assert "failure on one host will show on the others only by its consequences: rank 1 (pid " in said
    assert "cannot reach rank 0 at host.invalid" in said


# -- the monitor -----------------------------------------------------------------------------------------------------


def _report(rank: int, world_size: int, failing: int) -> str:
    group = group_of(rank, "aabc")
    monitor = FailureMonitor(group, lambda: "training")
    group.exchange("everybody listens")
    if rank == failing:
        monitor.report(ValueError("the loss is NaN"))
    wait_until(lambda: monitor.failed)
    with pytest.raises(RankFailure) as failure:
        monitor.check()
    group.exchange("everybody knows")
    monitor.close()
    return str(failure.value)


@pytest.mark.parametrize("failing", [0, pytest.param(1, marks=pytest.mark.slow), 3])
def test_an_exception_is_known_on_all_hosts(failing: int) -> None:
    for text in run_ranks(_report, 4, failing):
        assert re.fullmatch(
            rf"rank {failing} failed first \(pid \d+ on host-\w, training\): ValueError: the loss is NaN", text
        )


def _lose_a_rank(rank: int, world_size: int, lost: int) -> str:
    group = group_of(rank, "abc")
    monitor = FailureMonitor(group)
    control = Control(group, monitor)
    control.barrier("everybody watches")
    if rank == lost:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RankFailure) as failure:
        control.barrier("the lost one")
    monitor.leave()
    monitor.close()
    return str(failure.value)


@pytest.mark.parametrize("lost", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_killed_rank_is_named_on_hosts_that_do_not_see_its_process(lost: int) -> None:
    with pytest.raises(RanksFailedError) as failure:
        run_ranks(_lose_a_rank, 3, lost, grace=10.0)
    for outcome in failure.value.outcomes:
        if outcome.rank != lost:
            assert re.match(
                rf"rank {lost} failed first \(pid \d+ on host-{'abc'[lost]}, .*process is gone", outcome.value
            )


def _come_late(rank: int, world_size: int) -> str:
    group = group_of(rank, "aab", seconds=2.0)
    monitor = FailureMonitor(group)
    control = Control(group, monitor)
    control.barrier("everybody watches")
    if rank == 2:
        wait_until(lambda: monitor.failed)
    with pytest.raises(RankFailure) as failure:
        control.barrier("the finish")
    monitor.leave()
    monitor.close()
    return str(failure.value)


def test_a_rank_of_another_host_that_does_not_come_is_named() -> None:
    for text in run_ranks(_come_late, 3):
        assert re.match(
            r"rank 2 failed first \(pid \d+ on host-b, .*did not reach barrier 'the finish' within 2 s", text
        )
