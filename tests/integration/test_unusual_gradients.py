"""Sparse, mixed, complex, empty and twice differentiated gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.helpers.assertions import assert_close_to_single_process, assert_ranks_identical
from tests.helpers.models import Batch, Regression, blocks, network, plain_sgd, train_single_process
from tests.helpers.trainers import fit_ranks


class _Bag(nn.Module):
    """The mean embedding of three ids, then a linear layer."""

    def __init__(self, sparse: bool, padding_idx: int | None) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.table = nn.Embedding(10, 4, sparse=sparse, padding_idx=padding_idx)
            self.head = nn.Linear(4, 3)

    def forward(self, ids: Tensor) -> Tensor:
        output: Tensor = self.head(self.table(ids).mean(dim=1))
        return output


def _ids(inputs: Tensor, pad_odd_rows: bool = False) -> Tensor:
    """Three ids of 0..9 a row."""
    ids = (inputs[:, :3].abs() * 7).long() % 10
    if pad_odd_rows:
        ids[1::2] = 0
    return ids


class _SparseTable(Regression):
    """Rank 1 may feed nothing but padding."""

    def __init__(self, rank: int, padding: bool) -> None:
        super().__init__(rank, _Bag(sparse=True, padding_idx=0 if padding else None), plain_sgd)
        self.only_padding = padding and rank == 1

    def loss(self, batch: Batch) -> Tensor:
        ids = _ids(batch[0])
        return F.mse_loss(self.net(torch.zeros_like(ids) if self.only_padding else ids), batch[1])

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        gradient = self.net.get_parameter("table.weight").grad
        self.record("is sparse", gradient is not None and gradient.is_sparse)


def _loss_of_bag(net: nn.Module, batch: Batch, padding: bool) -> Tensor:
    return F.mse_loss(net(_ids(batch[0], pad_odd_rows=padding)), batch[1])


@pytest.mark.parametrize("padding", [False, True], ids=["all ranks use it", "rank 1 feeds padding only"])
def test_a_sparse_gradient_stays_sparse_and_equals_the_dense_one(padding: bool) -> None:
    """Symptom: a sparse embedding fails in the collective, above all when one rank only touches the padding row."""
    ranks = fit_ranks(partial(_SparseTable, padding=padding), 2, rows=16, batch_size=4)
    assert [rank.records["is sparse"] for rank in ranks] == [[True, True]] * 2
    assert_ranks_identical([rank.parameters for rank in ranks])
    net, loss = _Bag(sparse=False, padding_idx=0 if padding else None), partial(_loss_of_bag, padding=padding)
    assert_close_to_single_process(ranks[0].parameters, train_single_process(net, blocks(16, 8), plain_sgd, loss))


class _SparseAdam(_SparseTable):
    def __init__(self, rank: int) -> None:
        super().__init__(rank, padding=False)
        self.automatic_optimization = False

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        optimizers: Any = self.optimizers()
        self.manual_backward(self.loss(batch))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        table, head = (self.net.get_submodule(name).parameters() for name in ("table", "head"))
        return torch.optim.SparseAdam(table, lr=0.1), torch.optim.Adam(head, lr=0.1)


def test_an_optimizer_for_sparse_gradients_runs_beside_a_dense_one() -> None:
    """Symptom: the table arrives dense, and SparseAdam refuses it."""
    ranks = fit_ranks(_SparseAdam, 2, rows=16, batch_size=4)
    assert_ranks_identical([rank.parameters for rank in ranks])
    assert not torch.equal(ranks[0].parameters["net.table.weight"], _Bag(True, None).table.weight)


class _MixedTypes(nn.Module):
    """float32, then float64, then bfloat16, times a scalar."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.first = nn.Linear(8, 6)
            self.second = nn.Linear(6, 6, dtype=torch.float64)
            self.third = nn.Linear(6, 3, dtype=torch.bfloat16)
            self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.second(torch.tanh(self.first(inputs)).double()))
        output: Tensor = self.third(hidden.bfloat16()).float() * self.scale
        return output


class _Complex(nn.Module):
    """A complex weight; both parts of the product count."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.weight = nn.Parameter(torch.randn(8, 3, dtype=torch.complex64, generator=generator))
        self.bias = nn.Parameter(torch.zeros(3))

    def forward(self, inputs: Tensor) -> Tensor:
        product = inputs.to(torch.complex64) @ self.weight
        return product.real + 0.5 * product.imag + self.bias


class _TinyParameters(nn.Module):
    """Parameters without elements, with one, and without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.linear = nn.Linear(8, 3)
            self.empty = nn.Parameter(torch.empty(0, 8))
            self.scale = nn.Parameter(torch.tensor(1.5))
            self.shift = nn.Parameter(torch.tensor([0.5]))

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.linear(inputs) * self.scale + self.shift + (inputs @ self.empty.T).sum()
        return output


