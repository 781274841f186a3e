"""The page on compatibility says what the tests show, and no more."""

from __future__ import annotations

from tests.helpers.features import TABLE, documented, table

_TESTS = list(documented())  # here and not in a test, as it imports Lightning, which sets variables


def test_every_feature_test_has_its_row() -> None:
    """Symptom: a feature is tested and nobody knows."""
    assert _TESTS
    assert [test.__qualname__ for test, rows in _TESTS if not rows] == []


def test_the_table_names_what_was_run() -> None:
    """Symptom: the page promises what no test shows any more."""
    assert TABLE.read_text() == table(), "out of date; write it with `python -m tests.helpers.features`"
