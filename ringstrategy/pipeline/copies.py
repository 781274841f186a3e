"""Copies of the module that callbacks keep, averages of its weights above all: cut like the module itself.

Lightning's callbacks copy the module while it is whole, and average, swap and save the copy later, parameter by
parameter. So every stage's copy has to let go of the same layers, be whole for whoever reads its ``state_dict()``, and
be whole again when training ends.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import lightning.pytorch as pl
from torch import Tensor, nn

from ringstrategy.pipeline.channels import Channel
from ringstrategy.pipeline.placement import Placement
from ringstrategy.pipeline.stand_in import StandIn
from ringstrategy.pipeline.state import gather_state_dict, make_whole

__all__ = ["CopyOfModule", "copies_in"]


def copies_in(callbacks: Iterable[pl.Callback], module: nn.Module) -> list[nn.Module]:
    """The copies of a module that callbacks have as attributes, or wrapped in one (torch's ``AveragedModel``).

    Args:
        callbacks: all of them.
        module: the original.
    """
    own = set(module.modules())
    kept = (value for callback in callbacks for value in vars(callback).values() if isinstance(value, nn.Module))
    found = (child for value in kept if value not in own for child in value.modules())
    return list(dict.fromkeys(child for child in found if type(child) is type(module) and child not in own))


class CopyOfModule:
    """A copy of a pipelined module, as one stage holds it.

    Args:
        copy: the copy; it is whole.
        owners: as for :class:`~ringstrategy.pipeline.placement.Placement` of the original.
        stage: this one.
        channels: to the other stages.
        reachable: whether the other stages can be asked for what they hold.
    """

    def __init__(
        self,
        copy: nn.Module,
        owners: Mapping[str, frozenset[int]],
        stage: int,
        channels: Mapping[int, Channel],
        reachable: Callable[[], bool],
    ) -> None:
        self._channels = channels
        self._reachable = reachable
        self._placement = Placement(copy, owners, stage)
        self._placement.leave()
        self._methods = StandIn(copy, "state_dict", self._state_dict), StandIn(copy, "_apply", self._apply)

    def make_whole(self, to: int | None) -> None:
        """Give absent parameters and buffers their values. Collective.

        Args:
            to: the only stage whose copy becomes whole; None for all stages.
        """
        make_whole(self._placement, self._channels, to=to)

    def release(self) -> None:
        """Leave the copy to itself."""
        for method in self._methods:
            method.remove()

    def _state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Its ordinary state dict on the first stage, also where it is part of another's. Collective."""
        own = self._methods[0].own
        if not self._reachable():
            return own(*args, **kwargs)
        destination, prefix = kwargs.pop("destination", None), kwargs.pop("prefix", "")
        state: Any = gather_state_dict(self._placement, self._channels, read=functools.partial(own, *args, **kwargs))
        if destination is None:
            return state
        destination.update({prefix + name: value for name, value in state.items()})
        versions = {(prefix + name).rstrip("."): version for name, version in state._metadata.items()}
        destination._metadata.update(versions)
        return destination

    def _apply(self, function: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """What ``.to(device)`` does; absent tensors stay absent."""
        return self._methods[1].own(lambda tensor: tensor if tensor.is_meta else function(tensor), recurse)
