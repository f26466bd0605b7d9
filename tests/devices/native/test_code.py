"""The compiled loop of a lane, called alone: why it comes back, and where it goes on."""

from __future__ import annotations

import ctypes

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
    event, state = np.zeros(2, np.int64), np.zeros(code.STATE_WORDS, np.int64)
    state[code.NANOSECONDS] = 1
    at, shared = event.ctypes.data, state.ctypes.data
    assert not code.wait(at, 2, shared, 3)
    code.record(at, 2)
    assert [code.wait(at, run, shared, 0) for run in (1, 2, 3)] == [True, True, False]
    assert event[1] == 1  # somebody sleeps, or has: the next record wakes it
    code.record(at, 3)
    assert event.tolist() == [3, 0]
