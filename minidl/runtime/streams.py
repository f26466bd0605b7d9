"""Streams and events of the CPU: a stream is a worker thread that runs programs, an event orders two streams.

A program is a flat list of calls without arguments: kernel calls, and the waits and records of events. Nothing else
happens between two kernels, so a task costs little beyond its kernels.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

Program = list[Callable[[], Any]]


class Event:
    """An event: recorded once and awaited once in each run, in either order; then it is reset for the next run."""

    __slots__ = ("_lock", "record", "wait")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()
        self.record: Callable[[], Any] = self._lock.release
        self.wait: Callable[[], Any] = self._lock.acquire

    def open(self) -> None:
        """Lets a waiter through although nothing was recorded, when a run is given up."""
        with contextlib.suppress(RuntimeError):
            self._lock.release()


class Stop:
    """How a program ended: `error` and the index of the call that raised it, or neither."""

    __slots__ = ("error", "index")

    def __init__(self, error: BaseException | None = None, index: int = -1) -> None:
        self.error, self.index = error, index


def run_program(program: Program) -> Stop:
    """Makes all calls in order. An exception stops it and is returned with its place.

    Another thread that clears the list ends the run after the present call.
    """
    calls: Any = iter(program)
    total = len(program)
    try:
        with np.errstate(all="ignore"):  # results show infinities; no warnings are needed
            for call in calls:
                call()
    except BaseException as error:
        return Stop(error, total - calls.__length_hint__() - 1)
    return Stop()


def lower_priority(priority: int) -> None:
    """Gives this thread the niceness of its lane, where that is not 0."""
    if priority > 0:
        with contextlib.suppress(OSError, AttributeError):  # not every system has niceness per thread
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), min(19, priority))


class Stream:
    """A worker thread that runs programs. `priority`: the lower number goes first, as in CUDA; here the niceness."""

    def __init__(self, name: str, priority: int = 0) -> None:
        self.name, self.priority = name, priority
        self._start, self._done, self._busy = Event(), Event(), False
        self._program: Program | None = None
        self._on_error: Callable[[Stop], None] | None = None
        self._stop = Stop()
        self._thread = threading.Thread(target=self._work, name=f"minidl {name}", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        lower_priority(self.priority)
        while True:
            self._start.wait()
            if self._program is None:
                return
            self._stop = run_program(self._program)
            if self._stop.error is not None and self._on_error is not None:
                self._on_error(self._stop)
            self._busy = False
            self._done.open()

    def start(self, program: Program, on_error: Callable[[Stop], None] | None = None) -> None:
        """Starts a program on the worker, which calls `on_error` if the program fails."""
        self._program, self._on_error, self._busy = program, on_error, True
        self._start.record()

    def join(self) -> Stop:
        """Waits for the last program. An interrupt during the wait leaves the program running: call join again."""
        while self._busy:  # the event alone proves nothing: it may be left over from an interrupted wait
            self._done.wait()
        stop = self._stop
        self._program, self._on_error, self._stop = None, None, Stop()  # so that the thread keeps no object alive
        return stop

    def close(self) -> None:
        """Ends the thread."""
        if self._thread.is_alive():
            self._program = None
            self._start.record()
            self._thread.join()
