"""NCCL is told which algorithm to use before it connects the ranks, or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy

from ringstrategy import PipelineStrategy, RingDDPStrategy
from ringstrategy.collectives.nccl import force_algorithm, prepare

_CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize("algorithm", ["ring", "tree"])
def test_only_the_all_reduce_is_told(algorithm: str) -> None:
    environment: dict[str, str] = {}
    force_algorithm(algorithm, environment)
    assert environment == {"NCCL_ALGO": f"allreduce:{algorithm}"}
    force_algorithm(algorithm, environment)  # for a second strategy
    assert environment == {"NCCL_ALGO": f"allreduce:{algorithm}"}


@pytest.mark.parametrize(
    ("present", "agrees"),
    [
        ("Tree", True),
        ("tree", True),
        ("allreduce:tree", True),
        ("ring;allreduce:Tree;broadcast:ring", True),
        ("Ring", False),
        ("tree,ring", False),
        ("^ring", False),
        ("broadcast:tree", False),
        ("tree;allreduce:ring", False),
        ("", False),
    ],
)
def test_what_the_user_has_set_must_say_the_same(present: str, agrees: bool) -> None:
    environment = {"NCCL_ALGO": present}
    if agrees:
        force_algorithm("tree", environment)
    else:
        with pytest.raises(ValueError, match=r"algorithm='tree', but NCCL_ALGO=.* tells NCCL something else"):
            force_algorithm("tree", environment)
    assert environment == {"NCCL_ALGO": present}


def test_it_is_too_late_once_there_is_a_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    environment: dict[str, str] = {}
    with pytest.raises(RuntimeError, match=r"the process group exists already. Set NCCL_ALGO='allreduce:ring'"):
        force_algorithm("ring", environment)
    assert not environment
    force_algorithm("ring", {"NCCL_ALGO": "allreduce:ring"})


@pytest.mark.parametrize(
    ("algorithm", "device", "backend"),
    [
        ("ring", torch.device("cpu"), None),
        ("ring", _CUDA, "gloo"),
        ("auto", _CUDA, None),
        ("naive", _CUDA, "nccl"),
    ],
)
def test_elsewhere_nothing_is_set(
    algorithm: str, device: torch.device, backend: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NCCL_ALGO", raising=False)
    prepare(algorithm, device, backend)
    assert "NCCL_ALGO" not in os.environ


class _Stop(Exception):
    pass


@pytest.mark.parametrize("make", [RingDDPStrategy, PipelineStrategy])
@pytest.mark.parametrize("backend", [None, "nccl", "cpu:gloo,cuda:nccl"])
def test_the_strategy_tells_before_the_process_group_is_made(
    make: Callable[..., RingDDPStrategy], backend: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def connect(self: object) -> None:
        raise _Stop(os.environ.get("NCCL_ALGO"))

    monkeypatch.setenv("NCCL_ALGO", "")  # so that it is put back afterwards
    monkeypatch.delenv("NCCL_ALGO")
    monkeypatch.setattr(DDPStrategy, "setup_distributed", connect)
    environment: Any = SimpleNamespace(local_rank=lambda: 0)
    strategy = make(
        parallel_devices=[_CUDA], cluster_environment=environment, process_group_backend=backend, algorithm="tree"
    )
    with pytest.raises(_Stop, match="allreduce:tree"):
        strategy.setup_distributed()
