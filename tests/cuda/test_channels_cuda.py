"""Messages between two ranks that share a GPU."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch

from ringstrategy.collectives.choose import Transport
from ringstrategy.pipeline.connect import connect
from ringstrategy.process_group import RankGroup
from tests.helpers.channels import TRANSPORTS
from tests.helpers.ranks import run_ranks

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: torch.cuda.is_available() is false"),
]

_GPU = torch.device("cuda", 0)


def _device_tensors(rank: int, world_size: int, transport: Transport) -> None:
    torch.cuda.set_device(_GPU)
    channel = connect(RankGroup.connect(_GPU, timedelta(seconds=60)), transport)[1 - rank]
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64):
        numbers = (torch.arange(24, device=_GPU).reshape(2, 3, 4) % 5).to(dtype)
        sent = [
            numbers,
            numbers.permute(2, 0, 1),
            numbers[0, 0].expand(5, 4),
            numbers[:, ::2],
            numbers[:0],
            numbers.cpu(),
        ]
        channel.send(sent, "layouts")
        for mine, theirs in zip(channel.receive("layouts"), sent, strict=True):
            assert (mine.dtype, mine.shape, mine.device) == (theirs.dtype, theirs.shape, theirs.device)
            assert torch.equal(mine, theirs)
    channel.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_device_tensors_arrive_on_the_device(transport: Transport) -> None:
    run_ranks(_device_tensors, 2, transport, timeout=110)


def _just_computed(rank: int, world_size: int, transport: Transport) -> None:
    torch.cuda.set_device(_GPU)
    channel = connect(RankGroup.connect(_GPU, timedelta(seconds=60)), transport)[1 - rank]
    weight = torch.eye(2048, device=_GPU) * 2
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        for step in range(5):
            value = torch.full((2048, 2048), float(rank + step), device=_GPU)
            for _ in range(8):
                value = value @ weight
            channel.send([value], "product")  # before the device is through with it
            value.zero_()
            (product,) = channel.receive("product")
            assert (product * 1.0).eq((1 - rank + step) * 256.0).all()
    channel.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_what_the_current_stream_computes_is_sent_complete(transport: Transport) -> None:
    run_ranks(_just_computed, 2, transport, timeout=110)
