"""Rules for every run of the tests: a busy machine is no failure, a skipped test says why, and the default run draws
nothing at random.

Three environment variables, all set by `.ci/run`. MINIDL_SKIPPED=FILE: the ids of the skipped tests are written there,
one a line, so that `pytest @FILE` runs them where more is installed. MINIDL_ALL_EXTRAS=1: every extra is installed, so
a skipped test is a failure, unless it is marked `gpu` or `may_skip`. MINIDL_EXAMPLES=all: hypothesis draws
as many examples as each test states, not a tenth of them; MINIDL_EXAMPLES=new: other ones each time.
"""

from __future__ import annotations

import gc
import os
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from traces import no_trace, own_folder

settings.register_profile("minidl", deadline=None, derandomize=os.environ.get("MINIDL_EXAMPLES") != "new",
                          max_examples=100 if "MINIDL_EXAMPLES" in os.environ else 10,
                          suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("minidl")

# or each program that a test starts compiles all modules again, and each worker all assertions
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

ALL_EXTRAS = os.environ.get("MINIDL_ALL_EXTRAS") == "1"


@pytest.fixture(scope="session", autouse=True)
def _choices_of_kernels_are_those_of_a_run() -> Iterator[None]:
    """Not the user's; in a run of the tests all devices make the same."""
    if "MINIDL_CACHE" in os.environ:
        yield
        return
    os.environ["MINIDL_CACHE"] = own_folder()
    yield
    shutil.rmtree(os.environ.pop("MINIDL_CACHE"), ignore_errors=True)


def _let_devices_go() -> None:
    """Those that are not there have a hundred megabytes each; the driver knows the kernels that it loaded, and is kept
    by them."""
    device, driver = (sys.modules.get(f"minidl.devices.cuda.{name}") for name in ("device", "driver"))
    if device is None:
        return
    made = [number for number in device._devices if number < 0]
    for number in made:
        del device._devices[number]
    if driver is None:  # a command that found no GPU
        return
    known = driver.Driver._function
    if known.cache_info().currsize and (made or not device._devices):  # also those that a test registered and took back
        known.cache_clear()
        gc.collect()  # executors and devices refer to each other, and are too few objects for a collection of theirs


@pytest.fixture(scope="module", autouse=True)
def _a_file_leaves_no_trace() -> Iterator[None]:
    with no_trace():
        yield
    _keep()


@pytest.fixture(autouse=True)
def _a_test_leaves_no_trace() -> Iterator[None]:
    with no_trace():
        yield
    _let_devices_go()


@pytest.fixture(params=["native", "python"])
def both_lanes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The test runs on native lanes, if this machine has them, and on Python lanes."""
    from minidl.devices.device import no_native_lanes

    kind = str(request.param)
    if kind == "native" and no_native_lanes():
        pytest.skip(no_native_lanes())
    monkeypatch.setenv("MINIDL_LANES", kind)
    return kind


def _keep() -> None:
    """Modules, items and compiled code stay: no collection of garbage looks through them again."""
    gc.collect()
    gc.freeze()


def pytest_collection_finish() -> None:
    _keep()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: Any) -> Iterator[Any]:
    if item.get_closest_marker("gpu") is None and not os.environ.get("MINIDL_TEST_GPU"):
        return (yield)
    from cuda_on_gpu import watched

    with watched(item.nodeid):
        return (yield)


# ----------------------------------------------------------------------------------------------------------- parameters
def _axes(item: Any) -> dict[tuple[str, ...], tuple[int, ...]]:
    """The value of each `parametrize` and of each fixture with parameters; equal values are one object."""
    given = item.callspec.params
    axes = [[name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
            for names in (mark.args[0] for mark in item.iter_markers("parametrize"))]
    joined = {name for names in axes for name in names}
    axes += [[name] for name in sorted(given) if name not in joined]
    return {tuple(names): tuple(id(given[name]) for name in names) for names in axes}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Of a test with several parameters, the default run has every value of each of them at least once (a diagonal of
    the product), or `few(n)` of these. The other combinations are marked `wide`."""
    if any("[" in argument for argument in config.args):
        return  # somebody asks for exactly these
    tests: dict[str, list[tuple[Any, dict[tuple[str, ...], tuple[int, ...]]]]] = {}
    for item in items:
        if hasattr(item, "callspec") and not any(map(item.get_closest_marker, ("slow", "campaign", "sanitizer"))):
            tests.setdefault(item.nodeid.partition("[")[0], []).append((item, _axes(item)))
    for cases in tests.values():
        values: dict[tuple[str, ...], dict[tuple[int, ...], int]] = {names: {} for names in cases[0][1]}
        for _, axes in cases:
            for names, value in axes.items():
                values[names].setdefault(value, len(values[names]))
        longest = max(map(len, values.values()))
        few = cases[0][0].get_closest_marker("few")
        count = min(few.args[0], longest) if few else longest
        steps = [count if len(found) <= count else longest for found in values.values()]
        diagonal = {tuple(i * step // count % len(found) for step, found in zip(steps, values.values(), strict=True))
                    for i in range(count)}
        for item, axes in cases:
            if tuple(values[names][value] for names, value in axes.items()) not in diagonal:
                item.add_marker(pytest.mark.wide)


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
