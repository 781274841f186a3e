"""The first stage's batch on every stage."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from ringstrategy.collectives.choose import Transport
from ringstrategy.pipeline.batches import same_batch
from tests.helpers.channels import TRANSPORTS, open_channels
from tests.helpers.ranks import run_ranks


class Reading(NamedTuple):
    value: Tensor
    unit: str


def _batches(rank: int, world_size: int, transport: Transport) -> None:
    generator = torch.Generator().manual_seed(rank)
    with open_channels(transport) as channels:
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
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_stage_has_the_batch_of_the_first(transport: Transport, world_size: int) -> None:
    run_ranks(_batches, world_size, transport)
