"""The pages on compatibility say what the tests show, and no more."""

from __future__ import annotations

import pytest

from tests.helpers.features import PAGES, Page

_TESTS = {page: list(page.documented()) for page in PAGES}  # here, as it imports Lightning, which sets variables


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.path.name)
def test_every_feature_test_has_its_row(page: Page) -> None:
    """Symptom: a feature is tested and nobody knows."""
    assert _TESTS[page]
    assert [test.__qualname__ for test, rows in _TESTS[page] if not rows] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.path.name)
def test_the_table_names_what_was_run(page: Page) -> None:
    """Symptom: the page promises what no test shows any more."""
    assert page.path.read_text() == page.text(), "out of date; write it with `python -m tests.helpers.features`"
