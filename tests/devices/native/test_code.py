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
    """A lane whose calls return the given statuses, each the next one of its list every time it is made."""

    def __init__(self, *statuses):
        self.made, left = [], [list(each) for each in statuses]

        def answer(number):
            self.made.append(number)
            if left[number][0] == "stop":
                self.state[code.STOP] = 1
                return code.OK
            return left[number].pop(0)

        self.function = FUNCTION(answer)
        address = ctypes.cast(self.function, ctypes.c_void_p).value
        self.calls = np.array([[address, number] for number in range(len(statuses))], np.int64)
        self.state = np.zeros(code.STATE_WORDS, np.int64)
        self.words = np.zeros(code.LANE_WORDS, np.int64)
        self.words[[code.CALLS, code.COUNT, code.STATE]] = self.calls.ctypes.data, len(statuses), self.state.ctypes.data

    def walk(self, at=0, *, patient):
        at, why = divmod(code.walk(self.words.ctypes.data, at, patient), 4)
        return at, why


@pytest.mark.parametrize("patient", [True, False])
def test_all_calls_are_made_in_order(patient):
    lane = Lane(*[[code.OK]] * 40)
    assert lane.walk(patient=patient) == (40, code.DONE)
    assert lane.made == list(range(40))
    assert Lane().walk(patient=patient) == (0, code.DONE)


@pytest.mark.parametrize("patient", [True, False])
def test_a_call_that_fails_is_the_last(patient):
    lane = Lane([code.OK], [code.FAILED], [code.OK])
    assert lane.walk(patient=patient) == (1, code.FAULT)
    assert lane.made == [0, 1]


@pytest.mark.parametrize("patient", [True, False])
def test_no_call_is_made_after_others_gave_up(patient):
    lane = Lane([code.OK], ["stop"], [code.OK])
    assert lane.walk(patient=patient) == (2, code.STOPPED)
    assert lane.made == [0, 1]


def test_a_call_that_is_not_over_is_made_again():
    lane = Lane([code.OK], [code.AGAIN, code.AGAIN, code.OK], [code.OK])
    assert lane.walk(patient=True) == (3, code.DONE)
    assert lane.made == [0, 1, 1, 1, 2]


def test_the_callers_lane_comes_back_between_such_calls_to_look_at_its_signals():
    lane = Lane([code.OK], [code.AGAIN, code.OK], [code.OK])
    assert lane.walk(patient=False) == (1, code.LOOK)
    assert lane.walk(1, patient=False) == (3, code.DONE)
    assert lane.made == [0, 1, 1, 2]


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
