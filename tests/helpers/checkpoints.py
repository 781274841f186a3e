"""Checkpoints that know whether they are whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

__all__ = ["checkpoint_of", "unfinished_in", "version_at"]


def checkpoint_of(version: int, elements: int = 1000) -> dict[str, Any]:
    """A checkpoint with four tensors of ``elements`` float32 that all hold its version."""
    return {"state_dict": {name: torch.full((elements,), float(version)) for name in "abcd"}, "version": version}


def version_at(path: Path) -> int:
    """Which checkpoint a file holds; fails if it holds a mixture or half of one."""
    checkpoint = torch.load(path, weights_only=True)
    version: int = checkpoint["version"]
    assert all((tensor == version).all() for tensor in checkpoint["state_dict"].values())
    return version


def unfinished_in(folder: Path) -> list[Path]:
    """What an interrupted save left in a folder."""
    return sorted(folder.glob(".*.tmp"))
