"""Algorithms on a GPU: NCCL's own, with the one rank that one GPU allows; and what gloo cannot do there."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ringstrategy import RingDDPStrategy
from ringstrategy.collectives.choose import Algorithm, choose_collective
from ringstrategy.collectives.naive import naive_all_reduce
from ringstrategy.collectives.point_to_point import PointToPoint
from ringstrategy.process_group import RankGroup
from tests.helpers.assertions import assert_close_to_single_process
from tests.helpers.models import Regression, blocks, network, parameters_of, shard, train_single_process
from tests.helpers.ranks import run_ranks

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: torch.cuda.is_available() is false"),
]

_GPU = torch.device("cuda", 0)
_PATIENCE = timedelta(seconds=60)


def _fit(rank: int, world_size: int, algorithm: Algorithm) -> tuple[str | None, dict[str, Tensor]]:
    for _ in range(2):  # the second finds the first one's process group, and NCCL_ALGO as it wants it
        module = Regression()
        trainer = pl.Trainer(
            accelerator="gpu",
            devices=1,
            strategy=RingDDPStrategy(algorithm=algorithm),
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, shard(0, 1, rows=24, batch_size=4))
    parameters = {name: value.cpu() for name, value in parameters_of(module).items()}
    return os.environ.get("NCCL_ALGO"), parameters


@pytest.mark.parametrize(
    ("algorithm", "told"),
    [("ring", "allreduce:ring"), ("tree", "allreduce:tree"), ("naive", None), ("measure", None)],
)
def test_training_with_each_algorithm_equals_one_process(
    algorithm: Algorithm, told: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NCCL_ALGO", raising=False)
    ((found, parameters),) = run_ranks(_fit, 1, algorithm, init=False, timeout=110)
    assert found == told
    assert_close_to_single_process(parameters, train_single_process(network(), blocks(24, 4)), tolerance=1e-5)


def _late(rank: int, world_size: int) -> None:
    _fit(rank, world_size, "auto")
    _fit(rank, world_size, "tree")


def test_nccl_is_told_in_time_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCCL_ALGO", raising=False)
    with pytest.raises(AssertionError, match="the process group exists already"):
        run_ranks(_late, 1, init=False, timeout=110)


def _on_a_stream(rank: int, world_size: int, rendezvous: str) -> None:
    torch.cuda.set_device(_GPU)
    dist.init_process_group("nccl", init_method=rendezvous, rank=rank, world_size=world_size, timeout=_PATIENCE)
    group = RankGroup.connect(_GPU, _PATIENCE)
    collective = PointToPoint(group, "naive", naive_all_reduce)
    buffer = collective.allocate(4 * 1000).view(torch.float32)
    buffer.fill_(3.0)
    collective.all_reduce(buffer).wait()
    assert torch.equal(buffer.cpu(), torch.full((1000,), 3.0))
    collective.abort(KeyError("the reason"))
    with pytest.raises(KeyError, match="the reason"):
        collective.all_reduce(buffer)
    collective.close()
    group.close()


def test_the_naive_one_runs_on_a_stream(tmp_path: Path) -> None:
    run_ranks(_on_a_stream, 1, (tmp_path / "rendezvous").as_uri(), init=False, timeout=110)


_REFUSED: list[tuple[Algorithm, str]] = [
    ("ring", "where rings and trees are NCCL's"),
    ("tree", "where rings and trees are NCCL's"),
    ("naive", "the backend 'gloo' sends no tensors that live on cuda"),
]


def _gloo(rank: int, world_size: int) -> None:
    group = RankGroup.connect(_GPU, _PATIENCE)
    for algorithm, reason in _REFUSED:
        with pytest.raises(RuntimeError, match=reason):
            choose_collective(group, algorithm)
    assert choose_collective(group, "measure").name == "backend"
    group.close()


def test_gloo_on_a_gpu_says_what_it_cannot_do() -> None:
    run_ranks(_gloo, 2, timeout=110)
