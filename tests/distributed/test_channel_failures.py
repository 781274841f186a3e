"""Channels that cannot go on, cannot be had, or are closed."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time

import pytest
import torch

from ringstrategy.collectives import memory
from ringstrategy.collectives.choose import Transport
from ringstrategy.collectives.links import LinkLost
from ringstrategy.pipeline.backend_channel import BackendChannel
from ringstrategy.pipeline.channels import WrongMessage
from ringstrategy.pipeline.connect import connect
from tests.helpers.channels import TRANSPORTS, open_channels, world
from tests.helpers.ranks import RanksFailedError, run_ranks


def _wrong_tag(rank: int, world_size: int, transport: Transport) -> str:
    with open_channels(transport) as channels:
        channel = channels[1 - rank]
        channel.send([rank], f"forward {rank}")
        channel.send([rank], "next")
        with pytest.raises(WrongMessage) as caught:
            channel.receive("backward 5")
        assert channel.receive("next") == [1 - rank]
        return str(caught.value)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_message_under_another_tag_is_an_error_with_both(transport: Transport) -> None:
    message = run_ranks(_wrong_tag, 2, transport)[0]
    assert "this rank waits for 'backward 5' from rank 1 (pid " in message
    assert "which sent 'forward 1'." in message


def _aborted(rank: int, world_size: int, transport: Transport) -> float:
    with open_channels(transport) as channels:
        channel = channels[1 - rank]
        if rank == 1:
            time.sleep(1)
            channel.abort(KeyError("the end"))
            return 0.0
        begun = time.monotonic()
        threading.Timer(0.3, channel.abort, (KeyError("the reason"),)).start()
        with pytest.raises(KeyError, match="the reason"):
            channel.receive("never")
        with pytest.raises(KeyError, match="the reason"):
            channel.receive("never")
        with pytest.raises(KeyError, match="the reason"):
            channel.send([1], "never")
    return time.monotonic() - begun


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_abort_wakes_whoever_waits_and_whoever_comes_later(transport: Transport) -> None:
    assert 0.2 < run_ranks(_aborted, 2, transport)[0] < 5


def _peer_dies(rank: int, world_size: int, transport: Transport) -> None:
    with open_channels(transport) as channels:
        channel = channels[1 - rank]
        if rank == 1:
            channel.send([torch.ones(3)], "last")
            assert channel.receive("go") == []
            os.kill(os.getpid(), signal.SIGKILL)
        assert torch.equal(channel.receive("last")[0], torch.ones(3))
        channel.send([], "go")
        begun = time.monotonic()
        with pytest.raises(LinkLost, match=r"rank 1 \(pid \d+ on .*\) is gone"):
            channel.receive("never")
        with pytest.raises(LinkLost, match="is gone"):
            channel.receive("never")
        raise AssertionError(f"noticed after {time.monotonic() - begun:.1f} s") from None


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_rank_that_dies_is_noticed_at_once(transport: Transport) -> None:
    with pytest.raises(RanksFailedError) as caught:
        run_ranks(_peer_dies, 2, transport)
    first, second = caught.value.outcomes
    assert "SIGKILL" in str(second.error)
    assert "noticed after 0." in str(first.error)


def _sends_to_nobody(rank: int, world_size: int) -> None:
    with open_channels("backend") as channels:
        channel = channels[1 - rank]
        if rank == 1:
            channel.send([], "last")
            assert channel.receive("go") == []
            os._exit(0)
        assert channel.receive("last") == []
        channel.send([], "go")
        time.sleep(0.5)  # gloo knows by now: already starting a message fails
        with pytest.raises(LinkLost, match=r"rank 1 \(pid \d+ on .*\) is gone"):
            channel.send([torch.ones(3)], "never")
        raise ValueError("noticed")


def test_sending_to_a_rank_that_has_left_names_it() -> None:
    with pytest.raises(RanksFailedError, match="ValueError: noticed"):
        run_ranks(_sends_to_nobody, 2)


def _reads_what_a_closed_channel_sent(rank: int, world_size: int) -> None:
    with open_channels("shared_memory") as channels:
        channel = channels[1 - rank]
        if rank == 1:
            for number in range(3):
                channel.send([torch.full((100_000,), number)], "kept")
            return
        time.sleep(0.5)
        for number in range(3):
            assert channel.receive("kept")[0].eq(number).all()
        with pytest.raises(LinkLost, match="is gone"):
            channel.receive("never")


def test_what_was_sent_before_the_end_is_received() -> None:
    run_ranks(_reads_what_a_closed_channel_sent, 2)


def _silent(rank: int, world_size: int, transport: Transport) -> None:
    with open_channels(transport, seconds=1.0) as channels:
        if rank == 0:
            begun = time.monotonic()
            with pytest.raises(LinkLost, match=r"rank 1 \(pid .* did not answer .*within 1 s"):
                channels[1].receive("never")
            assert 0.9 < time.monotonic() - begun < 1.9
        else:
            time.sleep(2)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_silent_rank_is_given_up_after_the_timeout(transport: Transport) -> None:
    run_ranks(_silent, 2, transport)


def _no_memory(rank: int, world_size: int) -> None:
    with open_channels("shared_memory") as channels:
        channel = channels[1 - rank]
        create = memory.create

        def refuse(nbytes: int) -> int:
            raise OSError(f"no shared memory of {nbytes} bytes")

        memory.create = refuse
        with pytest.raises(OSError, match=r"no shared memory of \d{7} bytes"):
            channel.send([torch.zeros(1_000_000)], "too large")
        memory.create = create
        channel.send([torch.ones(1_000_000)], "fits")
        assert channel.receive("fits")[0].eq(1).all()


def test_a_send_that_finds_no_memory_can_be_repeated() -> None:
    run_ranks(_no_memory, 2)


def _footprint(rank: int, world_size: int) -> None:
    """Memory under way is reused; what a peak needed beside it is given back."""

    def mapped() -> int:
        with open("/proc/self/maps") as maps:
            regions = [line.split()[0].split("-") for line in maps if "memfd:ringstrategy" in line]
        return sum(int(end, 16) - int(begin, 16) for begin, end in regions)

    with open_channels("shared_memory") as channels:
        channel = channels[1 - rank]
        tensor = torch.ones(250_000)  # 1 MB
        for _ in range(3):
            for _ in range(8):
                channel.send([tensor], "peak")
            for _ in range(8):
                channel.receive("peak")
        for _ in range(50):
            channel.send([tensor], "after")
            channel.receive("after")
        assert mapped() < 2 * 14e6
    gc.collect()
    assert mapped() == 0


def test_memory_is_reused_and_given_back() -> None:
    run_ranks(_footprint, 2)


def _leftovers(rank: int, world_size: int, transport: Transport) -> None:
    group = world()
    group.exchange(None)
    descriptors, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(3):
        channels = connect(group, transport)
        for channel in channels.values():
            channel.send([torch.ones(100_000)], "t")
        for channel in channels.values():
            channel.receive("t")
            channel.close()
            channel.close()
        del channel, channels
        gc.collect()
        assert len(os.listdir("/proc/self/fd")) == descriptors
        assert threading.active_count() == threads


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_descriptor_and_thread_is_gone_after_close(transport: Transport) -> None:
    run_ranks(_leftovers, 3, transport)


def _falls_back(rank: int, world_size: int) -> None:
    if rank == 1:

        def refuse(*_: object) -> int:
            raise OSError("no memory today")

        os.memfd_create = refuse  # type: ignore[assignment]
    group = world()
    with pytest.raises(
        RuntimeError, match=r"Channels through shared memory are not possible here: rank 1: .*no memory"
    ):
        connect(group, "shared_memory")
    channels = connect(group)
    assert all(type(channel) is BackendChannel for channel in channels.values())
    for channel in channels.values():
        channel.send([rank], "t")
    for place, channel in channels.items():
        assert channel.receive("t") == [place]
        channel.close()


def test_all_ranks_fall_back_together() -> None:
    run_ranks(_falls_back, 3)


def _in_subgroups(rank: int, world_size: int, transport: Transport) -> None:
    group = world().split([[0, 2], [1, 3]])
    channels = connect(group, transport)
    place = 1 - group.rank
    assert list(channels) == [place]
    channels[place].send([rank], "t")
    assert channels[place].receive("t") == [(rank + 2) % 4]
    channels[place].close()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_channels_connect_a_part_of_the_ranks(transport: Transport) -> None:
    run_ranks(_in_subgroups, 4, transport)


def test_one_rank_alone_has_noopen_channels() -> None:
    run_ranks(_alone, 1)


def _alone(rank: int, world_size: int) -> None:
    for transport in (*TRANSPORTS, "auto"):
        assert connect(world(), transport) == {}
