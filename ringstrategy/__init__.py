"""Data-parallel strategies for PyTorch Lightning with a bucketed ring all-reduce.

Importing the package registers its strategies: ``Trainer(strategy="ring_ddp")``.
"""

from ringstrategy.checkpoint import AtomicCheckpointIO
from ringstrategy.failure import RankFailure
from ringstrategy.registration import register
from ringstrategy.strategies.ring_ddp import RingDDPStrategy

__all__ = ["AtomicCheckpointIO", "RankFailure", "RingDDPStrategy"]
__version__ = "0.1.0"

register()
