"""A real browser for tests of pages: Chromium without a window, driven by Playwright."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from helpers import PATIENCE, need

NAMES = ("chromium", "chromium-browser", "google-chrome")


@contextmanager
def browser() -> Iterator[Any]:
    """The browser, or the test is skipped and says what to install."""
    api = need("playwright.sync_api")
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip("no browser was found; install Debian's package chromium")
    with api.sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"], timeout=1000 * PATIENCE)
        try:
            yield running
        finally:
            running.close()


def until(tab: Any, true: str, arg: object = None) -> None:
    """Wait until this expression or function of JavaScript is true.

    It asks by a clock: a browser on a busy machine may stop drawing, and then Playwright's own way, which asks before
    each picture, asks never.
    """
    tab.wait_for_function(true, arg=arg, polling=50)


@contextmanager
def opened(running: Any, path: Path, *, dark: bool = False, ready: str = "true", width: int = 1280,
           fragment: str = "") -> Iterator[Any]:
    """A tab with this file. It asks for nothing else, and its script reports no error: else an AssertionError.

    `ready`: an expression of JavaScript for which the test waits. `width`: of the window; below 500 pixels it is a
    phone's, with touch. `fragment`: of the address, with its `#`.
    """
    wrong: list[str] = []
    context = running.new_context(color_scheme="dark" if dark else "light", viewport={"width": width, "height": 900},
                                  has_touch=width < 500)
    context.set_default_timeout(1000 * PATIENCE)
    try:
        tab = context.new_page()
        tab.on("pageerror", lambda error: wrong.append(str(error)))
        tab.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
        tab.on("request", lambda asked: None if asked.url.split("#")[0] == path.as_uri() else wrong.append(asked.url))
        tab.goto(path.as_uri() + fragment)
        try:
            until(tab, ready)
        except Exception as error:
            raise AssertionError(f"{path.name}{fragment} is not ready; its script says {wrong or 'nothing'}") from error
        yield tab
        assert not wrong, wrong
    finally:
        context.close()
