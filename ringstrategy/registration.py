"""Names for ``Trainer(strategy=...)``."""

from __future__ import annotations

import sys
from typing import Any, NoReturn

from lightning.pytorch.strategies import StrategyRegistry

from ringstrategy.strategies.ring_ddp import RingDDPStrategy

__all__ = ["register"]

# Every name of `ddp` has its counterpart, so that a change of one string never fails.
_START_METHODS = {"ring_ddp": "popen", "ring_ddp_spawn": "spawn", "ring_ddp_fork": "fork", "ring_ddp_notebook": "fork"}
_OTHER_FLAVOUR = "pytorch_lightning"


def register() -> None:
    """Register the strategies with Lightning. Idempotent."""
    for name, arguments in _names().items():
        StrategyRegistry.register(
            name,
            RingDDPStrategy,
            description=f"Ring all-reduce data-parallel strategy with `start_method` '{arguments['start_method']}'",
            override=True,
            **arguments,
        )
    if _OTHER_FLAVOUR in sys.modules:
        # Its classes are not those of `lightning`; a name that explains beats "invalid strategy name".
        registry = sys.modules[_OTHER_FLAVOUR].strategies.StrategyRegistry
        for name in _names():
            registry.register(name, _WrongFlavour, description="only for `lightning.pytorch`", override=True)


def _names() -> dict[str, dict[str, Any]]:
    names: dict[str, dict[str, Any]] = {}
    for name, start_method in _START_METHODS.items():
        names[name] = {"start_method": start_method}
        for find_unused in (False, True):
            names[f"{name}_find_unused_parameters_{str(find_unused).lower()}"] = {
                "start_method": start_method,
                "find_unused_parameters": find_unused,
            }
    return names


class _WrongFlavour:
    """What the registry of the other package answers."""

    def __init__(self) -> NoReturn:
        raise ImportError(
            "ringstrategy works with `import lightning.pytorch as pl`, but this program imports `pytorch_lightning`, "
            "whose classes are different ones. Change the import (the package `lightning` contains all of it)."
        )
