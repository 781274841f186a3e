"""Guards around every test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.guards import Snapshot, leaks_since


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    """No process, thread, socket, shared memory, variable or process group outlives a test."""
    before = Snapshot.take()
    yield
    leaks = leaks_since(before)
    assert not leaks, "the test left behind: " + "; ".join(leaks)
