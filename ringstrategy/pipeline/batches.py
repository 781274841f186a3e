"""The same batch on every stage: the first stage's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.utils._pytree as pytree

from ringstrategy.pipeline.channels import Channel

__all__ = ["same_batch"]

_TAG = "batch"


def same_batch(batch: Any, channels: Mapping[int, Channel], stage: int) -> Any:
    """Give the first stage's batch to every stage. Collective.

    Random augmentation and shuffling may have made another batch on every stage, and all stages must compute the same
    loss. It costs one message to every other stage, in which tensors travel as they are.

    Args:
        batch: this stage's; a tree of tensors and Python values.
        channels: to the other stages.
        stage: this one.

    Returns:
        The first stage's own object there, a copy of it elsewhere.
    """
    if stage == 0:
        leaves, structure = pytree.tree_flatten(batch)
        for channel in channels.values():
            channel.send([structure, *leaves], _TAG)
        return batch
    structure, *leaves = channels[0].receive(_TAG)
    return pytree.tree_unflatten(leaves, structure)
