"""Measurements against what there is: the backend's all-reduce, Lightning's ``ddp``, torch's pipelines."""

from __future__ import annotations

__all__ = ["BenchError"]


class BenchError(RuntimeError):
    """A measurement could not be made; the message says what happened and what to do."""
