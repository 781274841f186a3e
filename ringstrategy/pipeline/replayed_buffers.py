"""Buffers that a forward changes, for a forward that is run a second time.

The power iteration of ``spectral_norm`` or a counter moves with every micro-batch. When one is computed again for its
backward, it has to find what it found the first time, and to leave behind what all of them have left:

    forward     b0 ─ F0 ─▶ b1 ─ F1 ─▶ b2 ─ F2 ─▶ b3
    backward                                      │   B2    B1, on b1    B0, on b0   │
                                                  └──────────────────────────────────┴─▶ b3
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import NamedTuple, TypeAlias

from torch import Tensor, nn

__all__ = ["ReplayedBuffers", "Snapshot"]


class _Place(NamedTuple):
    """A buffer of a module."""

    module: nn.Module
    name: str

    @property
    def value(self) -> Tensor | None:
        return self.module._buffers.get(self.name)


Snapshot: TypeAlias = dict[_Place, Tensor | None]


class ReplayedBuffers:
    """The buffers that a stage's forward may change.

    The first forward shows which of them do; copies are made of these alone from then on. One that begins to change
    later is found then, one micro-batch too late.

    Args:
        root: of the names.
        modules: names of modules that the forward calls.
        buffers: full names of buffers that it uses besides.
    """

    def __init__(self, root: nn.Module, modules: Iterable[str], buffers: Iterable[str]) -> None:
        called = dict.fromkeys(child for name in modules for child in root.get_submodule(name).modules())
        places = [_Place(child, name) for child in called for name in child._buffers]
        for full_name in buffers:
            owner, _, name = full_name.rpartition(".")
            places.append(_Place(root.get_submodule(owner), name))
        self._all = tuple(dict.fromkeys(places))
        self._changing: tuple[_Place, ...] | None = None

    @contextlib.contextmanager
    def first(self) -> Iterator[Snapshot]:
        """Around the forward of a micro-batch that will be computed again.

        Yields:
            What the buffers were before; complete when the forward is done.
        """
        snapshot = _copies({place: place.value for place in (self._all if self._changing is None else self._changing)})
        before = [(place, place.value, _version(place.value)) for place in self._all]
        yield snapshot
        changed = [place for place, value, version in before if place.value is not value or _version(value) != version]
        self._changing = tuple(dict.fromkeys((*(self._changing or ()), *changed)))
        for place in snapshot.keys() - self._changing:
            del snapshot[place]

    @contextlib.contextmanager
    def again(self, snapshot: Snapshot) -> Iterator[None]:
        """Around its second forward: the buffers are as before the first, and afterwards as they are now."""
        now = {place: place.value for place in snapshot}
        # Others, not other values: what a graph has saved of the present ones stays. Copies, for a third forward.
        _set(_copies(snapshot))
        try:
            yield
        finally:
            _set(now)


def _copies(values: Snapshot) -> Snapshot:
    copies: dict[int, Tensor] = {}  # what has two names has one copy
    return {
        place: None if value is None else copies.setdefault(id(value), value.detach().clone())
        for place, value in values.items()
    }


def _set(values: Snapshot) -> None:
    for place, value in values.items():
        place.module._buffers[place.name] = value


def _version(value: Tensor | None) -> int:
    return 0 if value is None or value.is_inference() else value._version
