"""Training with each all-reduce algorithm equals one process."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import nn

from ringstrategy import PipelineStrategy, RingDDPStrategy
from ringstrategy.collectives.choose import Algorithm
from ringstrategy.gradients.parameters import expected_buckets
from tests.helpers.assertions import assert_close_to_single_process, assert_ranks_identical
from tests.helpers.fault_script import Setting
from tests.helpers.faults import TIMEOUT, assert_others_name_the_rank, ruin
from tests.helpers.models import Regression, blocks, network, train_single_process
from tests.helpers.trainers import fit_ranks, strategy_under_test


def _double(rank: int) -> Regression:
    return Regression(rank, network(dtype=torch.float64))


# Buckets of one parameter each, so that several are on their way at the same time.
@pytest.mark.parametrize("algorithm", ["ring", "tree", "naive", "measure"])
@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_training_equals_one_process(algorithm: Algorithm, world_size: int) -> None:
    strategy = partial(strategy_under_test, algorithm=algorithm, transport="backend", bucket_cap_mb=1e-6)
    rows = 12 * world_size
    ranks = fit_ranks(_double, world_size, rows=rows, batch_size=4, dtype=torch.float64, strategy=strategy)
    assert_ranks_identical([rank.parameters for rank in ranks])
    expected = train_single_process(network(dtype=torch.float64), blocks(rows, 4 * world_size, torch.float64))
    assert_close_to_single_process(ranks[0].parameters, expected, tolerance=1e-10)
    assert all(rank.bytes_sent for rank in ranks)


def test_the_bytes_of_a_run_are_those_of_the_algorithm() -> None:
    """Rank 0 of three sends every bucket twice, the others once."""
    strategy = partial(strategy_under_test, algorithm="naive")
    first, *others = fit_ranks(Regression, 3, rows=24, batch_size=4, strategy=strategy)
    assert first.bytes_sent
    assert [rank.bytes_sent for rank in others] == [first.bytes_sent // 2] * 2


@pytest.mark.parametrize(
    ("kind", "algorithm"),
    [
        ("kill", "ring"),
        *(
            pytest.param(kind, algorithm, marks=pytest.mark.slow)
            for kind in ("exception", "kill", "stop")
            for algorithm in ("ring", "tree", "naive")
            if (kind, algorithm) != ("kill", "ring")
        ),
    ],
)
def test_a_rank_that_fails_in_an_all_reduce_ends_the_run_and_is_named(
    tmp_path: Path, kind: str, algorithm: Literal["ring", "tree", "naive"]
) -> None:
    setting = Setting(kind, 1, "all-reduce", str(tmp_path), TIMEOUT[kind], 3, transport="backend", algorithm=algorithm)
    assert_others_name_the_rank(ruin(setting), setting)


@pytest.mark.parametrize("make", [RingDDPStrategy, PipelineStrategy])
@pytest.mark.parametrize(
    "arguments",
    [
        {"algorithm": "tree", "transport": "shared_memory"},
        {"algorithm": "naive", "transport": "shared_memory"},
        {"algorithm": "backend", "transport": "shared_memory"},
    ],
)
def test_an_algorithm_that_the_transport_cannot_do_is_refused(make: Any, arguments: dict[str, str]) -> None:
    with pytest.raises(
        ValueError, match=r"does not run over transport='shared_memory'\. Use transport='auto' or 'back"
    ):
        make(**arguments)


def test_expected_buckets_are_those_of_trained_dense_parameters_last_first() -> None:
    module = nn.ModuleDict(
        {
            "embedding": nn.Embedding(1000, 4, sparse=True),
            "first": nn.Linear(100, 300),
            "frozen": nn.Linear(10, 10).requires_grad_(False),
            "elsewhere": nn.Linear(300, 300, device="meta"),
            "last": nn.Linear(300, 7, dtype=torch.float64),
        }
    )
    named = list(module.named_parameters())
    # Slots of 64 bytes: 7 and 2100 float64 (8 and 2104 with their gaps), a flag each; then 300 and 30,000 float32.
    assert expected_buckets(named, {"embedding.weight"}, 2**20) == [
        (8 + 2104 + 2, torch.float64),
        (304 + 30_000 + 2, torch.float32),
    ]
    assert expected_buckets(named, {"embedding.weight"}, 1200) == [
        (8 + 1, torch.float64),
        (2104 + 1, torch.float64),
        (304 + 1, torch.float32),
        (30_000 + 1, torch.float32),
    ]
    assert expected_buckets([], frozenset(), 10) == []
