"""A start refuses ranks that do not fit together, and nothing else."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.launch_script import Sharded
from tests.helpers.models import Batch, Regression
from tests.helpers.ranks import RanksFailedError, run_ranks
from tests.helpers.trainers import fit_ranks, trainer_on_rank


def _start_without_training(rank: int, world_size: int) -> None:
    frozen = Sharded()
    frozen.freeze()
    trainer_on_rank(rank, world_size).test(frozen, verbose=False)


class WithoutParameters(Sharded):
    """Has nothing to train."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Identity()

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return torch.zeros((), requires_grad=True)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        pass

    def configure_optimizers(self) -> None:
        return None


def _train_nothing(rank: int, world_size: int) -> int:
    trainer = trainer_on_rank(rank, world_size)
    trainer.fit(WithoutParameters())
    return trainer.fit_loop.epoch_loop.batch_idx


def test_nothing_to_train_is_no_error() -> None:
    run_ranks(_start_without_training, 2)
    assert run_ranks(_train_nothing, 2) == [2, 2]


def _other_shape(rank: int) -> Regression:
    return Regression(rank, net=nn.Sequential(nn.Linear(8, 6 + rank), nn.Tanh(), nn.Linear(6 + rank, 3)))


def _other_order(rank: int) -> Regression:
    names = ["a", "b"] if rank == 0 else ["b", "a"]
    return Regression(rank, net=nn.Sequential(OrderedDict((name, nn.Linear(8, 8)) for name in names)))


def _other_number(rank: int) -> Regression:
    return Regression(rank, net=nn.Sequential(*(nn.Linear(8, 8) for _ in range(2 + rank))))


FIRST_DIFFERENCE: dict[Callable[[int], Regression], tuple[str, str]] = {
    _other_shape: ("'net.0.weight' with shape (6, 8)", "'net.0.weight' with shape (7, 8)"),
    _other_order: ("'net.a.weight' with shape (8, 8)", "'net.b.weight' with shape (8, 8)"),
    _other_number: ("absent", "'net.2.weight' with shape (8, 8)"),
}


@pytest.mark.parametrize("build", FIRST_DIFFERENCE)
def test_ranks_with_different_models_are_refused(build: Callable[[int], Regression]) -> None:
    """Symptom: gradients of one layer are added to those of another."""
    on_0, on_1 = map(re.escape, FIRST_DIFFERENCE[build])
    with pytest.raises(RanksFailedError) as failure:
        fit_ranks(build, 2, rows=16, batch_size=4)
    for outcome in failure.value.outcomes:
        message = rf"ParameterMismatch: The ranks do not hold the same model: .* {on_0}.* rank 0 and {on_1}.* rank 1"
        assert re.search(message, str(outcome.error)), outcome.error
