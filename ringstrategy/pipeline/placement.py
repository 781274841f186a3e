"""Which stages hold which parameters and buffers; a stage's module without those of the others.

The layers of other stages stay in the module, so that classes, names and optimizer indices are those of the whole
model. Only their tensors lose their memory (meta tensors have a shape and a dtype, but no data):

                        stage 0     stage 1     stage 2
    net.0.weight        ███████     ░░░░░░░     ░░░░░░░       ███  held
    net.1.running_mean  ███████     ░░░░░░░     ░░░░░░░       ░░░  absent: on the meta device
    net.2.weight        ░░░░░░░     ███████     ░░░░░░░
    net.3.weight        ███████     ░░░░░░░     ███████       tied to another layer's: held by the stages of both
    scale               ███████     ███████     ███████       outside the pipelined module
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ringstrategy.pipeline.absent import check_exchangeable, exchange, give_memory, take_memory

__all__ = ["Part", "Placement"]


@dataclass(frozen=True, eq=False)
class Part:
    """One parameter or buffer, under all its names.

    Attributes:
        names: where it is registered; the first comes first in the module.
        stages: that hold it.
        slots: modules that register it, and their names for it.
    """

    names: tuple[str, ...]
    stages: frozenset[int]
    slots: tuple[tuple[nn.Module, str], ...] = field(repr=False)

    @property
    def name(self) -> str:
        """Its first name."""
        return self.names[0]

    @property
    def sender(self) -> int:
        """The stage that gives it to others; of several that hold it, the one that counts it."""
        return min(self.stages)

    @property
    def tensor(self) -> Tensor | None:
        """What is registered now; a buffer may be None."""
        module, key = self.slots[0]
        tensor: Tensor | None = _registry(module, key)[key]
        return tensor

    @property
    def modules(self) -> list[nn.Module]:
        """The modules that register it."""
        return [module for module, _ in self.slots]

    def register(self, tensor: Tensor | None) -> None:
        """Put another tensor in its place, under all its names."""
        for module, key in self.slots:
            _registry(module, key)[key] = tensor

    def fill(self, value: Tensor | None) -> None:
        """Give it a value where it is absent. A parameter keeps its identity, hooks and ``requires_grad``.

        Args:
            value: becomes its memory; None for a buffer that is None where it is held.
        """
        tensor = self.tensor
        if isinstance(tensor, nn.Parameter) and value is not None:
            give_memory(tensor, self.modules, value)
        else:
            self.register(value)


class Placement:
    """Where the parameters and buffers of a module live, seen from one stage.

    It suits any module of the same structure: a deep copy, made before or after the original's :meth:`leave`, gets a
    placement of its own.

    Args:
        module: the LightningModule, or a copy of it.
        owners: by full name of a parameter or buffer, the stages that hold it. A tensor with several names is held by
            the stages of all those that are mentioned; one of which no name is mentioned is held by all stages.
        stage: this stage.

    Attributes:
        module: the module.
        stage: this stage.
        parts: what is mentioned in ``owners``, in the module's order: the same on all stages.

    Raises:
        ValueError: ``owners`` mentions names that the module does not have, or a tensor that no stage holds.
    """

    def __init__(self, module: nn.Module, owners: Mapping[str, frozenset[int]], stage: int) -> None:
        self.module = module
        self.stage = stage
        self.parts = tuple(_parts(module, owners))
        self._by_name = {name: part for part in self.parts for name in part.names}
        # Strong references: torch refuses to exchange the content of a tensor to which there are weak ones.
        self._by_parameter: dict[Tensor, Part] = {
            part.tensor: part for part in self.parts if isinstance(part.tensor, nn.Parameter)
        }

    @property
    def absent(self) -> list[Part]:
        """What other stages hold, and this one does not."""
        return [part for part in self.parts if self.stage not in part.stages]

    def holds(self, name: str) -> bool:
        """Whether this stage holds the parameter or buffer of that name."""
        part = self._by_name.get(name)
        return part is None or self.stage in part.stages

    def part_of(self, parameter: Tensor) -> Part | None:
        """What is known of a parameter, found by identity; None if all stages hold it."""
        return self._by_parameter.get(parameter)

    def is_absent(self, parameter: Tensor) -> bool:
        """Whether other stages hold a parameter, and this one does not."""
        part = self.part_of(parameter)
        return part is not None and self.stage not in part.stages

    @torch.inference_mode(mode=False)
    def leave(self) -> None:
        """Move the absent parameters and buffers to the meta device, and drop their gradients.

        Parameters keep their identity, so that optimizers do not notice; also their hooks, attributes and
        ``requires_grad``. What is on the meta device stays there.

        Raises:
            RuntimeError: somebody else uses a parameter's memory, or this stage has no values for what it is to hold.
                The module is as it was.
            TypeError: a parameter that cannot be moved.
        """
        absent = self.absent
        self._check(absent)
        taken: list[tuple[Part, Tensor]] = []
        try:
            for part in absent:
                if part.tensor is not None and not part.tensor.is_meta:
                    taken.append((part, self._take(part, part.tensor)))
        except BaseException:
            for part, before in taken:
                if isinstance(part.tensor, nn.Parameter):
                    exchange(part.tensor, before, part.modules)
                else:
                    part.register(before)
            raise

    def _take(self, part: Part, tensor: Tensor) -> Tensor:
        if isinstance(tensor, nn.Parameter):
            holders = " and ".join(map(str, sorted(part.stages)))
            absence = f"Stage {self.stage} does not hold parameter '{part.name}' (stage {holders} does)"
            return take_memory(tensor, part.modules, absence)
        # Unlike parameters, buffers are found by name: another tensor will do, whoever has views of this one.
        part.register(torch.empty_like(tensor, device="meta"))
        return tensor

    def _check(self, absent: list[Part]) -> None:
        for part in absent:
            if isinstance(part.tensor, nn.Parameter):
                check_exchangeable(part.tensor, part.name)
        for part in self.parts:
            if part.tensor is not None and part.tensor.is_meta and self.stage in part.stages:
                raise RuntimeError(
                    f"Stage {self.stage} is to hold '{part.name}', but has no values for it: it is on the meta device. "
                    "Load it, or make the module whole on all stages after the fit before, not on the first alone."
                )


def _parts(module: nn.Module, owners: Mapping[str, frozenset[int]]) -> Iterator[Part]:
    names: dict[int | str, list[str]] = {}
    slots: dict[int | str, list[tuple[nn.Module, str]]] = {}
    for prefix, child in module.named_modules(remove_duplicate=False):
        for key, tensor in (*child._parameters.items(), *child._buffers.items()):
            name = f"{prefix}.{key}" if prefix else key
            identity = name if tensor is None else id(tensor)
            names.setdefault(identity, []).append(name)
            slots.setdefault(identity, []).append((child, key))
    if unknown := sorted(owners.keys() - {name for several in names.values() for name in several}):
        raise ValueError(f"{type(module).__name__} has no parameter or buffer named {', '.join(map(repr, unknown))}.")
    for identity, several in names.items():
        if mentioned := [name for name in several if name in owners]:
            stages = frozenset[int]().union(*(owners[name] for name in mentioned))
            if not stages:
                raise ValueError(f"No stage holds '{mentioned[0]}'.")
            yield Part(tuple(several), stages, tuple(slots[identity]))


def _registry(module: nn.Module, key: str) -> dict[str, Any]:
    return module._parameters if key in module._parameters else module._buffers
