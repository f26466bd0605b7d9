"""How long calls take on the device: captured, repeated in one graph, replayed between two events.

An event that is recorded on an idle stream happens at once, and the time to the next event then includes the host's
launches. So the stream must be busy when timing begins: with a replay before, or with a `Hold`. The gap between two
calls on a stream is part of the time. An idle chip runs at a fraction of its clock rate (an H200 at 345 MHz), so a
stream is filled for a while before timing begins, unless the chip was timed a moment ago. Knows no tasks.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from math import ceil
from time import perf_counter
from typing import Any
from weakref import WeakKeyDictionary

from ...kernels import Thunk
from .lanes import capture

REPEATS = 20  #: how often a task is repeated in a graph
ROUNDS = 5
LONG = 2000.0  #: microseconds of repeated calls in a graph that suffice to compare them
FILLS = 400  #: the most calls that hold a stream: with many more in its queue the host would wait too
WARM = 0.2  #: seconds of fills that bring an idle chip to its clock rate
IDLE = 1.0  #: seconds after which a chip counts as idle
FILLED = 1 << 26  #: bytes of such a fill

_timed: WeakKeyDictionary[Any, float] = WeakKeyDictionary()  #: when each driver's chip was last warm


def warm(driver: Any, stream: Any) -> None:
    """Waits for all work of the device, so that nothing runs beside what is timed, and warms an idle chip."""
    driver.synchronize_device()
    begin = perf_counter()
    if begin - _timed.get(driver, -IDLE) >= IDLE and WARM:
        fill = driver.zeros(driver.allocate(FILLED, stream), stream)
        while perf_counter() - begin < WARM:
            run([fill], 20)
            driver.synchronize(stream)
    _timed[driver] = perf_counter()


def _timer(driver: Any, stream: Any) -> Callable[[Callable[[], Any]], float]:
    """A function that says for how many microseconds a stream works on what a call issues."""
    begin, end = driver.event(True), driver.event(True)

    def timed(issue: Callable[[], Any]) -> float:
        driver.record(begin, stream)()
        issue()
        driver.record(end, stream)()
        driver.synchronize(stream)
        return float(driver.elapsed(begin, end))

    return timed


class Hold:
    """Keeps a stream busy by filling `memory`, while the host issues the calls to be timed behind it."""

    def __init__(self, driver: Any, stream: Any, memory: Any) -> None:
        self._fill = driver.zeros(memory, stream)
        timed = _timer(driver, stream)
        self._fill()
        self._microseconds = max(1.0, timed(self._fill))

    def __call__(self, microseconds: float) -> None:
        """Keeps the stream busy for at least this long, up to FILLS calls."""
        for _ in range(min(FILLS, ceil(microseconds / self._microseconds))):
            self._fill()


def behind(driver: Any, stream: Any, hold: Hold, issue: Callable[[], None]) -> float:
    """Microseconds that `stream` needs for the work of `issue`, all of it queued before it begins: the median."""
    warm(driver, stream)
    host = []
    for _ in range(ROUNDS):
        start = perf_counter()
        issue()
        host.append((perf_counter() - start) * 1e6)
        driver.synchronize(stream)
    timed, found = _timer(driver, stream), []
    for _ in range(4 * ROUNDS):
        hold(2 * statistics.median(host))
        found.append(timed(issue))
    return statistics.median(found)


def replayed(driver: Any, stream: Any, *fills: Callable[[], None]) -> list[float]:
    """Microseconds of one replay of the work that each of `fills` issues on `stream`, or on streams that it forks and
    joins: medians of some rounds, taken in turns."""
    with driver.alone():  # a launch to a stream that another thread captures would be an error
        warm(driver, stream)
        launches = [driver.replay(capture(driver, stream, fill), stream) for fill in fills]
        timed, found = _timer(driver, stream), [list[float]() for _ in fills]
        for _ in range(ROUNDS):
            for launch, times in zip(launches, found, strict=True):
                launch()
                times.append(timed(launch))
    _timed[driver] = perf_counter()
    return [statistics.median(times) for times in found]


def side_by_side(driver: Any, stream: Any, calls: Sequence[Thunk]) -> list[float]:
    """Microseconds of each call, timed in turns; long calls are repeated less. All must have been made once before."""
    once = replayed(driver, stream, *(partial(run, [call]) for call in calls))
    repeats = max(1, min(REPEATS, int(LONG / max(1.0, min(once)))))
    if repeats == 1:
        return once
    return [t / repeats for t in replayed(driver, stream, *(partial(run, [call], repeats) for call in calls))]


def run(calls: Sequence[Thunk], times: int = 1) -> None:
    for _ in range(times):
        for call in calls:
            call()


def each(driver: Any, stream: Any, programs: Sequence[Sequence[Sequence[Thunk]]],
         progress: Callable[[float], None] | None = None, repeats: int = REPEATS) -> list[float]:
    """Microseconds of each program on its stream. A program is a list of equal sequences of calls, on buffers of their
    own, that are repeated in turn, `repeats` times in all. All must have run before."""
    found = []
    for n, sets in enumerate(programs):
        times = max(1, repeats // len(sets))
        issue = partial(run, [call for program in sets for call in program], times)
        found.append(replayed(driver, stream, issue)[0] / (times * len(sets)) if sets[0] else 0.0)
        if progress:
            progress((n + 1) / len(programs))
    return found


def hop(driver: Any, one: Any, other: Any, call: tuple[Thunk, Thunk]) -> float:
    """Microseconds that a chain loses where it changes streams. `call`: the same small launch on either stream."""

    events = [driver.event() for _ in range(2 * REPEATS)]  # they outlive the capture

    def chain(change: bool) -> None:
        at = 0
        for event in events:
            call[at]()
            if change:
                driver.record(event, (one, other)[at])()
                driver.wait((other, one)[at], event)()
                at = 1 - at

    straight, changing = replayed(driver, one, partial(chain, False), partial(chain, True))
    return max(0.0, changing - straight) / (2 * REPEATS)


def together(driver: Any, one: Any, other: Any, first: Sequence[Thunk], second: Sequence[Thunk],
             alone: tuple[float, float]) -> tuple[float, float]:
    """How many times longer each of two programs takes beside the other. `first` is bound to stream `one`, `second` to
    `other`. `alone`: microseconds of each by itself. The measured program runs a fixed number of times, the other one
    longer, in a graph that is replayed some rounds; the median counts."""

    def beside(main: Sequence[Thunk], times: int, rest: Sequence[Thunk], long: int, streams: tuple[Any, Any]) -> float:
        begin, end, start, joined = driver.event(True), driver.event(True), driver.event(), driver.event()

        def fill() -> None:
            origin, side = streams
            driver.record(start, origin)()
            driver.wait(side, start)()
            driver.record_in_graph(begin, origin)()
            for n in range(max(times, long)):  # issued in turns, so that both begin at the same time
                run(main if n < times else ())
                run(rest if n < long else ())
            driver.record_in_graph(end, origin)()
            driver.record(joined, side)()
            driver.wait(origin, joined)()

        warm(driver, streams[0])
        launch, found = driver.replay(capture(driver, streams[0], fill), streams[0]), list[float]()
        launch()
        for _ in range(ROUNDS):
            launch()
            driver.synchronize(streams[0])
            found.append(float(driver.elapsed(begin, end)))
        _timed[driver] = perf_counter()
        return statistics.median(found) / times

    def repeats(mine: float, its: float) -> int:
        return max(2, min(400, round(2.5 * REPEATS * mine / max(its, 0.5))))

    a, b = (max(t, 0.5) for t in alone)
    with driver.alone():
        slow = beside(first, REPEATS, second, repeats(a, b), (one, other)) / a
        slow_other = beside(second, REPEATS, first, repeats(b, a), (other, one)) / b
    return max(1.0, slow), max(1.0, slow_other)
