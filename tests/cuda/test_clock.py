"""How calls are timed, on a driver whose streams keep their own time."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest

from minidl.devices.cuda import clock

SLOW_START, CHANGE = 500.0, 3.0  #: microseconds: the first replay of a graph takes longer; a wait for another stream


class Driver:
    """Calls take a given time on their stream. A capture keeps what is issued."""

    def __init__(self) -> None:
        self.time = {"one": 0.0, "other": 0.0}
        self.captured = None

    def issue(self, what):
        if self.captured is None:
            what()
        else:
            self.captured.append(what)

    def work(self, stream, microseconds):
        def call():
            self.time[stream] += microseconds

        return partial(self.issue, call)

    def event(self, timed=False):
        return SimpleNamespace(at=0.0, stream="")

    def record(self, event, stream):
        def call():
            event.at, event.stream = self.time[stream], stream

        return partial(self.issue, call)

    record_in_graph = record

    def wait(self, stream, event):
        def call():
            if event.stream != stream:
                self.time[stream] = max(self.time[stream], event.at + CHANGE)

        return partial(self.issue, call)

    def elapsed(self, begin, end):
        return end.at - begin.at

    alone = nullcontext

    def begin_capture(self, stream, into=None):
        self.captured = []

    def end_capture(self, stream, into=None):
        graph, self.captured = self.captured, None
        return SimpleNamespace(calls=graph, launched=0)

    def replay(self, graph, stream):
        def call():
            self.time[stream] += 0.0 if graph.launched else SLOW_START
            graph.launched += 1
            for call in graph.calls:
                call()

        return call

    def zeros(self, memory, stream):
        return self.work(stream, 10.0)

    def allocate(self, size, stream):
        return None

    def synchronize(self, stream):
        pass

    def synchronize_device(self):
        pass


@pytest.fixture(autouse=True)
def _no_fills(monkeypatch):
    monkeypatch.setattr(clock, "WARM", 0.0)


@pytest.fixture
def driver():
    return Driver()


def test_the_first_replay_of_a_graph_does_not_count(driver):
    assert clock.replayed(driver, "one", driver.work("one", 4.0), driver.work("one", 7.0)) == [4.0, 7.0]


def test_short_calls_are_repeated_and_their_mean_is_told(driver):
    assert clock.side_by_side(driver, "one", [driver.work("one", 4.0), driver.work("one", 6.0)]) == [4.0, 6.0]


def test_work_that_is_issued_is_timed_behind_a_busy_stream(driver):
    hold = clock.Hold(driver, "one", None)
    filled = []
    hold._fill = lambda: filled.append(1)
    hold(35.0)
    assert len(filled) == 4  # each takes 10
    assert clock.behind(driver, "one", hold, driver.work("one", 5.0)) == 5.0
    filled.clear()
    hold(1e9)
    assert len(filled) == clock.FILLS


def test_programs_take_turns_on_buffers_of_their_own_and_an_empty_one_takes_no_time(driver):
    shown = []
    two_sets = [[driver.work("one", 2.0), driver.work("one", 3.0)], [driver.work("one", 4.0), driver.work("one", 5.0)]]
    assert clock.each(driver, "one", [two_sets, [[]]], shown.append, repeats=4) == [7.0, 0.0]
    assert shown == [0.5, 1.0]


def test_a_hop_is_a_change_of_streams_without_the_calls(driver):
    call = driver.work("one", 2.0), driver.work("other", 2.0)
    assert clock.hop(driver, "one", "other", call) == pytest.approx(CHANGE)


def test_two_programs_beside_each_other_are_no_faster_than_alone(driver):
    one, other = [driver.work("one", 3.0)], [driver.work("other", 6.0)]
    assert clock.together(driver, "one", "other", one, other, (2.0, 6.0)) == (1.5, 1.0)
    assert clock.together(driver, "one", "other", one, other, (4.0, 5.0)) == (1.0, 1.2)
