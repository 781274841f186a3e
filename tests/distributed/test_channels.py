"""What every channel must do, over shared memory and over the backend."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from ringstrategy.collectives import memory
from ringstrategy.collectives.choose import Transport
from ringstrategy.collectives.links import LinkLost
from ringstrategy.pipeline.backend_channel import BackendChannel
from ringstrategy.pipeline.batches import same_batch
from ringstrategy.pipeline.channels import Channel, WrongMessage
from ringstrategy.pipeline.connect import connect
from ringstrategy.pipeline.shared_memory_channel import SharedMemoryChannel
from ringstrategy.process_group import RankGroup
from tests.helpers.ranks import RanksFailedError, run_ranks

_CPU = torch.device("cpu")
_TRANSPORTS: list[Transport] = ["shared_memory", "backend"]
_DTYPES = [
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.bool, torch.complex64, torch.complex128),
]


class Reading(NamedTuple):
    value: Tensor
    unit: str


@contextlib.contextmanager
def _channels(transport: Transport, seconds: float = 20.0) -> Iterator[dict[int, Channel]]:
    channels = connect(RankGroup.connect(_CPU, timedelta(seconds=seconds)), transport)
    try:
        yield channels
    finally:
        for channel in channels.values():
            channel.close()


def _numbers(dtype: torch.dtype) -> Tensor:
    return (torch.arange(24).reshape(2, 3, 4) % 5).to(dtype)


def _dense_or_expanded(dtype: torch.dtype) -> list[Tensor]:
    numbers = _numbers(dtype)
    return [
        numbers,
        numbers[1],
        numbers[0, 0, 1],
        numbers[:, :0],
        numbers.permute(2, 0, 1),
        numbers.unsqueeze(0).contiguous(memory_format=torch.channels_last),
        numbers[1].unsqueeze(1).expand(3, 2, 4),
        numbers[0, 0, 1].expand(3, 2),
        numbers.permute(2, 0, 1).unsqueeze(0).expand(2, 4, 2, 3),
    ]


def _with_gaps(dtype: torch.dtype) -> list[Tensor]:
    numbers = _numbers(dtype)
    windows = numbers.as_strided((5, 4), (1, 2))
    return [numbers[:, ::2, 1:3], numbers[:, 1], numbers[..., :1], windows, numbers[:, ::2, :1].expand(2, 2, 3)]


def _check(received: Tensor, sent: Tensor, strides: bool) -> None:
    assert (received.dtype, received.shape, received.device) == (sent.dtype, sent.shape, sent.device)
    wide = torch.complex128 if sent.is_complex() else torch.float64
    assert torch.equal(received.to(wide), sent.to(wide))
    assert received.is_leaf
    if strides and sent.numel():
        kept = [dim for dim, size in enumerate(sent.shape) if size > 1]
        assert [received.stride(dim) for dim in kept] == [sent.stride(dim) for dim in kept]


def _every_layout(rank: int, world_size: int, transport: Transport) -> None:
    with _channels(transport) as channels:
        assert list(channels) == [place for place in range(world_size) if place != rank]
        expected = SharedMemoryChannel if transport == "shared_memory" else BackendChannel
        for dtype in _DTYPES:
            for strides, tensors in ((True, _dense_or_expanded(dtype)), (False, _with_gaps(dtype))):
                for place, channel in channels.items():
                    assert type(channel) is expected
                    channel.send([*tensors, rank, place], str(dtype))
                for place, channel in channels.items():
                    *received, sender, addressee = channel.receive(str(dtype))
                    assert (sender, addressee) == (place, rank)
                    for mine, theirs in zip(received, tensors, strict=True):
                        _check(mine, theirs, strides)
                        if mine.is_contiguous():
                            mine.zero_()  # it is the receiver's own


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("transport", _TRANSPORTS)
def test_tensors_of_every_dtype_and_layout_arrive(transport: Transport, world_size: int) -> None:
    run_ranks(_every_layout, world_size, transport)


def _other_values(rank: int, world_size: int, transport: Transport) -> None:
    with _channels(transport) as channels:
        channel = channels[1 - rank]
        parameter = nn.Parameter(torch.arange(6.0).reshape(2, 3))
        product = parameter * 2
        conjugated = torch.tensor([1 + 2j, 3 - 4j]).conj()
        large = list(range(30_000))  # a header that fits nowhere but beside the tensors
        sparse = torch.eye(3).to_sparse()
        values = [
            *(None, "text", 3, 2.5, True, {"a": [1, (2, 3)]}, large, b"", torch.float16, torch.Size([3])),
            *(parameter, product, product.detach(), conjugated, conjugated.imag, sparse),
            *([torch.ones(2), "in a list"], Reading(torch.zeros(3), "m")),
        ]
        for _ in range(2):
            channel.send(values, "values")
            product.detach().add_(0)  # free to be changed from now on
            received = channel.receive("values")
            assert received[:10] == values[:10]
            for mine, theirs in zip(received[10:15], values[10:15], strict=True):
                assert type(mine) is Tensor
                assert isinstance(theirs, Tensor)
                _check(mine, theirs, strides=False)
                assert mine.requires_grad == theirs.requires_grad
            assert received[15].is_sparse
            assert torch.equal(received[15].to_dense(), torch.eye(3))
            assert torch.equal(received[16][0], torch.ones(2))
            assert received[17].unit == "m"
        channel.send([], "nothing")
        assert channel.receive("nothing") == []
        with pytest.raises(
            TypeError, match=r"Message 'bad' holds a value that does not pickle \(of types int, function\)"
        ):
            channel.send([torch.ones(1), 1, lambda: None], "bad")
        channel.send([torch.ones(1)], "good")
        assert torch.equal(channel.receive("good")[0], torch.ones(1))
        torch.autograd.backward(received[11].sum())
        assert torch.equal(received[11].grad, torch.ones(2, 3))


@pytest.mark.parametrize("transport", _TRANSPORTS)
def test_other_values_arrive(transport: Transport) -> None:
    run_ranks(_other_values, 2, transport)


def _many(rank: int, world_size: int, transport: Transport) -> int:
    with _channels(transport) as channels:
        channel = channels[1 - rank]
        for step in range(2):
            for number in range(1000):
                channel.send([torch.tensor([number, rank]), number], f"message {number}")
            for number in range(1000):
                tensor, alone = channel.receive(f"message {number}")
                assert tensor.tolist() == [number, 1 - rank]
                assert alone == number
            assert channel.bytes_sent == (step + 1) * 1000 * 16
        return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("transport", _TRANSPORTS)
def test_a_thousand_messages_at_once_in_both_directions(transport: Transport) -> None:
    assert max(run_ranks(_many, 2, transport)) < 60


def _mixed_sizes(rank: int, world_size: int, transport: Transport) -> None:
    """Messages of very different sizes, some of them under way while others are received."""
    generator = torch.Generator().manual_seed(0)
    sizes = [int(10 ** (float(torch.rand((), generator=generator)) * 6)) for _ in range(120)]
    with _channels(transport) as channels:
        channel = channels[1 - rank]
        sent = received = 0
        while received < len(sizes):
            ahead = int(torch.randint(0, 9, (), generator=generator))
            for number in range(sent, min(sent + ahead, len(sizes))):
                channel.send([torch.full((sizes[number],), (number + rank) % 200, dtype=torch.uint8)], str(number))
                sent = number + 1
            for number in range(received, max(received, sent - 4) if sent < len(sizes) else sent):
                (tensor,) = channel.receive(str(number))
                assert tensor.shape == (sizes[number],)
                assert tensor.eq((number + 1 - rank) % 200).all()
                received = number + 1


@pytest.mark.parametrize("transport", _TRANSPORTS)
def test_messages_of_mixed_sizes_keep_apart(transport: Transport) -> None:
    run_ranks(_mixed_sizes, 2, transport)


def _large_both_ways(rank: int, world_size: int, transport: Transport) -> None:
    with _channels(transport) as channels:
        for channel in channels.values():
            channel.send([torch.full((16 * 1024 * 1024,), float(rank))], "large")
        for place, channel in channels.items():
            (tensor,) = channel.receive("large")
            assert tensor.eq(place).all()


@pytest.mark.parametrize("transport", _TRANSPORTS)
def test_both_sides_may_send_64_mb_before_they_receive(transport: Transport) -> None:
    run_ranks(_large_both_ways, 2, transport)


def _modes(rank: int, world_size: int, transport: Transport) -> None:
    weight = torch.ones(3, requires_grad=True)

    def exchange() -> Tensor:
        channel.send([weight, weight.detach()], "t")
        first, second = channel.receive("t")
        assert torch.equal(first, torch.ones(3))
        return Tensor.add(first, second) if torch.is_grad_enabled() else first

    with _channels(transport) as channels:
        channel = channels[1 - rank]
        # The first messages, for which memory is made, come in inference mode.
        for _ in range(2):
            with torch.inference_mode():
                exchange()
            with torch.no_grad():
                assert exchange().is_leaf
            result = exchange()
            assert not result.is_inference()
            torch.autograd.backward((result * weight).sum())
            assert weight.grad is not None
            assert torch.equal(weight.grad, torch.full((3,), 2.0))
            weight.grad = None


@pytest.mark.parametrize("transport", _TRANSPORTS)
def test_inference_mode_leaves_no_trace(transport: Transport) -> None:
    run_ranks(_modes, 2, transport)


def _wrong_tag(rank: int, world_size: int, transport: Transport) -> str:
    with _channels(transport) as channels:
        channel = channels[1 - rank]
        channel.send([rank], f"forward {rank}")
        channel.send([rank], "next")
        with pytest.raises(WrongMessage) as caught:
            channel.receive("backward 5")
        assert channel.receive("next") == [1 - rank]
        return str(caught.value)


@pytest.mark.parametrize("transport", _TRANSPORTS)
def test_a_message_under_another_tag_is_an_error_with_both(transport: Transport) -> None:
    message = run_ranks(_wrong_tag, 2, transport)[0]
    assert "this rank waits for 'backward 5' from rank 1 (pid " in message
    assert message.endswith("which sent 'forward 1'.")


def _expected(rank: int, world_size: int, transport: Transport) -> None:
    with _channels(transport) as channels:
        channel = channels[1 - rank]
        channel.expect(3)
        for number in range(5):
            channel.send([torch.full((1000,), float(number))], str(number))
        for number in range(5):
            assert channel.receive(str(number))[0].eq(number).all()


@pytest.mark.parametrize("transport", _TRANSPORTS)
def test_messages_may_be_expected(transport: Transport) -> None:
    run_ranks(_expected, 2, transport)


def _aborted(rank: int, world_size: int, transport: Transport) -> float:
    with _channels(transport) as channels:
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


@pytest.mark.parametrize("transport", _TRANSPORTS)
def test_abort_wakes_whoever_waits_and_whoever_comes_later(transport: Transport) -> None:
    assert 0.2 < run_ranks(_aborted, 2, transport)[0] < 5


def _peer_dies(rank: int, world_size: int, transport: Transport) -> None:
    with _channels(transport) as channels:
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


@pytest.mark.parametrize("transport", _TRANSPORTS)
def test_a_rank_that_dies_is_noticed_at_once(transport: Transport) -> None:
    with pytest.raises(RanksFailedError) as caught:
        run_ranks(_peer_dies, 2, transport)
    first, second = caught.value.outcomes
    assert "SIGKILL" in str(second.error)
    assert "noticed after 0." in str(first.error)


def _reads_what_a_closed_channel_sent(rank: int, world_size: int) -> None:
    with _channels("shared_memory") as channels:
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


def _silent(rank: int, world_size: int) -> None:
    with _channels("shared_memory", seconds=1.0) as channels:
        if rank == 0:
            with pytest.raises(LinkLost, match=r"did not answer within 1 s"):
                channels[1].receive("never")
        else:
            time.sleep(2)


def test_a_silent_rank_is_given_up_after_the_timeout() -> None:
    run_ranks(_silent, 2)


def _no_memory(rank: int, world_size: int) -> None:
    with _channels("shared_memory") as channels:
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

    with _channels("shared_memory") as channels:
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
    group = RankGroup.connect(_CPU, timedelta(seconds=20))
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


@pytest.mark.parametrize("transport", _TRANSPORTS)
def test_every_descriptor_and_thread_is_gone_after_close(transport: Transport) -> None:
    run_ranks(_leftovers, 3, transport)


def _falls_back(rank: int, world_size: int) -> None:
    if rank == 1:

        def refuse(*_: object) -> int:
            raise OSError("no memory today")

        os.memfd_create = refuse  # type: ignore[assignment]
    group = RankGroup.connect(_CPU, timedelta(seconds=20))
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
    group = RankGroup.connect(_CPU, timedelta(seconds=20)).split([[0, 2], [1, 3]])
    channels = connect(group, transport)
    place = 1 - group.rank
    assert list(channels) == [place]
    channels[place].send([rank], "t")
    assert channels[place].receive("t") == [(rank + 2) % 4]
    channels[place].close()


@pytest.mark.parametrize("transport", _TRANSPORTS)
def test_channels_connect_a_part_of_the_ranks(transport: Transport) -> None:
    run_ranks(_in_subgroups, 4, transport)


def test_one_rank_alone_has_no_channels() -> None:
    run_ranks(_alone, 1)


def _alone(rank: int, world_size: int) -> None:
    for transport in (*_TRANSPORTS, "auto"):
        assert connect(RankGroup.connect(_CPU, timedelta(seconds=20)), transport) == {}


def _batches(rank: int, world_size: int, transport: Transport) -> None:
    generator = torch.Generator().manual_seed(rank)
    with _channels(transport) as channels:
        for step in range(3):
            images = torch.randn(4, 3, 8, 8, generator=generator).to(memory_format=torch.channels_last)
            batch: Any = {
                "image": images,
                "label": torch.randint(10, (4,), generator=generator),
                "names": [f"{rank}-{step}-{row}" for row in range(4)],
                "reading": Reading(torch.tensor(float(rank)), "m"),
                "nothing": None,
            }
            if rank != 0 and step == 1:
                batch = None
            shared = same_batch(batch, channels, rank)
            generator_of_first = torch.Generator().manual_seed(0)
            for _ in range(step + 1):
                expected = torch.randn(4, 3, 8, 8, generator=generator_of_first)
                labels = torch.randint(10, (4,), generator=generator_of_first)
            assert torch.equal(shared["image"], expected)
            assert shared["image"].is_contiguous(memory_format=torch.channels_last)
            assert torch.equal(shared["label"], labels)
            assert shared["names"] == [f"0-{step}-{row}" for row in range(4)]
            assert type(shared["reading"]) is Reading
            assert shared["reading"].value == 0
            assert shared["nothing"] is None
            assert (shared is batch) == (rank == 0)
        assert same_batch(torch.tensor(rank), channels, rank) == 0
        assert same_batch(f"text of {rank}", channels, rank) == "text of 0"


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("transport", _TRANSPORTS)
def test_every_stage_has_the_batch_of_the_first(transport: Transport, world_size: int) -> None:
    run_ranks(_batches, world_size, transport)
