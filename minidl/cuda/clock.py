"""How long calls take on the device: captured, repeated in one graph, replayed between two events.

So no launch from the host is in the time, and the gap that one call leaves behind another on its stream is. Knows no
tasks.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from ..kernels import Thunk
from .lanes import capture

REPEATS = 20  #: of a task in a graph
ROUNDS = 5


def replayed(driver: Any, stream: Any, fill: Callable[[], None]) -> float:
    """Microseconds of one replay of what `fill` issues on `stream`, or forks off and joins; the median of some rounds."""
    launch = driver.replay(capture(driver, stream, fill), stream)
    begin, end = driver.event(True), driver.event(True)
    launch()
    found = []
    for _ in range(ROUNDS):
        driver.record(begin, stream)()
        launch()
        driver.record(end, stream)()
        driver.synchronize(stream)
        found.append(driver.elapsed(begin, end))
    return statistics.median(found)


def run(calls: Sequence[Thunk], times: int = 1) -> None:
    for _ in range(times):
        for call in calls:
            call()


def each(driver: Any, stream: Any, programs: Sequence[Sequence[Thunk]], progress: Callable[[float], None] | None = None) -> list[float]:
    """Microseconds of each program on its stream. All are run once before, in order, so that everything holds a value."""
    for program in programs:
        run(program)
    driver.synchronize(stream)
    found = []
    for n, program in enumerate(programs):
        found.append(replayed(driver, stream, lambda p=program: run(p, REPEATS)) / REPEATS if program else 0.0)  # type: ignore[misc]
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

    straight = replayed(driver, one, lambda: chain(False))
    return max(0.0, replayed(driver, one, lambda: chain(True)) - straight) / (2 * REPEATS)


def together(driver: Any, one: Any, other: Any, first: Sequence[Thunk], second: Sequence[Thunk], alone: tuple[float, float]) -> tuple[float, float]:
    """How many times longer each of two programs takes beside the other; `first` is bound to stream `one`, `second` to
    `other`. `alone`: microseconds of each by itself. The one measured runs a fixed number of times, the other longer."""

    def beside(main: Sequence[Thunk], times: int, rest: Sequence[Thunk], long: int, streams: tuple[Any, Any]) -> float:
        begin, end, start, joined = driver.event(True), driver.event(True), driver.event(), driver.event()

        def fill() -> None:
            origin, side = streams
            driver.record(start, origin)()
            driver.wait(side, start)()
            driver.record_in_graph(begin, origin)()
            for n in range(max(times, long)):  # issued in turns, so that both begin at once
                run(main if n < times else ())
                run(rest if n < long else ())
            driver.record_in_graph(end, origin)()
            driver.record(joined, side)()
            driver.wait(origin, joined)()

        replayed(driver, streams[0], fill)
        return float(driver.elapsed(begin, end)) / times

    def repeats(mine: float, its: float) -> int:
        return max(2, min(400, round(2.5 * REPEATS * mine / max(its, 0.5))))

    a, b = (max(t, 0.5) for t in alone)
    slow = beside(first, REPEATS, second, repeats(a, b), (one, other)) / a
    slow_other = beside(second, REPEATS, first, repeats(b, a), (other, one)) / b
    return max(1.0, slow), max(1.0, slow_other)
