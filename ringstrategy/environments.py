"""Ranks that a platform has numbered already."""

from __future__ import annotations

import os

from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.fabric.utilities import rank_zero_info

__all__ = ["as_numbered"]

_NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_NODE = ("NODE_RANK", "GROUP_RANK")


def as_numbered(environment: ClusterEnvironment | None) -> ClusterEnvironment | None:
    """Take the ranks from the variables that torch documents, where a platform sets these and no others.

    Lightning's own environment counts ranks from ``NODE_RANK``, and takes every node for the first without it: two
    hosts would both have a rank 0.

    Args:
        environment: what Lightning has chosen.

    Returns:
        The same, or one that reads ``RANK``, ``WORLD_SIZE`` and ``LOCAL_RANK``.
    """
    numbered = all(name in os.environ for name in _NUMBERS) and not any(name in os.environ for name in _NODE)
    if type(environment) is not LightningEnvironment or not numbered:
        return environment
    rank_zero_info(
        "ringstrategy: this process is started by a platform that sets RANK, WORLD_SIZE and LOCAL_RANK but no "
        "NODE_RANK; ranks are numbered as these say."
    )
    return TorchElasticEnvironment()
