"""Keeping buffers (running statistics and the like) equal on all ranks, at the price of few messages."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from ringstrategy.process_group import RankGroup

__all__ = ["BufferSync"]


class BufferSync:
    """Gives rank 0's buffers to all ranks where somebody reads them.

    torch's DDP does so before every forward. But nothing reads the running statistics of a normalisation layer that
    trains: the batch's own are used. So these wait for the next evaluation, with the same outcome. All other buffers
    are sent before every training forward, as DDP does.

    Args:
        group: the ranks.
    """

    def __init__(self, group: RankGroup) -> None:
        self._group = group
        self._owners: list[nn.Module] = []  # the modules with buffers; walking over all costs too much in every step

    def watch(self, module: nn.Module) -> None:
        """Note which modules have buffers, as :meth:`send_all` does."""
        self._owners = [child for child in module.modules() if any(True for _ in child.buffers(recurse=False))]

    def send_all(self, module: nn.Module, src: int = 0) -> None:
        """Send every buffer: before training, before an evaluation, and when training ends. Collective.

        Args:
            module: whose buffers they are.
            src: the place in the group of the rank that has them; not 0 where that one has run out of data.
        """
        self.watch(module)
        self._group.broadcast_tensors(self._buffers(also_statistics=True), src)

    def before_training_step(self, src: int = 0) -> None:
        """Send what the coming forward may read, of the modules that had buffers at the last `watch`. Collective."""
        self._group.broadcast_tensors(self._buffers(also_statistics=False), src)

    def _buffers(self, *, also_statistics: bool) -> Iterator[Tensor]:
        seen: set[int] = set()
        for child in self._owners:
            if not also_statistics and isinstance(child, _NormBase) and child.training:
                continue
            for buffer in child.buffers(recurse=False):
                if id(buffer) not in seen and not buffer.is_meta:
                    seen.add(id(buffer))
                    yield buffer
