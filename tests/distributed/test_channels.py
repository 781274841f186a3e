"""What arrives through a channel, over shared memory and over the backend."""

from __future__ import annotations

import os
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from ringstrategy.collectives.choose import Transport
from ringstrategy.pipeline.backend_channel import BackendChannel
from ringstrategy.pipeline.shared_memory_channel import SharedMemoryChannel
from tests.helpers.channels import TRANSPORTS, open_channels
from tests.helpers.ranks import run_ranks

_DTYPES = [
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.bool, torch.complex64, torch.complex128),
]


class Reading(NamedTuple):
    value: Tensor
    unit: str


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
    with open_channels(transport) as channels:
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
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_tensors_of_every_dtype_and_layout_arrive(transport: Transport, world_size: int) -> None:
    run_ranks(_every_layout, world_size, transport)


def _other_values(rank: int, world_size: int, transport: Transport) -> None:
    with open_channels(transport) as channels:
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


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_other_values_arrive(transport: Transport) -> None:
    run_ranks(_other_values, 2, transport)


def _many(rank: int, world_size: int, transport: Transport) -> int:
    with open_channels(transport) as channels:
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


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_thousand_messages_at_once_in_both_directions(transport: Transport) -> None:
    assert max(run_ranks(_many, 2, transport)) < 60


def _mixed_sizes(rank: int, world_size: int, transport: Transport) -> None:
    """Messages of very different sizes, some of them under way while others are received."""
    generator = torch.Generator().manual_seed(0)
    sizes = [int(10 ** (float(torch.rand((), generator=generator)) * 6)) for _ in range(120)]
    with open_channels(transport) as channels:
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


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_messages_of_mixed_sizes_keep_apart(transport: Transport) -> None:
    run_ranks(_mixed_sizes, 2, transport)


def _large_both_ways(rank: int, world_size: int, transport: Transport) -> None:
    with open_channels(transport) as channels:
        for channel in channels.values():
            channel.send([torch.full((16 * 1024 * 1024,), float(rank))], "large")
        for place, channel in channels.items():
            (tensor,) = channel.receive("large")
            assert tensor.eq(place).all()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_both_sides_may_send_64_mb_before_they_receive(transport: Transport) -> None:
    run_ranks(_large_both_ways, 2, transport)


def _modes(rank: int, world_size: int, transport: Transport) -> None:
    weight = torch.ones(3, requires_grad=True)

    def exchange() -> Tensor:
        channel.send([weight, weight.detach()], "t")
        first, second = channel.receive("t")
        assert torch.equal(first, torch.ones(3))
        return Tensor.add(first, second) if torch.is_grad_enabled() else first

    with open_channels(transport) as channels:
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


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_inference_mode_leaves_no_trace(transport: Transport) -> None:
    run_ranks(_modes, 2, transport)


def _expected(rank: int, world_size: int, transport: Transport) -> None:
    with open_channels(transport) as channels:
        channel = channels[1 - rank]
        channel.expect(3)
        for number in range(5):
            channel.send([torch.full((1000,), float(number))], str(number))
        for number in range(5):
            assert channel.receive(str(number))[0].eq(number).all()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_messages_may_be_expected(transport: Transport) -> None:
    run_ranks(_expected, 2, transport)
