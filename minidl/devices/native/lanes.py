"""Native lanes: as `minidl.devices.lanes.Threads`, but compiled code makes the calls of each lane, and the
interpreter's lock is free meanwhile. A call that has no native form is made by Python from within the lane.

The caller's lane comes back to Python now and then, so that signals are handled between two calls.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections import Counter
from collections.abc import Generator, Sequence
from functools import partial
from timeit import repeat
from typing import Any

import numpy as np

from ...core.columns import grouped
from ...kernels import Thunk
from ..lanes import CLOSED, LaneError, Stop, Work, lower_priority
from . import calls, code
from .calls import Call, Unknown
from .stamps import StampClock, Stamps

SPINS = 20_000  #: how often a lane looks for an event before it sleeps: some 0.25 ms; to be woken may take 0.05 ms
FEW_SPINS = 400  #: if lanes have fewer cores than they are: then whoever spins keeps a core from the others
_callback = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_int64)


class _Lane:
    """The calls of one lane, in an array, and the memory that they use."""

    def __init__(self, number: int, state: Any, failures: list[LaneError], traced: int = 0) -> None:
        """`traced`: how many tasks get stamps."""
        self.number, self.state = number, state
        self.stamps = Stamps(3 * traced)
        self.words = _words(code.LANE_WORDS)
        self.calls: list[Call] = []
        self.tasks: list[int] = []  # for every call, the task to which it belongs
        self.thunks: dict[int, Thunk] = {}  # the bound calls of kernels, by the number of their first call
        self.by_python: list[tuple[Thunk, int]] = []
        python = _calls_by_python(self.by_python, number, failures)
        next(python)
        self._python = _callback(python.send)
        self.python_address = ctypes.cast(self._python, ctypes.c_void_p).value or 0

    def add(self, task: int, *found: Call) -> None:
        self.calls += found
        self.tasks += [task] * len(found)

    def add_thunks(self, task: int, thunks: Sequence[Thunk]) -> None:
        """Adds bound calls, in native form if they have one."""
        for thunk in thunks:
            self.thunks[len(self.calls)] = thunk
            try:
                self.add(task, *calls.convert(thunk))
            except Unknown:
                self.by_python.append((thunk, task))
                self.add(task, Call(self.python_address, len(self.by_python) - 1))

    def finish(self, spins: int) -> None:
        """Makes the array."""
        self.table = np.array([(c.address, c.block) for c in self.calls], np.int64).reshape(-1, 2)
        self.words[[code.CALLS, code.COUNT, code.STATE, code.SPINS]] = (self.table.ctypes.data, len(self.table),
                                                                       self.state.ctypes.data, spins)

    def failure(self, at: int) -> LaneError:
        """Why native call `at` failed. numba keeps an exception for itself: Python makes the call again, to see it."""
        error: BaseException = RuntimeError("a compiled call failed, and did not fail when it was made again")
        try:
            self.thunks[max(first for first in self.thunks if first <= at)]()
        except BaseException as found:
            error = found
        return LaneError(error, self.tasks[at], self.number)


def _calls_by_python(thunks: Sequence[tuple[Thunk, int]], lane: int,
                     failures: list[LaneError]) -> Generator[int, int, None]:
    """Makes the bound call whose number it is sent, and yields its status.

    A generator, since a signal that came while compiled code ran is handled at its first step in Python: here that is
    within `try`.
    """
    status, task = code.OK, -1
    while True:
        try:
            while True:
                number = yield status
                status = code.FAILED
                thunk, task = thunks[number]
                thunk()
                status, task = code.OK, -1
        except GeneratorExit:
            return
        except BaseException as error:
            failures.append(LaneError(error, task, lane))
            status, task = code.FAILED, -1


class NativeLanes:
    """Lanes without the interpreter, see `minidl.devices.lanes.Threads`. `stamped`: they write a trace's stamps, so
    that `where` knows where they are. `spins`: how often a lane looks for an event before it sleeps; 0: by its cores.
    `by_python`: how many bound calls of each name have no native form; `converted`: how many have."""

    def __init__(self, work: Work, trace: bool = False, *, stamped: bool = False, spins: int = 0) -> None:
        self.work, self.trace, stamped = work, trace, trace or stamped
        self._failures: list[LaneError] = []
        self._clock = StampClock()
        self._state = _words(code.STATE_WORDS)
        self._state[code.NANOSECONDS] = code.NAP
        self._clock.begin()
        self._lanes = [_Lane(i, self._state, self._failures, stamped * len(tasks))
                       for i, tasks in enumerate(work.tasks)]
        spins = spins or (SPINS if len(self._lanes) <= len(os.sched_getaffinity(0)) else FEW_SPINS)
        self._build(spins)
        lanes = self._lanes or [_Lane(0, self._state, self._failures)]
        for lane in lanes:
            lane.finish(spins)
        self._workers = np.array([lane.words.ctypes.data for lane in lanes[1:]], np.int64)
        all_lanes = lanes[0].words.ctypes.data, self._workers.ctypes.data, len(self._workers)
        self._first, self._step = lanes[0], partial(code.step, *all_lanes)
        if work.ring is not None:
            self._copies = np.array([(a.ctypes.data, b.nbytes, b.ctypes.data, 0) for a, b in work.ring.takes]
                                    + [(b.ctypes.data, 0, a.ctypes.data, b.nbytes) for a, b in work.ring.gives],
                                    np.int64).reshape(-1, 4)
            self._steps = partial(code.steps, *all_lanes, self._copies.ctypes.data, len(work.ring.takes),
                                  len(work.ring.gives))
        names = Counter(calls.described(thunk) for lane in self._lanes for thunk, _ in lane.by_python)
        self.by_python = dict(names.most_common())
        self.converted = sum(len(lane.thunks) for lane in self._lanes) - names.total()
        self._threads = [threading.Thread(target=_serve, args=(lane.words, priority), name=f"minidl {name}",
                                          daemon=True)
                         for lane, name, priority in [*zip(lanes, work.names, work.priorities, strict=False)][1:]]
        for thread in self._threads:
            thread.start()
        self.close = weakref.finalize(self, _close, self._threads, [lane.words for lane in lanes[1:]], self._state)

    def _build(self, spins: int) -> None:
        """Makes the calls of each lane: for each task its waits, its kernel calls, its records."""
        work, state = self.work, self._state.ctypes.data
        self._events = _words(8 * len(work.waits))
        events = [(*pair, self._events.ctypes.data + code.LINE * i) for i, pair in enumerate(work.waits)]
        awaited = grouped((waiter, _call(code.wait_call, event, state, spins)) for waiter, _, event in events)
        records = grouped((source, _call(code.record_call, event, state)) for _, source, event in events)
        for lane, tasks in zip(self._lanes, work.tasks, strict=True):
            for i, task in enumerate(tasks):
                waits, before = awaited.get(task, []), work.before(task, None)
                if waits or before:
                    lane.add(task, *lane.stamps.upto(3 * i + 1))
                lane.add(task, *waits)
                lane.add_thunks(task, before)
                lane.add(task, *lane.stamps.upto(3 * i + 2))
                lane.add_thunks(task, work.calls(task, None))
                recorded, after = records.get(task, []), work.after(task, None)
                if recorded or after or i == len(tasks) - 1:  # else it ends when the next task is issued
                    lane.add(task, *lane.stamps.upto(3 * i + 3))
                lane.add(task, *recorded)
                lane.add_thunks(task, after)

    def run(self, step: Any = None) -> None:
        """Runs all lanes once. Raises LaneError for a task that failed; any other error does not come from a task.
        `step`: the compiled call, by default of one step."""
        step, result = step or self._step, code.STOPPED
        if self.trace:
            self._clock.begin()
        try:
            if self._first.by_python:
                with np.errstate(all="ignore"):  # results show infinities; no warnings are needed
                    result = self._walk(step, step(-1))
            else:
                result = step(-1)
                if result & 3 == code.LOOK:
                    result = self._walk(step, result)
            if result & 3 == code.DONE:
                return
            self.give_up(Stop())
        except BaseException as error:  # an interrupt between two calls
            self._failures.append(LaneError(error))
            self.give_up(Stop())
        self._fail(result)

    def several(self, steps: int) -> None:
        """Runs so many steps on the batches of the ring, as `run`, in one call of compiled code."""
        self._state[[code.TURN, code.TURNS]] = 0, steps
        self.run(self._steps)

    def _walk(self, step: Any, result: int) -> int:
        """Makes the rest of the calls; returns early if a lane fails or must stop."""
        while result & 3 == code.LOOK:
            result = step(result >> 2)
        return result

    def give_up(self, stop: Stop) -> None:
        """Ends all lanes."""
        if stop.error is not None:
            self._failures.append(LaneError(stop.error))
        self._state[code.STOP] = 1  # whoever waits looks at it

    @property
    def given_up(self) -> bool:
        """Whether the run must end: a call that waits returns then."""
        return bool(self._state[code.STOP])

    def _fail(self, result: int) -> None:
        """Waits until no lane runs, and raises what has failed first."""
        ended = False
        while not ended:
            try:
                ended = code.join(self._workers.ctypes.data, len(self._workers), self._state.ctypes.data)
            except BaseException as error:
                self._failures.append(LaneError(error))
        failures = [*self._failures]
        self._failures.clear()
        if not failures:
            results = [result, *(int(lane.words[code.RESULT]) for lane in self._lanes[1:])]
            failures = [lane.failure(r >> 2) for lane, r in zip(self._lanes, results, strict=True)
                        if r & 3 == code.FAULT]
        if not self.close.alive:  # the process ends while a thread steps
            raise RuntimeError(CLOSED)
        self._state[code.STOP] = 0
        for failure in failures:
            if failure.task < 0 or not isinstance(failure.error, Exception):
                raise failure.error  # KeyboardInterrupt, or the error of a signal handler: not from a task
        raise failures.pop(0)

    def __str__(self) -> str:
        """`native lanes, 173 calls; by Python: check (40)`."""
        others = ", ".join(f"{name} ({count})" for name, count in self.by_python.items())
        return f"native lanes, {self.converted} calls; by Python: {others or 'none'}"

    def stamps(self) -> list[Any]:
        """For each lane an array (tasks, 3): when each task of the last run was issued, started and ended, in seconds
        of the host's clock."""
        return [moments.reshape(-1, 3) for moments in self._clock.seconds(lane.stamps for lane in self._lanes)]

    def where(self) -> list[tuple[int, Any]]:
        """For each lane how many moments of the present run have passed, three for each task in order (issued, started,
        ended), and when; only with `stamped`. Any thread may ask."""
        passed = []
        for lane in self._lanes:
            count = lane.stamps.passed()
            if count == len(lane.stamps.stamp) and lane is not self._first:  # all passed, or none yet
                words, begun = lane.stamps.words, self._first.stamps.words[:1]
                ended = lane.words[code.END] >= self._state[code.GENERATION] or words[lane.stamps.stamp[-1:]] > begun
                count = count if np.all(ended) else 0
            passed.append(count)
        times = self._clock.seconds(lane.stamps for lane in self._lanes)
        return [(count, moments[:count]) for count, moments in zip(passed, times, strict=True)]


def spin_us() -> float:
    """Microseconds for which a lane looks for an event before it sleeps: the least of some rounds."""
    event = _words(1)
    return min(repeat(lambda: code.look(event.ctypes.data, 1, SPINS), number=1, repeat=20)) * 1e6


def _words(count: int) -> Any:
    """Zeros that begin at a cache line."""
    raw = np.zeros(count + code.LINE // 8, np.int64)
    start = -raw.ctypes.data % code.LINE // 8
    return raw[start : start + count]


def _call(function: Any, *words: int) -> Call:
    block = np.array(words, np.int64)
    return Call(function.address, block.ctypes.data, (block,))


def _serve(words: Any, priority: int) -> None:
    """The body of a worker thread."""
    lower_priority(priority)
    with np.errstate(all="ignore"):
        code.serve(words.ctypes.data)


def _close(threads: list[threading.Thread], words: list[Any], state: Any) -> None:
    """Ends all workers, also those that run a step: it first tells every lane to stop, so that none waits for another
    one that has ended."""
    state[code.STOP] = 1
    for lane in words:
        code.close(lane.ctypes.data)
    for thread in threads:
        thread.join()
