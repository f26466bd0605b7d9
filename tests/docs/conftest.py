"""A browser, and tabs with the playground."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
from browser import browser, opened


@pytest.fixture(scope="module")
def chromium():
    with browser() as running:
        yield running


@contextmanager
def playground(running):
    from playground import PAGE

    with opened(running, PAGE, ready="window.playground") as found:
        yield found


@pytest.fixture
def tab(chromium):
    with playground(chromium) as found:
        yield found


@pytest.fixture(scope="module")
def still(chromium):
    """A tab that tests only ask, so that they share it."""
    with playground(chromium) as found:
        yield found
