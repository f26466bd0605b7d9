"""Autotuning: chooses which of a library's algorithms or plans runs a call. When a call is first bound, the first few
candidates are timed, and the fastest is kept by key, so that every executor uses the same one and bits agree.

Choices are also kept in a file, for later processes and for the other ranks of a machine: one rank times, and all use
its choice. So a run with the same file repeats its bits. The key holds everything that a choice depends on: the
library's version, the GPU and its driver, operation, shapes, strides, types, alignments, and the arithmetic that is
allowed. Candidates are timed on separate memory, so that no values change, and on a separate stream. Knows candidates
as names and calls, no libraries.

With MINIDL_TUNE=first nothing is timed or kept: every call takes the first candidate that runs. Tests of many shapes on
a GPU use it; it is also a way to repeat bits without a file.
"""

from __future__ import annotations

import json
import os
import sqlite3
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import fields, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.array_utils import byte_bounds

from ...kernels import Thunk, cuda
from .. import DeviceError
from . import clock
from .lanes import capture

CANDIDATES = 8  #: how many candidates are timed, in the library's order
MARGIN = 0.97  #: a candidate must beat this share of the first one's time, so that noise does not decide
WAIT = 600.0  #: seconds to wait for another process that is timing
BLOCK = 1 << 20  #: bytes of random numbers, which are repeated

Candidate = tuple[str, Callable[[], Thunk]]  #: its name in the file, and a function that binds its call


def folder() -> Path:
    """Where choices are kept: MINIDL_CACHE, or the user's folder for caches."""
    return Path(os.environ.get("MINIDL_CACHE")
                or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "minidl")


