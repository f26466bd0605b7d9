"""A browser, and a tab with the playground."""

from __future__ import annotations

import pytest
from browser import browser, opened


@pytest.fixture(scope="module")
def chromium():
    with browser() as running:
        yield running


@pytest.fixture
def tab(chromium):
    from playground import PAGE

    with opened(chromium, PAGE, ready="window.playground") as found:
        yield found
