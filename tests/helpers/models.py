"""The data, the network and the module that most tests train, and the oracle they are compared with.

Sharding is explicit: rank r reads the rows ``r, r + world_size, ...``, so that step k of all ranks together sees
exactly the k-th block of ``batch_size * world_size`` rows. One process trained on these blocks is the oracle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

__all__ = [
    "Batch",
    "Regression",
    "blocks",
    "data",
    "network",
    "parameters_of",
    "plain_sgd",
    "sgd",
    "shard",
    "state_of",
    "train_single_process",
]

Batch = list[Tensor] | tuple[Tensor, Tensor]


def data(rows: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Inputs (rows, 8) and targets (rows, 3), always the same."""
    generator = torch.Generator().manual_seed(0)
    inputs, targets = torch.randn(rows, 8, generator=generator), torch.randn(rows, 3, generator=generator)
    return inputs.to(dtype), targets.to(dtype)


def network(seed: int = 1, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Linear(8, 6), Tanh, Linear(6, 3) with the weights of a seed; the global generator is left alone."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3)).to(dtype)


def shard(
    rank: int, world_size: int, rows: int, batch_size: int, dtype: torch.dtype = torch.float32
) -> DataLoader[tuple[Tensor, ...]]:
    """One rank's share of :func:`data`, in order."""
    inputs, targets = data(rows, dtype)
    return DataLoader(TensorDataset(inputs[rank::world_size], targets[rank::world_size]), batch_size=batch_size)


def blocks(rows: int, size: int, dtype: torch.dtype = torch.float32) -> Iterator[tuple[Tensor, Tensor]]:
    """What all ranks together see, step by step: blocks of ``size`` rows."""
    inputs, targets = data(rows, dtype)
    return zip(torch.split(inputs, size), torch.split(targets, size), strict=True)


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer of most tests."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def plain_sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """One without momentum."""
    return torch.optim.SGD(parameters, lr=0.1)


class Regression(pl.LightningModule):
    """Trains a network on mean squared error.

    Args:
        rank: rank that builds it; for subclasses that differ between ranks.
        net: the network, by default that of :func:`network`.
        optimizer: makes the optimizer from the parameters.

    Attributes:
        records: what a test wants to see of a rank; it comes back from there with the result.
    """

    def __init__(
        self,
        rank: int = 0,
        net: nn.Module | None = None,
        optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = sgd,
    ) -> None:
        super().__init__()
        self.rank = rank
        self.net = network() if net is None else net
        self.records: dict[str, list[Any]] = {}
        self._optimizer = optimizer

    def record(self, name: str, value: Any) -> None:
        """Append a value, detached and copied if it is a tensor, to ``records[name]``."""
        self.records.setdefault(name, []).append(value.detach().clone() if isinstance(value, Tensor) else value)

    def loss(self, batch: Batch) -> Tensor:
        """Mean squared error of a batch."""
        inputs, targets = batch
        return F.mse_loss(self.net(inputs), targets)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        return self._optimizer(self.parameters())


def train_single_process(
    net: nn.Module,
    batches: Iterable[Batch],
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = sgd,
    loss: Callable[[nn.Module, Batch], Tensor] | None = None,
) -> dict[str, Tensor]:
    """Train in plain torch, one step per batch.

    Args:
        net: the network; it is trained in place.
        batches: what all ranks together see, e.g. :func:`blocks`.
        optimizer: makes the optimizer from the parameters.
        loss: of the network and a batch; mean squared error by default.

    Returns:
        The parameters, under the names they have as ``net`` of a :class:`Regression`.
    """
    stepper = optimizer(net.parameters())
    for batch in batches:
        stepper.zero_grad()
        torch.autograd.backward(F.mse_loss(net(batch[0]), batch[1]) if loss is None else loss(net, batch))
        stepper.step()
    return parameters_of(net, prefix="net.")


def parameters_of(module: nn.Module, prefix: str = "") -> dict[str, Tensor]:
    """Copies of the parameters by name."""
    return {prefix + name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def state_of(module: nn.Module) -> dict[str, Tensor]:
    """Copies of parameters and buffers by name."""
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
