"""What a run of the tests says at its end: how many of them need a GPU that is not here. And what lies around those on one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: Any) -> Iterator[Any]:
    if item.get_closest_marker("gpu") is None and not os.environ.get("MINIDL_TEST_GPU"):
        return (yield)
    from cuda_on_gpu import watched

    with watched(item.nodeid):
        return (yield)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    skipped = [r for r in terminalreporter.stats.get("skipped", []) if "gpu" in r.keywords]
    if skipped:
        terminalreporter.write_line(f"{len(skipped)} gpu tests skipped: {skipped[0].longrepr[2].removeprefix('Skipped: ')}")
