"""Guards around every test."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from tests.helpers.guards import Snapshot, leaks_since


def pytest_configure() -> None:
    """Scripts under test must hear SIGINT, which a shell that starts pytest in the background has them ignore."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    """No process, thread, socket, shared memory, variable or process group outlives a test."""
    before = Snapshot.take()
    yield
    leaks = leaks_since(before)
    assert not leaks, "the test left behind: " + "; ".join(leaks)
