"""``import pytorch_lightning`` gets ``lightning.pytorch``, so that a program of either kind finds the strategies.

The two packages are one source under two names, but their classes are different ones: a Trainer of the one refuses a
strategy or a module of the other.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from typing_extensions import override

__all__ = ["install"]

_SAME = {"pytorch_lightning": "lightning.pytorch", "lightning_fabric": "lightning.fabric"}


def install() -> None:
    """From here on both names are the same modules. Idempotent."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder, Loader):
    """Finds modules of the one name, and takes those of the other."""

    @override
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        same = _same(fullname)
        if same is None or importlib.util.find_spec(same) is None:
            return None
        return ModuleSpec(fullname, self)

    @override
    def exec_module(self, module: ModuleType) -> None:
        same = _same(module.__name__)
        assert same is not None
        sys.modules[module.__name__] = importlib.import_module(same)  # the import returns what it finds there


def _same(name: str) -> str | None:
    package, dot, rest = name.partition(".")
    return _SAME[package] + dot + rest if package in _SAME else None