class Tuner:
    """The choices for one library on one device. `library`: its name and version; `refusals`: the errors that it raises
    for a candidate that cannot run."""

    def __init__(self, driver: Any, library: str, *refusals: type[Exception]) -> None:
        about = driver.describe()
        self.driver, self.refusals = driver, refusals
        self.about = [library, *(about[key] for key in ("name", "capability", "memory_bytes", "driver"))]
        self._chosen: dict[str, str] = {}
        self._timed = self._told = False
        self._noise: dict[str, Any] = {}
        self.stream = driver.stream(0)  #: to which calls must be bound for timing

    def choose(self, key: Any, candidates: Callable[[], Iterable[Candidate]],
               usable: Callable[[str], bool] = lambda choice: True) -> str:
        """The name of the chosen candidate. `candidates` returns all in the library's order, and is called only where
        no `usable` choice is known. Raises RuntimeError if there is none, or none can run."""
        entry = json.dumps([*self.about, repr(key)])
        choice = self._choice(entry, candidates)
        return choice if usable(choice) else self._choice(entry, candidates, anew=True)

    def _choice(self, entry: str, candidates: Callable[[], Iterable[Candidate]], anew: bool = False) -> str:
        if entry not in self._chosen or anew:
            if os.environ.get("MINIDL_TUNE") == "first":
                self._chosen[entry] = next(self._running(entry, candidates))[0]
            else:
                with self.driver.alone(), self._file() as file:  # in this order: a thread that captures may need both
                    self._chosen[entry] = self._look(file, entry, candidates, anew)
        return self._chosen[entry]

    # ---------------------------------------------------------------------------------------------------------- file
    @contextmanager
    def _file(self) -> Iterator[sqlite3.Connection | None]:
        """The locked file; None if it cannot be written."""
        path, known = folder() / "choices.sqlite", None
        with ExitStack() as held:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                file = held.enter_context(closing(sqlite3.connect(path, timeout=WAIT, isolation_level=None)))
                file.execute("begin immediate")
                file.execute("create table if not exists choices (key text primary key, choice text, "
                             "candidates text, microseconds text)")
                held.callback(file.execute, "commit")
                known = file
            except (OSError, sqlite3.OperationalError) as error:
                if not self._told:
                    print(f"minidl: choices of kernels cannot be kept, so another run may differ in the last bits: "
                          f"{path}: {error}; set MINIDL_CACHE to another folder", file=sys.stderr)
                self._told = True
            except sqlite3.DatabaseError as error:
                raise DeviceError(
                    f"{path} is not a file of kernel choices ({error}); delete it, and a new one is made") from error
            yield known

    def _look(self, file: sqlite3.Connection | None, entry: str, candidates: Callable[[], Iterable[Candidate]],
              anew: bool) -> str:
        if file is not None and not anew:
            row = file.execute("select choice from choices where key = ?", (entry,)).fetchone()
            if row is not None:
                return str(row[0])
        choice, names, times = self._time(entry, candidates)
        if file is not None:
            file.execute("insert or replace into choices values (?, ?, ?, ?)",
                         (entry, choice, json.dumps(names), json.dumps([round(t, 3) for t in times])))
        return choice

    # --------------------------------------------------------------------------------------------------------- timing
    def _time(self, entry: str, candidates: Callable[[], Iterable[Candidate]]) -> tuple[str, list[str], list[float]]:
        """The chosen candidate; and the names and microseconds of all candidates that run."""
        if not self._timed:
            print(f"minidl: {self.about[0]}: each kernel is timed once on {self.about[1]}, when it is first needed",
                  file=sys.stderr)
        self._timed = True
        names, calls = zip(*self._running(entry, candidates), strict=True)
        times = clock.side_by_side(self.driver, self.stream, calls) if len(calls) > 1 else [0.0]
        fastest = min(range(len(times)), key=times.__getitem__)
        return names[fastest if times[fastest] < MARGIN * times[0] else 0], list(names), times

    def _running(self, entry: str, candidates: Callable[[], Iterable[Candidate]]) -> Iterator[tuple[str, Thunk]]:
        """The first candidates that run and can be captured, with their calls. Raises RuntimeError if there is none."""
        refused: Exception | str = "the library has no candidate"
        found = 0
        for name, bind in islice(candidates(), CANDIDATES):
            try:
                call = bind()
                call()
                self.driver.synchronize(self.stream)
                capture(self.driver, self.stream, call)
            except self.refusals as error:
                refused = error if isinstance(refused, str) else refused
                continue
            found += 1
            yield name, call
        if not found:
            raise RuntimeError(f"{entry} cannot be run: {refused}")

    def elsewhere(self, arrays: Sequence[Any]) -> list[Any]:
        """Arrays of the same shapes, strides, types and alignments in new memory with random numbers. The arrays keep
        the memory alive."""
        found = []
        for array in arrays:
            low, high = byte_bounds(array)
            inside, nbytes = low % 256, high - low
            memory = self.driver.allocate(inside + nbytes + 256, self.stream)
            self._fill(memory, str(array.dtype))
            copy = self.driver.array(memory, array.shape, str(array.dtype), array.strides,
                                     inside + cuda.pointer(array) - low)
            copy.memory = memory
            found.append(copy)
        return found

    def copied(self, call: Any) -> Any:
        """The same call on such arrays."""
        names = [f.name for f in fields(call) if isinstance(getattr(call, f.name), np.ndarray)]
        return replace(call, **dict(zip(names, self.elsewhere([getattr(call, name) for name in names]), strict=True)))

    def _fill(self, memory: Any, dtype: str) -> None:
        """Fills memory with random numbers: with zeros, kernels need less power and run faster than in training."""
        if dtype not in self._noise:
            count = BLOCK // np.dtype(dtype).itemsize
            host = np.random.default_rng(0).standard_normal(count).astype(dtype).view(np.uint8)
            self._noise[dtype] = self.driver.allocate(BLOCK, self.stream)
            self.driver.copy(host, self._noise[dtype], self.stream)()
            self.driver.synchronize(self.stream)

        def part(whole: Any, start: int, nbytes: int) -> Any:
            return self.driver.array(whole, (nbytes,), "uint8", (1,), start)

        done = min(BLOCK, len(memory))
        self.driver.copy(part(self._noise[dtype], 0, done), part(memory, 0, done), self.stream)()
        while done < len(memory):
            more = min(done, len(memory) - done)
            self.driver.copy(part(memory, 0, more), part(memory, done, more), self.stream)()
            done += more
