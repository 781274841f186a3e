"""Gradients on a GPU: NCCL with the one rank that one GPU allows, and gloo with two ranks that share it."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ringstrategy.collectives.backend import BackendCollective
from ringstrategy.collectives.choose import choose_collective
from ringstrategy.gradients.reducer import GradientReducer
from ringstrategy.pipeline.batch_norm import deferred_statistics
from ringstrategy.process_group import RankGroup
from tests.helpers.assertions import assert_close_to_single_process
from tests.helpers.models import Regression, parameters_of, shard
from tests.helpers.ranks import run_ranks

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: torch.cuda.is_available() is false"),
]

_GPU = torch.device("cuda", 0)
_PATIENCE = timedelta(seconds=60)


def _nccl(rank: int, world_size: int, rendezvous: str) -> RankGroup:
    torch.cuda.set_device(_GPU)
    dist.init_process_group("nccl", init_method=rendezvous, rank=rank, world_size=world_size, timeout=_PATIENCE)
    return RankGroup.connect(_GPU, _PATIENCE)


def _nccl_sums(rank: int, world_size: int, rendezvous: str) -> None:
    group = _nccl(rank, world_size, rendezvous)
    collective = choose_collective(group)
    assert collective.name == "backend"
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.int64):
        buffer = collective.allocate(1000 * dtype.itemsize).view(dtype)
        assert buffer.device == _GPU
        assert not buffer.any()
        values = (torch.arange(1000) % 31).to(dtype)
        buffer.copy_(values)
        collective.all_reduce(buffer).wait()
        assert torch.equal(buffer.cpu(), values), dtype  # the sum over one rank
    collective.close()
    group.close()


def test_nccl_sums_every_dtype(tmp_path: Path) -> None:
    run_ranks(_nccl_sums, 1, (tmp_path / "rendezvous").as_uri(), init=False, timeout=110)


def _nccl_order(rank: int, world_size: int, rendezvous: str) -> None:
    group = _nccl(rank, world_size, rendezvous)
    collective = BackendCollective(group)
    buffer = collective.allocate(4 * 1000).view(torch.float32)
    collective.all_reduce(buffer).wait()  # connects, for which the host does wait
    matrix = torch.zeros(8192, 8192, device=_GPU)
    product = matrix @ matrix  # loads what multiplies
    torch.cuda.synchronize()

    for _ in range(50):
        torch.mm(matrix, matrix, out=product)
    buffer.fill_(3.0)  # behind the products
    work = dist.all_reduce(buffer, async_op=True)
    collective.all_reduce(buffer).wait()  # behind `work`, on NCCL's stream
    after = torch.cuda.Event()  # type: ignore[no-untyped-call]
    after.record()
    assert not after.query(), "the host has waited for the sums"  # type: ignore[no-untyped-call]

    after.synchronize()
    assert work is not None
    assert work.is_completed(), "the current stream has not waited for the sums"
    assert torch.equal(buffer.cpu(), torch.full((1000,), 3.0))
    collective.close()
    group.close()


def test_nccl_makes_the_stream_wait_and_not_the_host(tmp_path: Path) -> None:
    run_ranks(_nccl_order, 1, (tmp_path / "rendezvous").as_uri(), init=False, timeout=110)


def _fit(rank: int, world_size: int, strategy: str) -> tuple[str, dict[str, Tensor]]:
    module = Regression()
    trainer = pl.Trainer(
        accelerator="gpu",
        devices=1,
        strategy=strategy,
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, shard(0, 1, rows=24, batch_size=4))
    return str(trainer.strategy.root_device), {name: value.cpu() for name, value in parameters_of(module).items()}


def test_ring_ddp_on_one_gpu_equals_ddp() -> None:
    ((our_device, ours),) = run_ranks(_fit, 1, "ring_ddp", init=False, timeout=110)
    ((their_device, theirs),) = run_ranks(_fit, 1, "ddp", init=False, timeout=110)
    assert our_device == their_device == "cuda:0"
    assert_close_to_single_process(ours, theirs)
    assert any(not torch.equal(ours[name], value) for name, value in parameters_of(Regression()).items())


def _gloo_means(rank: int, world_size: int) -> list[Tensor]:
    group = RankGroup.connect(_GPU, _PATIENCE)
    collective = choose_collective(group)
    assert collective.name == "backend"
    buffer = collective.allocate(8 * 1000).view(torch.float64)
    buffer.copy_(torch.arange(1000) + 1000 * rank)
    collective.all_reduce(buffer).wait()
    assert torch.equal(buffer.cpu(), 2 * torch.arange(1000).double() + 1000)

    network = _network().to(_GPU)
    reducer = GradientReducer(list(network.named_parameters()), collective, group, bucket_cap_bytes=200)
    for step in range(3):  # the first observes, the others overlap
        network.zero_grad()
        with reducer.backward():
            torch.autograd.backward(network(_rows(step, rank).to(_GPU)).square().mean())
    means = [parameter.grad.cpu() for parameter in network.parameters() if parameter.grad is not None]
    reducer.close()
    collective.close()
    group.close()
    return means


def _network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 2)).double()


def _rows(step: int, rank: int) -> Tensor:
    return torch.randn(3, 5, generator=torch.Generator().manual_seed(100 * step + rank), dtype=torch.float64)


def test_two_gloo_ranks_on_one_gpu_average_their_gradients() -> None:
    network = _network()
    losses = [network(_rows(2, rank)).square().mean() for rank in range(2)]
    torch.autograd.backward(torch.stack(losses).mean())
    expected = [parameter.grad for parameter in network.parameters()]
    for means in run_ranks(_gloo_means, 2, timeout=110):
        torch.testing.assert_close(means, expected, rtol=1e-12, atol=1e-12)


def _synchronised(rank: int, world_size: int, sizes: list[int]) -> dict[str, Tensor]:
    layer = nn.SyncBatchNorm(3, device=_GPU, dtype=torch.float64)
    rows = _images()[rank::world_size].to(_GPU)
    with deferred_statistics([layer], len(sizes)) as statistics:
        for part in torch.split(rows, sizes):
            with statistics.micro_batch():
                layer(part)
    return {name: buffer.cpu() for name, buffer in layer.named_buffers()}


def _images() -> Tensor:
    return torch.randn(14, 3, 4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3 + 1


def test_a_sync_batch_norm_moves_by_all_micro_batches_of_all_replicas() -> None:
    whole = nn.BatchNorm2d(3, dtype=torch.float64)
    whole(_images())
    for buffers in run_ranks(_synchronised, 2, [2, 5], timeout=110):
        torch.testing.assert_close(buffers, dict(whole.named_buffers()), rtol=1e-12, atol=1e-12)
