"""Names for ``Trainer(strategy=...)``."""

from __future__ import annotations

import sys
from typing import Any, NoReturn

from lightning.pytorch.strategies import StrategyRegistry

from ringstrategy.strategies.pipeline import PipelineStrategy
from ringstrategy.strategies.ring_ddp import RingDDPStrategy

__all__ = ["register"]

# Every name of `ddp` has its counterpart, so that a change of one string never fails.
_START_METHODS = {"": "popen", "_spawn": "spawn", "_fork": "fork", "_notebook": "fork"}
_SCHEDULES = {"gpipe": "gpipe", "pipeline_1f1b": "1f1b"}
_OTHER_FLAVOUR = "pytorch_lightning"


def register() -> None:
    """Register the strategies with Lightning. Idempotent."""
    for name, (strategy, arguments) in _names().items():
        described = ", ".join(f"`{key}={value!r}`" for key, value in arguments.items())
        StrategyRegistry.register(
            name, strategy, description=f"{strategy.__name__} with {described}", override=True, **arguments
        )
    other = sys.modules.get(_OTHER_FLAVOUR)
    if other is not None and (registry := other.strategies.StrategyRegistry) is not StrategyRegistry:
        # Its classes are not those of `lightning`; a name that explains beats "invalid strategy name".
        for name in _names():
            registry.register(name, _WrongFlavour, description="only for `lightning.pytorch`", override=True)


def _names() -> dict[str, tuple[type[RingDDPStrategy], dict[str, Any]]]:
    names: dict[str, tuple[type[RingDDPStrategy], dict[str, Any]]] = {}
    for suffix, start_method in _START_METHODS.items():
        names[f"ring_ddp{suffix}"] = RingDDPStrategy, {"start_method": start_method}
        for find_unused in (False, True):
            names[f"ring_ddp{suffix}_find_unused_parameters_{str(find_unused).lower()}"] = (
                RingDDPStrategy,
                {"start_method": start_method, "find_unused_parameters": find_unused},
            )
        for name, schedule in _SCHEDULES.items():
            names[f"{name}{suffix}"] = PipelineStrategy, {"start_method": start_method, "schedule": schedule}
    return names


class _WrongFlavour:
    """What the registry of the other package answers."""

    def __init__(self) -> NoReturn:
        raise ImportError(
            "ringstrategy works with `import lightning.pytorch as pl`, but this program imports `pytorch_lightning`, "
            "whose classes are different ones. Change the import (the package `lightning` contains all of it), or "
            "start the program by `python -m ringstrategy`, under which both names are the same."
        )
