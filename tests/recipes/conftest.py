"""The recipes are a folder of scripts; their tests import them as ``ringstrategy run`` does."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from ringstrategy.cli.recipes import add_recipes_to_path

add_recipes_to_path()


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    """Networks this small are slower on more threads, above all beside other work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
