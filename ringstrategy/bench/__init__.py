"""Measurements: the all-reduce against the backend's own, and training steps against Lightning's ``ddp``."""

from __future__ import annotations

__all__ = ["BenchError"]


class BenchError(RuntimeError):
    """A measurement could not be made; the message says what happened and what to do."""
