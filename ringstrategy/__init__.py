"""Strategies for PyTorch Lightning: data-parallel with a bucketed ring all-reduce, and one model over several ranks.

Importing the package registers them: ``Trainer(strategy="ring_ddp")``, ``Trainer(strategy="gpipe")``.
"""

from ringstrategy.checkpoint import AtomicCheckpointIO
from ringstrategy.failure import RankFailure
from ringstrategy.registration import register
from ringstrategy.strategies.pipeline import PipelineStrategy
from ringstrategy.strategies.ring_ddp import RingDDPStrategy

__all__ = ["AtomicCheckpointIO", "PipelineStrategy", "RankFailure", "RingDDPStrategy"]
__version__ = "0.1.0"

register()