class _NotesDtypes(Regression):
    def __init__(self, rank: int, make: Callable[[], nn.Module]) -> None:
        super().__init__(rank, make(), plain_sgd)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        for parameter in self.parameters():
            assert parameter.grad is not None
            assert parameter.grad.dtype == parameter.dtype
            assert parameter.grad.shape == parameter.shape


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize(("make", "tolerances"), [
    (_MixedTypes, {torch.float32: 1e-3, torch.float64: 1e-3, torch.bfloat16: 2e-2}),
    (_Complex, {torch.float32: 1e-6, torch.complex64: 1e-6}),
    (_TinyParameters, {torch.float32: 1e-6}),
])  # fmt: skip
def test_every_dtype_and_size_of_parameter_trains_as_in_one_process(
    make: Callable[[], nn.Module], tolerances: dict[torch.dtype, float], world_size: int
) -> None:
    """Symptom: a bucket of mixed dtypes fails or loses the imaginary part; an empty weight breaks the broadcast."""
    ranks = fit_ranks(partial(_NotesDtypes, make=make), world_size, rows=8 * world_size, batch_size=4)
    assert_ranks_identical([rank.parameters for rank in ranks])
    expected = train_single_process(make(), blocks(8 * world_size, 4 * world_size), plain_sgd)
    for dtype, tolerance in tolerances.items():
        ours, theirs = ({n: t for n, t in s.items() if t.dtype == dtype} for s in (ranks[0].parameters, expected))
        assert ours, dtype
        assert_close_to_single_process(ours, theirs, tolerance)


def _penalised(net: nn.Module, batch: Batch) -> Tensor:
    """A critic's loss with a penalty on the norm of its gradient with respect to the inputs."""
    inputs = batch[0].detach().requires_grad_()
    scores = net(inputs).mean(dim=1)
    (slope,) = torch.autograd.grad(scores.sum(), inputs, create_graph=True)
    loss: Tensor = scores.mean() + ((slope.norm(dim=1) - 1) ** 2).mean()
    return loss


class _GradientPenalty(Regression):
    def __init__(self, rank: int) -> None:
        super().__init__(rank, optimizer=plain_sgd)

    def loss(self, batch: Batch) -> Tensor:
        return _penalised(self.net, batch)


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_gradient_penalty_trains_as_in_one_process(world_size: int) -> None:
    """Symptom: losses with a gradient inside give unsynchronised or wrong gradients."""
    ranks = fit_ranks(_GradientPenalty, world_size, rows=8 * world_size, batch_size=4)
    assert_ranks_identical([rank.parameters for rank in ranks])
    blocks_of_all = blocks(8 * world_size, 4 * world_size)
    assert_close_to_single_process(
        ranks[0].parameters, train_single_process(network(), blocks_of_all, plain_sgd, _penalised)
    )


class _KeepsTheGraph(Regression):
    def __init__(self, rank: int) -> None:
        super().__init__(rank, optimizer=plain_sgd)
        self.automatic_optimization = False

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch), create_graph=True)
        for name, parameter in self.named_parameters():
            self.record(name, parameter.grad)
        optimizer.step()


def test_a_backward_that_keeps_its_graph_leaves_the_mean_in_grad() -> None:
    """Symptom: an error about out= and autograd."""
    ranks = fit_ranks(_KeepsTheGraph, 2, rows=8, batch_size=4)
    (block,) = blocks(8, 8)
    net = network()
    torch.autograd.backward(F.mse_loss(net(block[0]), block[1]))
    for name, parameter in net.named_parameters(prefix="net"):
        assert parameter.grad is not None
        for rank in ranks:
            torch.testing.assert_close(rank.records[name][0], parameter.grad, rtol=0, atol=1e-6)


class _ReturnsNoGradient(torch.autograd.Function):
    """Takes a parameter, and has no gradient for it."""

    @staticmethod
    def forward(ctx: object, value: Tensor, parameter: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _Ignored(Regression):
    """One parameter is an argument of a function of autograd that has no gradient for it."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.ignored = nn.Parameter(torch.ones(3))

    def loss(self, batch: Batch) -> Tensor:
        inputs, targets = batch
        return F.mse_loss(_ReturnsNoGradient.apply(self.net(inputs), self.ignored), targets)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.record("ignored", self.ignored.grad)


def test_a_function_that_returns_no_gradient_for_a_parameter() -> None:
    """Symptom: torch calls the hooks of such a parameter all the same, and the strategy fails in its second step."""
    ranks = fit_ranks(_Ignored, 2, rows=24, batch_size=4)
    assert_ranks_identical([rank.parameters for rank in ranks])
    assert ranks[0].records["ignored"] == [None] * 3
    parameters = {name: value for name, value in ranks[0].parameters.items() if name != "ignored"}
    assert_close_to_single_process(parameters, train_single_process(network(), blocks(24, 8)))
