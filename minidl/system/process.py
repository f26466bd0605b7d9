"""This process: the level of MINIDL_DEBUG, and pauses of its garbage collector."""

from __future__ import annotations

import gc
import os
from contextlib import ContextDecorator
from threading import Lock
from typing import Any


def debug_level() -> int:
    """The level of MINIDL_DEBUG: 1 prints schedules and names the first value that is not finite, 2 adds a line per
    task, 3 adds the buffers of each task; without it 0. Raises ValueError for any other value."""
    text = os.environ.get("MINIDL_DEBUG") or "0"
    if text not in ("0", "1", "2", "3"):
        raise ValueError(f"MINIDL_DEBUG is {text[:40]!r}; it must be 0, 1, 2 or 3")
    return int(text)


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
