"""Compressed gradients on a GPU: NCCL with the one rank that one GPU allows."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ringstrategy.collectives.compressed import CompressedCollective
from ringstrategy.collectives.half_precision import Compression, MessageLayout, add_into, decode, encode
from ringstrategy.process_group import RankGroup
from tests.helpers.ranks import run_ranks

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: torch.cuda.is_available() is false"),
]

_GPU = torch.device("cuda", 0)
_PATIENCE = timedelta(seconds=60)
_COMPRESSIONS: list[Compression] = ["bf16", "fp16"]


def _values() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    spread = torch.exp2(torch.randint(-40, 40, (70_001,), generator=generator).float())
    values = torch.randn(70_001, generator=generator) * spread
    values[:3] = torch.tensor([float("inf"), float("-inf"), 0.0])
    return values


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_messages_have_the_same_bits_as_on_the_cpu(dtype: torch.dtype) -> None:
    values = _values()
    layout = MessageLayout(values.numel(), 0, 1, dtype)
    results = []
    for device in (torch.device("cpu"), _GPU):
        (message,) = layout.messages(torch.zeros(layout.nbytes(False), dtype=torch.uint8, device=device), counts=False)
        encode(values.to(device), message)
        back, total = torch.empty_like(values, device=device), torch.ones_like(values, device=device)
        decode(message, back)
        add_into(total, message)
        results.append([message.factor.cpu(), message.values.cpu(), back.cpu(), total.cpu()])
    for on_cpu, on_gpu in zip(*results, strict=True):
        assert torch.equal(on_cpu, on_gpu)


def _nccl(rank: int, world_size: int, rendezvous: str, compression: Compression) -> None:
    torch.cuda.set_device(_GPU)
    dist.init_process_group("nccl", init_method=rendezvous, rank=rank, world_size=world_size, timeout=_PATIENCE)
    group = RankGroup.connect(_GPU, _PATIENCE)
    collective = CompressedCollective(group, compression)
    values = _values()[3:].to(_GPU)
    buffer = collective.allocate(4 * (values.numel() + 2)).view(torch.float32)
    assert buffer.device == _GPU
    counts = torch.tensor([1.0, 300.0], device=_GPU)
    works = []
    for _ in range(3):
        buffer.copy_(torch.cat([values, counts]))
        works.append(collective.all_reduce(buffer, exact=2))
        works[-1].wait()
    layout = MessageLayout(values.numel(), 0, 1, torch.bfloat16 if compression == "bf16" else torch.float16)
    (message,) = layout.messages(torch.zeros(layout.nbytes(False), dtype=torch.uint8, device=_GPU), counts=False)
    expected = torch.empty_like(values)
    encode(values, message)
    decode(message, expected)
    encode(expected, message)  # rounded there and back
    decode(message, expected)
    assert torch.equal(buffer[:-2], expected)
    assert torch.equal(buffer[-2:], counts)
    with pytest.raises(TypeError, match="floating point"):
        collective.all_reduce(collective.allocate(64).view(torch.int64))
    collective.close()
    group.close()


@pytest.mark.parametrize("compression", _COMPRESSIONS)
def test_nccl_carries_messages(tmp_path: Path, compression: Compression) -> None:
    run_ranks(_nccl, 1, (tmp_path / "rendezvous").as_uri(), compression, init=False, timeout=110)


def _gloo(rank: int, world_size: int) -> None:
    group = RankGroup.connect(_GPU, _PATIENCE)
    with pytest.raises(RuntimeError, match=r"works on CPU and over NCCL, not on cuda over gloo"):
        CompressedCollective(group, "bf16")
    group.close()


def test_gloo_on_cuda_is_refused() -> None:
    run_ranks(_gloo, 1, timeout=110)
