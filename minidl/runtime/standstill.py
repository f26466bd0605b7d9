"""Watches a run: if it makes no progress for some seconds, or somebody asks, each rank writes what it does and waits
for to a file of a folder that all share.

A thread looks twice a second or more often. It writes for a new call if its rank stands still, and for the call of
another rank, which it finds in that rank's file; so a rank that computes says so while others wait for it. A rank that
goes on writes again.
"""

from __future__ import annotations

import faulthandler
import json
import os
import re
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..core.standstill import FILES, Doing, RankState, Waiting, parsed, path_of
from ..system import interrupts
from ..system.files import FileError, check_writable, write_atomic
from .comm import Communicator, RankError
from .runtime import TaskError

LOOKS = 0.5  #: seconds between two looks; with little patience, a quarter of it
FRAMES = 8  #: of a stack
#: lines of `faulthandler`
THREAD, CALL = re.compile(r"(?:Current thread|Thread) (0x[0-9a-f]+)"), re.compile(r' +File "(.*)", line (\d+) in (.*)')
FRESH = 1.0  #: seconds: what a rank published as its wait counts if it has looked since then


class Watcher:
    """Watches what `run()` returns, which may have `doing` and `progress`; None: nothing yet. `steps()`: how many steps
    have ended. It is a context of the thread that runs, on all ranks together. It makes `folder`, and removes the files
    of earlier runs there: FileError if it cannot. It calls `told(line)` when it has written files."""

    def __init__(self, folder: str | Path, patience: float, run: Callable[[], Any], communicator: Communicator | None,
                 command: str = "", told: Callable[[str], None] = lambda line: None,
                 steps: Callable[[], int] = lambda: 0) -> None:
        self.folder, self.patience = Path(folder), patience
        self._run, self._communicator, self._command, self._told = run, communicator, command, told
        self._steps = steps
        self.rank, self.ranks = (communicator.rank, communicator.size) if communicator is not None else (0, 1)
        self._thread_of_run = threading.get_ident()
        self._begun = time.time()
        self._name = f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.localtime(self._begun))}-{os.getpid()}"
        error = self._cleared() if self.rank == 0 else None
        if communicator is not None:  # the folder is empty before any rank writes there
            self._name, self._begun, error = communicator.gather((self._name, self._begun, error))[0]
        if error is not None:
            raise FileError(*error)
        self._call, self._asked, self._answered = 0, interrupts.asked, False
        self._seen: Any = None
        self._since = time.monotonic()
        self._known: dict[str, tuple[int, int]] = {}  # file of another rank -> when it changed, its call
        self._over, self._writing = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._work, name=f"{self.rank}/standstill", daemon=True)
        self._thread.start()

    def _cleared(self) -> tuple[int, str, str] | None:
        """Makes the folder and removes the files of earlier runs. Returns the arguments of a FileError if it cannot."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            check_writable(path_of(self.folder, 0))
            for path in self.folder.glob(FILES):
                path.unlink(missing_ok=True)
        except OSError as error:
            return error.errno or 5, error.strerror or str(error), str(self.folder)
        return None

    def _work(self) -> None:
        period = min(LOOKS, self.patience / 4)
        while not self._over.wait(period):
            with suppress(OSError):  # a full disk, or a folder that has gone, ends no run
                self._look(period)

    def _look(self, period: float) -> None:
        now, run = time.monotonic(), self._run()
        seen = id(run), self._steps(), run.progress() if hasattr(run, "progress") else None
        if moved := seen != self._seen:
            self._seen, self._since = seen, now
        called = self._others()
        if called > self._call:
            self._write(called, "another rank asked")
        elif interrupts.asked > self._asked:
            self._asked = interrupts.asked
            self._write(self._call + 1, "a signal asked")
            if self._communicator is None or self._communicator.own_process or self.rank == 0:
                self._told(f"each rank writes what it does into {self.folder}: minidl report {self.folder}")
        elif moved:
            if self._answered:
                self._write(self._call, "it went on")
            self._answered = False
        elif not self._answered and now - self._since > self.patience + period * min(self.rank, 3):
            self._write(self._call + 1, f"no progress for {self.patience:g} s")  # rank 0 first, if it can
            self._told(f"rank {self.rank} has made no progress for {self.patience:g} s; each rank writes what it does "
                       f"into {self.folder}: minidl report {self.folder}")

    def _others(self) -> int:
        """The last call that another rank's file of this run has."""
        for path in self.folder.glob(FILES):
            with suppress(OSError, ValueError):
                changed = path.stat().st_mtime_ns
                if path != path_of(self.folder, self.rank) and self._known.get(path.name, (0, 0))[0] != changed:
                    state = parsed(path)
                    self._known[path.name] = changed, state.call * (state.run == self._name)
        return max((call for _, call in self._known.values()), default=0)

    def _write(self, call: int, why: str, error: BaseException | None = None) -> None:
        with self._writing:
            self._call, self._answered = call, True
            write_atomic(path_of(self.folder, self.rank), json.dumps(asdict(self.state(why, error))))

    def state(self, why: str, error: BaseException | None = None) -> RankState:
        """The file of this rank now."""
        now, run = time.monotonic(), self._run()
        wait = None if self._communicator is None else self._communicator.published
        if wait is not None and now - wait.looked > FRESH and error is None:
            wait = None
        return RankState(
            self._name, self._command, self._begun, time.time(), self._call, why, self.rank, self.ranks,
            socket.gethostname(), os.getpid(), self.patience, round(now - self._since, 3),
            None if wait is None else Waiting(tuple(map(int, wait.peers)), wait.what, round(now - wait.since, 3)),
            run.doing() if hasattr(run, "doing") else Doing(),
            _stack(self._thread_of_run),
            "" if error is None else " ".join(f"{type(error).__name__}: {error}".split()),
            error is not None and not isinstance(error, RankError))

    def __enter__(self) -> Watcher:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Ends the watch. If a task or a rank failed, or somebody interrupts the run, this rank writes its file."""
        self._over.set()
        self._thread.join()
        if isinstance(error, TaskError | RankError | KeyboardInterrupt):
            with suppress(OSError):
                self._write(self._call + 1, "it ended", error)


def _stack(thread: int) -> tuple[str, ...]:
    """The innermost calls of a thread: file, line and name. `faulthandler` reads them in one go; while Python code goes
    from frame to frame, the thread runs on, and Python 3.11 has crashed there."""
    file = os.memfd_create("stacks")  # in memory: a disk may be full
    try:
        faulthandler.dump_traceback(file, all_threads=True)
        text = os.pread(file, os.fstat(file).st_size, 0).decode(errors="replace")
    finally:
        os.close(file)
    for own in text.split("\n\n"):
        head, *calls = own.splitlines()
        if (named := THREAD.match(head)) and int(named[1], 16) == thread:
            return tuple(f"{call[1]}:{call[2]} {call[3]}" for call in map(CALL.match, calls) if call)[:FRAMES]
    return ()
