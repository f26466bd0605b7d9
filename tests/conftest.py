"""What holds for every run of the tests: a busy machine is no failure, and a test that is skipped says why.

Two environment variables, both set by `.ci/run`. MINIDL_SKIPPED=FILE: the ids of the skipped tests are written there,
one a line, so that `pytest @FILE` runs them where more is installed. MINIDL_ALL_EXTRAS=1: every extra is installed, so
a skipped test is a failure, unless it is marked `gpu` or `may_skip`.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("minidl", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("minidl")

ALL_EXTRAS = os.environ.get("MINIDL_ALL_EXTRAS") == "1"


@pytest.fixture(scope="session", autouse=True)
def _choices_of_kernels_are_those_of_a_run() -> Iterator[None]:
    """Not the user's; in a run of the tests all devices make the same."""
    if "MINIDL_CACHE" in os.environ:
        yield
        return
    os.environ["MINIDL_CACHE"] = tempfile.mkdtemp(prefix="minidl-tests-")
    yield
    shutil.rmtree(os.environ.pop("MINIDL_CACHE"), ignore_errors=True)


@pytest.fixture(autouse=True)
def _devices_that_are_not_there_go() -> Iterator[None]:
    """Each has a hundred megabytes; the driver knows the kernels that it loaded, and is kept by them."""
    yield
    device = sys.modules.get("minidl.runtime.cuda.device")
    made = [number for number in device._devices if number < 0] if device else []
    if made:
        for number in made:
            del device._devices[number]
        sys.modules["minidl.runtime.cuda.driver"].Driver._function.cache_clear()


@pytest.fixture(params=["native", "python"])
def both_lanes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The test runs on native lanes, if this machine has them, and on Python lanes."""
    from minidl.runtime.device import no_native_lanes

    kind = str(request.param)
    if kind == "native" and no_native_lanes():
        pytest.skip(no_native_lanes())
    monkeypatch.setenv("MINIDL_LANES", kind)
    return kind


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: Any) -> Iterator[Any]:
    if item.get_closest_marker("gpu") is None and not os.environ.get("MINIDL_TEST_GPU"):
        return (yield)
    from cuda_on_gpu import watched

    with watched(item.nodeid):
        return (yield)


# ---------------------------------------------------------------------------------------------------------------- skips
def _reason(report: Any) -> str:
    return str(report.longrepr[2]).removeprefix("Skipped: ")


def _fail_where_nothing_may_lack(report: Any) -> None:
    if ALL_EXTRAS and report.outcome == "skipped" and not hasattr(report, "wasxfail"):
        report.outcome, report.longrepr = "failed", f"skipped although MINIDL_ALL_EXTRAS=1: {_reason(report)}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: Any) -> Iterator[Any]:
    report = yield
    if not any(item.get_closest_marker(name) for name in ("gpu", "may_skip")):
        _fail_where_nothing_may_lack(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Iterator[Any]:
    report = yield
    _fail_where_nothing_may_lack(report)  # a whole file, which no mark excuses
    return report


def pytest_terminal_summary(terminalreporter: Any) -> None:
    skipped = {report.nodeid: _reason(report) for report in terminalreporter.stats.get("skipped", [])}
    for reason, count in Counter(skipped.values()).most_common():
        terminalreporter.write_line(f"{count} skipped: {reason}")
    if path := os.environ.get("MINIDL_SKIPPED"):
        Path(path).write_text("".join(f"{name}\n" for name in skipped))
