"""What a run of the tests says at its end: how many of them need a GPU that is not here. And what lies around those on one."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings

settings.register_profile("minidl", deadline=None)  # a busy machine is no failure
settings.load_profile("minidl")


@pytest.fixture(autouse=True)
def _devices_that_are_not_there_go() -> Iterator[None]:
    """Each has a hundred megabytes; the driver knows the kernels that it loaded, and is kept by them."""
    yield
    device = sys.modules.get("minidl.cuda.device")
    made = [number for number in device._devices if number < 0] if device else []
    if made:
        for number in made:
            del device._devices[number]
        sys.modules["minidl.cuda.driver"].Driver._function.cache_clear()


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
