"""The compiled loop of a lane, called alone: why it comes back, and where it goes on."""

from __future__ import annotations

import ctypes
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from minidl.devices import device as devices

if devices.no_native_lanes():
    pytest.skip(devices.no_native_lanes(), allow_module_level=True)

FUNCTION = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_int64)


@pytest.fixture(scope="module", autouse=True)
def _compiled():
    """Not when tests are collected: each worker would compile it."""
    global code
    from minidl.devices.native import code


class Lane:
    """A lane whose calls return the given statuses, each the next one of its list every time it is made; at `STOP`
    others give up."""

    def __init__(self, *statuses):
        self.made, left = [], [each.split() for each in statuses]

        def answer(number):
            self.made.append(number)
            status = left[number].pop(0)
            if status == "STOP":
                self.state[code.STOP] = 1
                return code.OK
            return getattr(code, status)

        self.function = FUNCTION(answer)
        address = ctypes.cast(self.function, ctypes.c_void_p).value
        self.calls = np.array([[address, number] for number in range(len(statuses))], np.int64)
        self.state = np.zeros(code.STATE_WORDS, np.int64)
        self.words = np.zeros(code.LANE_WORDS, np.int64)
        self.words[[code.CALLS, code.COUNT, code.STATE]] = self.calls.ctypes.data, len(statuses), self.state.ctypes.data


@pytest.mark.parametrize(("statuses", "patient", "ends", "made"), [
    *((statuses, patient, ends, made) for patient in (True, False) for statuses, ends, made in (
        (["OK"] * 40, ["40 DONE"], [*range(40)]), ([], ["0 DONE"], []), (["OK", "FAILED", "OK"], ["1 FAULT"], [0, 1]),
        (["OK", "STOP", "OK"], ["2 STOPPED"], [0, 1]))),
    (["OK", "AGAIN AGAIN OK", "OK"], True, ["3 DONE"], [0, 1, 1, 1, 2]),
    (["OK", "AGAIN OK", "OK"], False, ["1 LOOK", "3 DONE"], [0, 1, 1, 2]),  # it looks at its signals in between
])
def test_a_lane_makes_its_calls_in_order_and_says_why_it_comes_back(statuses, patient, ends, made):
    lane, at = Lane(*statuses), 0
    for end in ends:
        wanted, why = end.split()
        at, found = divmod(code.walk(lane.words.ctypes.data, at, patient), 4)
        assert (at, found) == (int(wanted), getattr(code, why))
    assert lane.made == made


def test_an_event_lets_its_own_run_and_earlier_ones_through():
    event, state = np.zeros(3, np.int64), np.zeros(code.STATE_WORDS, np.int64)
    state[code.NANOSECONDS] = 1
    at, shared = event.ctypes.data, state.ctypes.data
    assert not code.wait(at, 2, shared, 3)
    code.record(at, 2)
    assert [code.wait(at, run, shared, 0) for run in (1, 2, 3)] == [True, True, False]
    assert event[1] == 1  # somebody sleeps, or has: the next record wakes it
    code.record(at, 3)
    assert event[:2].tolist() == [3, 0]


@pytest.fixture
def system(monkeypatch):
    """The system's calls about cores. Returns the mask of a thread: at first, and after each change."""
    masks = []

    def words(thread, size, address):
        assert (thread, size) == (0, 128)
        return (ctypes.c_int64 * 16).from_address(address)

    def get_cores(*asked):
        words(*asked)[:] = masks[0] or [0] * 16
        return 0 if masks[0] else -1

    def set_cores(*asked):
        if any(words(*asked)):
            masks.append(words(*asked)[:])
        return 0 if any(words(*asked)) else -1

    monkeypatch.setattr(code, "get_cores", get_cores)
    monkeypatch.setattr(code, "set_cores", set_cores)
    return masks


def mask(*cores):
    found = [0] * 16
    for core in cores:
        found[core // 64] |= 1 << core % 64 if core % 64 < 63 else -1 << 63
    return found


@pytest.mark.parametrize(("allowed", "own", "waker", "other"), [
    ((0, 1), 1, 1, (0,)), ((0, 1, 2, 3), 2, 2, (0, 1, 3)), ((3, 63, 64, 130), 63, 63, (3, 64, 130)),
    ((5, 64, 1023), 1023, 1023, (5, 64)),
    ((0, 1), 0, 1, ()), ((7,), 7, 7, ()),
])
def test_a_lane_leaves_the_core_of_the_lane_that_woke_it(allowed, own, waker, other, system, monkeypatch):
    system.append(mask(*allowed))
    monkeypatch.setattr(code, "own_core", lambda: own)
    code.leave.py_func(waker)
    assert system == [mask(*allowed), *([mask(*other), mask(*allowed)] if other else [])]


def test_a_lane_stays_on_a_machine_with_too_many_cores(system, monkeypatch):
    system.append(None)
    monkeypatch.setattr(code, "own_core", lambda: 1024)
    code.leave.py_func(1024)
    assert system == [None]


def test_where_a_thread_may_run_stays_as_it_is():
    def masks():
        before = os.sched_getaffinity(0)
        for allowed in (before, {min(before)}, before):
            os.sched_setaffinity(0, allowed)
            for core in [*before, 1023, 1024]:
                code.leave(core)
                yield allowed, os.sched_getaffinity(0)

    with ThreadPoolExecutor(1) as thread:
        assert all(allowed == found for allowed, found in thread.submit(list, masks()).result())


@pytest.mark.parametrize(("waits", "left"), [([True], []), ([False, True], [7]), ([False, False, True], [7])])
def test_a_worker_looks_where_it_is_after_a_pause_alone(waits, left, monkeypatch):
    lane, state = np.zeros(code.LANE_WORDS, np.int64), np.zeros(code.STATE_WORDS, np.int64)
    lane[code.STATE], lane[code.GO + 2], found = state.ctypes.data, 7, []

    def wait(*_):
        if not waits:
            lane[code.CLOSING] = 1
        return not waits or waits.pop(0)

    monkeypatch.setattr(code, "wait", wait)
    monkeypatch.setattr(code, "leave", found.append)
    monkeypatch.setattr(code, "walk", lambda *_: code.DONE)
    monkeypatch.setattr(code, "record", lambda *_: None)
    for name in ("peek", "load"):
        monkeypatch.setattr(code, name, lambda address: ctypes.c_int64.from_address(address).value)
    monkeypatch.setattr(code, "poke", lambda address, value: setattr(
        ctypes.c_int64.from_address(address), "value", value))
    code.serve.py_func(lane.ctypes.data)
    assert found == left
