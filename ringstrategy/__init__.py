"""Strategies for PyTorch Lightning: data-parallel with a bucketed ring all-reduce, and one model over several ranks.

Importing the package registers them: ``Trainer(strategy="ring_ddp")``, ``Trainer(strategy="gpipe")``.
"""

from typing import TYPE_CHECKING, Any

from ringstrategy.checkpoint import AtomicCheckpointIO
from ringstrategy.failure import RankFailure
from ringstrategy.registration import register
from ringstrategy.strategies.pipeline import PipelineStrategy
from ringstrategy.strategies.ring_ddp import RingDDPStrategy

if TYPE_CHECKING:
    from ringstrategy.monitor.ring_monitor import RingMonitor

__all__ = ["AtomicCheckpointIO", "PipelineStrategy", "RankFailure", "RingDDPStrategy", "RingMonitor"]
__version__ = "0.1.0"

register()


def __getattr__(name: str) -> Any:
    if name == "RingMonitor":  # imported when somebody wants it
        from ringstrategy.monitor.ring_monitor import RingMonitor

        return RingMonitor
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
