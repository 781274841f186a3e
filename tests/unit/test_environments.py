"""Which ranks a process has when a platform, and no launcher, has numbered them."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.fabric.utilities import rank_zero

from ringstrategy.environments import as_numbered

NUMBERS = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}


@pytest.fixture
def numbered(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in NUMBERS.items():
        monkeypatch.setenv(name, value)
    # Who is rank 3 has nothing to say; the tests after this one do.
    monkeypatch.setattr(rank_zero.rank_zero_only, "rank", 0, raising=False)
    for name in ("NODE_RANK", "GROUP_RANK", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("numbered")
def test_ranks_are_those_that_the_platform_says() -> None:
    """Symptom: both hosts have ranks 0 and 1, and wait for each other."""
    trainer = pl.Trainer(strategy="ring_ddp", accelerator="cpu", devices=2, num_nodes=2, logger=False)
    assert (trainer.global_rank, trainer.local_rank, trainer.world_size) == (3, 1, 4)


@pytest.mark.usefixtures("numbered")
@pytest.mark.parametrize("name", [*NUMBERS, "NODE_RANK", "GROUP_RANK"])
def test_nothing_changes_where_a_number_is_missing_or_lightning_has_its_own(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name in NUMBERS:
        monkeypatch.delenv(name)
    else:
        monkeypatch.setenv(name, "1")
    environment = LightningEnvironment()
    assert as_numbered(environment) is environment


@pytest.mark.usefixtures("numbered")
def test_an_environment_that_was_chosen_stays() -> None:
    for environment in (TorchElasticEnvironment(), None):
        assert as_numbered(environment) is environment
