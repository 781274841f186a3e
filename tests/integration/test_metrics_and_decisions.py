"""What ranks tell each other besides gradients: values, objects, decisions."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EarlyStopping
from torch import Tensor

from tests.helpers.assertions import assert_ranks_identical
from tests.helpers.models import Batch, Regression, parameters_of, shard
from tests.helpers.ranks import RanksFailedError, run_ranks
from tests.helpers.trainers import fit_ranks, trainer_on_rank

_OPERATIONS: dict[str, Any] = {
    "mean": "mean", "avg": "avg", "AVG": "AVG", "none": None, "ReduceOp.AVG": dist.ReduceOp.AVG,
    "sum": "sum", "SUM": "SUM", "ReduceOp.SUM": dist.ReduceOp.SUM,
    "max": "max", "ReduceOp.MAX": dist.ReduceOp.MAX,
    "min": "min", "ReduceOp.MIN": dist.ReduceOp.MIN,
    "product": "product", "ReduceOp.PRODUCT": dist.ReduceOp.PRODUCT,
}  # fmt: skip
_DTYPES = [torch.int64, torch.int32, torch.uint8, torch.bool, torch.float64, torch.float32, torch.bfloat16]


def _value(rank: int, dtype: torch.dtype) -> int:
    return min(rank, 1) if dtype == torch.bool else rank + 1


def _expected(operation: str, values: list[float]) -> float:
    """The reduction in plain Python."""
    kind = operation.removeprefix("ReduceOp.").lower()
    if kind in ("mean", "avg", "none"):
        return sum(values) / len(values)
    if kind == "product":
        return float(torch.tensor(values).prod())
    if kind == "sum":
        return sum(values)
    return max(values) if kind == "max" else min(values)


class _Asks(Regression):
    """Puts a question to the other ranks when training begins."""

    def __init__(self, rank: int, ask: Any) -> None:
        super().__init__(rank)
        self._ask = ask

    def on_train_start(self) -> None:
        self.record("answer", self._ask(self))


def _ask(rank: int, world_size: int, ask: Any) -> Any:
    module = _Asks(rank, ask)
    trainer_on_rank(rank, world_size).fit(module, shard(rank, world_size, rows=4 * world_size, batch_size=4))
    (answer,) = module.records["answer"]
    return answer


def _reduce_all(module: _Asks) -> list[tuple[str, Tensor, bool]]:
    """Every operation on every dtype and several shapes: the result, and whether the argument is as it was."""
    answers = []
    for (name, operation), dtype, shape in itertools.product(_OPERATIONS.items(), _DTYPES, [(), (2, 3), (0,)]):
        argument = torch.full(shape, _value(module.rank, dtype), dtype=dtype)
        before = argument.clone()
        result = module.trainer.strategy.reduce(argument, reduce_op=operation)
        unchanged = torch.equal(argument, before) and result is not argument
        answers.append((f"{name} {dtype} {shape}", result, unchanged))
    return answers


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_reduction_is_right_and_leaves_its_argument_alone(world_size: int) -> None:
    """Symptom: the mean of integers is floored, and the reduced tensor is overwritten."""
    ranks = run_ranks(_ask, world_size, _reduce_all)
    cases = itertools.product(_OPERATIONS, _DTYPES, [(), (2, 3), (0,)])
    for of_ranks, (operation, dtype, shape) in zip(zip(*ranks, strict=True), cases, strict=True):
        name = of_ranks[0][0]
        assert all(unchanged for _, _, unchanged in of_ranks), name
        assert all(torch.equal(result, of_ranks[0][1]) for _, result, _ in of_ranks), name
        result = of_ranks[0][1]
        values = [float(_value(rank, dtype)) for rank in range(world_size)]
        expected = torch.full(shape, _expected(operation, values), dtype=torch.float64)
        torch.testing.assert_close(result.double(), expected, rtol=1e-2 if dtype == torch.bfloat16 else 1e-6, atol=0)
        if dtype.is_floating_point:
            assert result.dtype == dtype, name


def _mean_of_zero_and_one(module: _Asks) -> list[Any]:
    reduce = module.trainer.strategy.reduce
    return [
        reduce(torch.tensor(module.rank)).item(),
        reduce(torch.tensor([module.rank == 1])).item(),
        *(reduce(value) for value in (7, 0.5, "text", None)),
    ]


def test_the_mean_of_integers_is_their_mean_and_other_objects_pass() -> None:
    """Symptom: zero and one have the mean zero."""
    assert run_ranks(_ask, 2, _mean_of_zero_and_one) == [[0.5, 0.5, 7, 0.5, "text", None]] * 2


def _reduce_by_an_unknown_name(module: _Asks) -> str:
    with pytest.raises(ValueError, match="median") as refusal:
        module.trainer.strategy.reduce(torch.tensor(1.0), reduce_op="median")
    return str(refusal.value)


def test_an_unknown_reduction_is_refused_with_the_known_ones() -> None:
    """Symptom: a typing error becomes another operation."""
    for message in run_ranks(_ask, 2, _reduce_by_an_unknown_name):
        assert "avg, max, mean, min, product, sum" in message


def _broadcast(module: _Asks, src: int) -> list[Any]:
    mine = {"rank": module.rank, "nested": [torch.full((2, 3), module.rank), None, Path("a")], "text": "ä" * 1000}
    return [module.trainer.strategy.broadcast(mine, src=src), module.trainer.strategy.broadcast(module.rank)]


@pytest.mark.parametrize("world_size", [2, 3])
def test_objects_reach_every_rank(world_size: int) -> None:
    """Symptom: only rank 0 can be the source, or only tensors can be sent."""
    for nested, plain in run_ranks(_ask, world_size, partial(_broadcast, src=1)):
        assert nested["rank"] == 1
        assert torch.equal(nested["nested"][0], torch.ones(2, 3, dtype=torch.int64))
        assert nested["nested"][1:] == [None, Path("a")]
        assert nested["text"] == "ä" * 1000
        assert plain == 0


def _gather(module: _Asks) -> list[Any]:
    mine = {"a": torch.full((2,), float(module.rank)), "b": [torch.tensor(module.rank), "text", 3]}
    return [module.all_gather(mine), module.all_gather(torch.tensor(module.rank == 0))]


@pytest.mark.parametrize("world_size", [2, 3])
def test_gathered_collections_keep_their_shape(world_size: int) -> None:
    """Symptom: collections and scalars cannot be gathered."""
    for gathered, flags in run_ranks(_ask, world_size, _gather):
        assert torch.equal(gathered["a"], torch.arange(world_size, dtype=torch.float32)[:, None].expand(-1, 2))
        assert torch.equal(gathered["b"][0], torch.arange(world_size))
        assert gathered["b"][1] == "text"
        assert torch.equal(flags, torch.arange(world_size) == 0)


def _gather_unlike(module: _Asks, by_dtype: bool) -> None:
    rows = 2 if by_dtype else 2 + module.rank
    module.all_gather(torch.zeros(rows, 3, dtype=torch.int64 if by_dtype and module.rank else torch.float32))


@pytest.mark.parametrize(
    ("by_dtype", "theirs"), [(False, "(3, 3) and torch.float32"), (True, "(2, 3) and torch.int64")]
)
def test_tensors_that_cannot_be_gathered_are_named(by_dtype: bool, theirs: str) -> None:
    """Symptom: one rank is aborted inside the backend, the others learn of a lost connection."""
    with pytest.raises(RanksFailedError) as raised:
        run_ranks(_ask, 2, partial(_gather_unlike, by_dtype=by_dtype))
    message = f"rank 0 has one of shape (2, 3) and torch.float32 and rank 1 has one of shape {theirs}"
    assert all(message in (outcome.error or "") for outcome in raised.value.outcomes)
    assert "ValueError" in {outcome.error_type for outcome in raised.value.outcomes}


class _LogsItsLoss(Regression):
    """Logs the loss, and returns the very tensor."""

    def __init__(self, rank: int, log: bool) -> None:
        super().__init__(rank)
        self._log = log

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.record("before", loss)
        if self._log:
            self.log("l", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.record("after", loss)
        return loss


@pytest.mark.parametrize("world_size", [2, 3])
def test_logging_a_loss_does_not_change_it(world_size: int) -> None:
    """Symptom: the loss that is logged with ``sync_dist`` becomes the mean, and its gradient goes astray."""
    logged, silent = (
        fit_ranks(partial(_LogsItsLoss, log=log), world_size, rows=12 * world_size, batch_size=4)
        for log in (True, False)
    )
    assert_ranks_identical([rank.parameters for rank in logged + silent])
    for rank, quiet in zip(logged, silent, strict=True):
        assert rank.records["before"] == rank.records["after"] == quiet.records["before"]
        mean_of_all = torch.stack([torch.stack(other.records["before"]) for other in logged]).mean()
        torch.testing.assert_close(rank.metrics["l_epoch"], mean_of_all)
        last = torch.stack([other.records["before"][-1] for other in logged]).mean()
        torch.testing.assert_close(rank.metrics["l_step"], last)


class _ImprovesOnRank0(Regression):
    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("v", -float(self.current_epoch) if self.rank == 0 else 1.0)


def _stop_early(rank: int, world_size: int) -> tuple[int, dict[str, Tensor]]:
    module, loader = _ImprovesOnRank0(rank), shard(rank, world_size, rows=8 * world_size, batch_size=4)
    trainer = trainer_on_rank(rank, world_size, max_epochs=8, callbacks=[EarlyStopping("v", patience=2)])
    trainer.fit(module, loader, loader)
    return trainer.current_epoch, parameters_of(module)


@pytest.mark.parametrize("world_size", [2, 3])
def test_all_ranks_stop_when_one_of_them_would(world_size: int) -> None:
    """Symptom: one process stops, the others wait."""
    ranks = run_ranks(_stop_early, world_size)
    assert [epoch for epoch, _ in ranks] == [3] * world_size
    assert_ranks_identical([parameters for _, parameters in ranks])


def _decide(module: _Asks, world_size: int) -> list[tuple[bool, bool]]:
    reduce = module.trainer.strategy.reduce_boolean_decision
    votes = itertools.product([False, True], repeat=world_size)
    return [(reduce(vote[module.rank], all=True), reduce(vote[module.rank], all=False)) for vote in votes]


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_vote_is_counted(world_size: int) -> None:
    """Symptom: a decision of some ranks is taken for one of all, or of none."""
    expected = [(all(vote), any(vote)) for vote in itertools.product([False, True], repeat=world_size)]
    assert run_ranks(_ask, world_size, partial(_decide, world_size=world_size)) == [expected] * world_size
