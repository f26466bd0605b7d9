"""One run of an executor at a time, and only in the process that made it: anything else is an error, not a hang."""

from __future__ import annotations

import threading
from os import getpid
from threading import get_ident
from typing import Any


class Guard:
    """Use `with guard:` around a run. It raises RuntimeError while another thread runs the same executor, whose buffers
    hold one step; and in a forked child, unless the executor `forks`: worker threads and devices stay with the
    parent."""

    def __init__(self, *, forks: bool) -> None:
        self._process = None if forks else getpid()
        self._running: dict[str, int] = {}  # the thread's number

    def __enter__(self) -> None:
        if self._process is not None and self._process != getpid():
            raise RuntimeError("this executor was made before the process was forked, and its worker threads and "
                               "device stayed with the parent; make an executor in the child")
        here = get_ident()
        other = self._running.setdefault("in", here)  # atomic; this thread's entry may be left from an interrupted run
        if other != here:
            name = next((thread.name for thread in threading.enumerate() if thread.ident == other), "unknown")
            raise RuntimeError(f"this executor is running a step in thread {name!r}; run one step at a time, or "
                               f"make an executor for each thread")

    def __exit__(self, *_: Any) -> None:
        self._running.clear()
