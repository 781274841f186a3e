"""Ranks on two hosts that are there already, which costs a fraction of a launch."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from ringstrategy import RingDDPStrategy
from ringstrategy.communication import Communication
from tests.helpers.host_script import OnHosts, Options, strategy_of
from tests.helpers.hosts import TwoHosts, enter
from tests.helpers.models import parameters_of
from tests.helpers.trainers import trainer_on_rank

__all__ = ["PER_HOST", "Trained", "train_on_hosts"]

PER_HOST = 2


class Trained(NamedTuple):
    """A rank after training: its parameters by name, what averaging cost, and how gradients travelled."""

    parameters: dict[str, Tensor]
    communication: Communication
    collective: str


def train_on_hosts(rank: int, world_size: int, hosts: TwoHosts, folder: Path, options: Options) -> Trained:
    """Train on a rank of :func:`tests.helpers.ranks.run_ranks`, which has formed no process group yet.

    Args:
        rank: this rank; the first two are on the first host.
        world_size: number of ranks.
        hosts: the hosts.
        folder: where the ranks meet.
        options: of the training.
    """
    enter(hosts, rank // PER_HOST)
    meeting = (folder / "meeting").as_uri()
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world_size, timeout=timedelta(minutes=1))
    module, strategy = OnHosts(options), strategy_of(options)
    names: list[str] = []
    module.on_train_batch_end = lambda *_: names.append(collective_of(strategy))  # type: ignore[method-assign]
    trainer_on_rank(rank, world_size, strategy=strategy).fit(module)
    return Trained(parameters_of(module), strategy.communication, names[0])


def collective_of(strategy: RingDDPStrategy) -> str:
    """How gradients travel, while training."""
    assert strategy._collective is not None
    return strategy._collective.name
