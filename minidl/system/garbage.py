"""Python's garbage collector pauses during work that makes many objects and no garbage."""

import gc
from contextlib import ContextDecorator
from threading import Lock
from typing import Any


class _Paused(ContextDecorator):
    """A context, and a decorator, in which the collector pauses; it goes on when the last thread has left. Otherwise it
    would look at all objects again and again, which took a third of the time of recording and planning."""

    def __init__(self) -> None:
        self._lock, self._inside, self._enabled = Lock(), 0, True

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._enabled = gc.isenabled()
                gc.disable()
            self._inside += 1

    def __exit__(self, *_: Any) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside and self._enabled:
                gc.enable()


paused = _Paused()
