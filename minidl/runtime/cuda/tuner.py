"""Autotuning: which of a library's algorithms or plans runs a call. The first few are timed when a call is bound first,
and the fastest is kept by key, so that every executor takes the same one and bits agree.

What is kept lies in one file, too, for the next process, and for the other ranks of a machine: one of them times, and
all take what it chose. So a run is repeated bit by bit where the file is the same. The key tells all that a choice
depends on: the library's version, the GPU and its driver, operation, shapes, strides, types, alignments, and what
arithmetic is allowed. Candidates are timed on memory of their own, so that nobody's numbers change, and on a stream of
their own, which waits for nobody. Knows candidates as names and calls, no libraries.
"""

from __future__ import annotations

import json
import os
import sqlite3
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.array_utils import byte_bounds

from ...kernels import Thunk, cuda
from ..device import DeviceError
from . import clock
from .lanes import capture

CANDIDATES = 8  #: that are timed, the first that a library names
MARGIN = 0.97  #: of the time of the first candidate: what another must be faster than, so that noise decides nothing
WAIT = 600.0  #: seconds in which another process should have timed what it is timing
BLOCK = 1 << 20  #: bytes of random numbers, repeated

Candidate = tuple[str, Callable[[], Thunk]]  #: a name by which it can be found again, and what binds a call to be timed


def folder() -> Path:
    """Where choices are kept: MINIDL_CACHE, or the user's folder for caches."""
    return Path(os.environ.get("MINIDL_CACHE")
                or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "minidl")


class Tuner:
    """The choices for one library on one device. `library`: its name and version; `refusals`: what it raises where a
    candidate cannot run after all."""

    def __init__(self, driver: Any, library: str, *refusals: type[Exception]) -> None:
        about = driver.describe()
        self.driver, self.refusals = driver, refusals
        self.about = [library, *(about[key] for key in ("name", "capability", "memory_bytes", "driver"))]
        self._chosen: dict[str, str] = {}
        self._timed = self._told = False
        self._noise: dict[str, Any] = {}
        self._stream: Any = None

    @property
    def stream(self) -> Any:
        """That calls are to be bound to when they are timed."""
        if self._stream is None:
            self._stream = self.driver.stream(0)
        return self._stream

    def choose(self, key: Any, candidates: Callable[[], Iterable[Candidate]]) -> str:
        """The name of the candidate that is taken. `candidates` gives them in the library's order, and is called only
        where the choice is not known. Raises RuntimeError where there is none, or none can run."""
        said = json.dumps([*self.about, repr(key)])
        if said not in self._chosen:
            self._chosen[said] = self._file(lambda known: self._look(known, said, candidates),
                                            lambda: self._time(said, candidates)[0])
        return self._chosen[said]

    def forget(self, key: Any) -> None:
        """Drops a choice that cannot be had any more."""
        said = json.dumps([*self.about, repr(key)])
        self._chosen.pop(said, None)
        self._file(lambda known: known.execute("delete from choices where key = ?", (said,)) and None, lambda: None)

    # ---------------------------------------------------------------------------------------------------------- file
    def _file(self, use: Callable[[sqlite3.Connection], Any], without: Callable[[], Any]) -> Any:
        """What `use` does with the file, which nobody else changes meanwhile; `without` where it cannot be written."""
        path = folder() / "choices.sqlite"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = sqlite3.connect(path, timeout=WAIT, isolation_level=None)
        except (OSError, sqlite3.OperationalError) as error:
            return self._unkept(path, error, without)
        with closing(file):
            try:
                file.execute("begin immediate")
                file.execute("create table if not exists choices (key text primary key, choice text, "
                             "candidates text, microseconds text)")
            except sqlite3.OperationalError as error:
                return self._unkept(path, error, without)
            except sqlite3.DatabaseError as error:
                raise DeviceError(
                    f"{path} holds no choices of kernels ({error}); delete it, and they are made again") from error
            try:
                return use(file)
            finally:
                file.execute("commit")

    def _unkept(self, path: Path, error: Exception, without: Callable[[], Any]) -> Any:
        if not self._told:
            print(f"minidl: choices of kernels are not kept, so another run may have other last bits: {path}: {error}; "
                  f"MINIDL_CACHE names another folder", file=sys.stderr)
        self._told = True
        return without()

    def _look(self, known: sqlite3.Connection, said: str, candidates: Callable[[], Iterable[Candidate]]) -> str:
        row = known.execute("select choice from choices where key = ?", (said,)).fetchone()
        if row is not None:
            return str(row[0])
        choice, names, times = self._time(said, candidates)
        known.execute("insert into choices values (?, ?, ?, ?)",
                      (said, choice, json.dumps(names), json.dumps([round(t, 3) for t in times])))
        return choice

    # --------------------------------------------------------------------------------------------------------- timing
    def _time(self, said: str, candidates: Callable[[], Iterable[Candidate]]) -> tuple[str, list[str], list[float]]:
        """The candidate that is taken, and of all that run their names and microseconds."""
        if not self._timed:
            print(f"minidl: {self.about[0]}: kernels are timed once on {self.about[1]}, as they are met",
                  file=sys.stderr)
        self._timed = True
        names: list[str] = []
        calls: list[Thunk] = []
        refused: list[Exception] = []
        for name, bind in islice(candidates(), CANDIDATES):
            try:
                call = bind()
                call()
                self.driver.synchronize(self.stream)
                capture(self.driver, self.stream, call)
            except self.refusals as error:
                refused.append(error)
                continue
            names.append(name)
            calls.append(call)
        if not names:
            raise RuntimeError(f"{said} cannot be run: {refused[0] if refused else 'the library names none'}")
        times = clock.side_by_side(self.driver, self.stream, calls) if len(calls) > 1 else [0.0]
        fastest = min(range(len(times)), key=times.__getitem__)
        return names[fastest if times[fastest] < MARGIN * times[0] else 0], names, times

    def elsewhere(self, arrays: Sequence[Any]) -> list[Any]:
        """Arrays of the same shapes, strides, types and alignments, in memory of their own with random numbers in it;
        that is kept as long as the arrays."""
        found = []
        for array in arrays:
            low, high = byte_bounds(array)
            inside, nbytes = low % 256, high - low
            memory = self.driver.allocate(inside + nbytes + 256, self.stream)
            self._fill(memory, str(array.dtype))
            there = self.driver.array(memory, array.shape, str(array.dtype), array.strides,
                                      inside + cuda.pointer(array) - low)
            there.memory = memory
            found.append(there)
        return found

    def _fill(self, memory: Any, dtype: str) -> None:
        """Zeros would be computed with less power, and so faster, than what training has."""
        if dtype not in self._noise:
            count = BLOCK // np.dtype(dtype).itemsize
            host = np.random.default_rng(0).standard_normal(count).astype(dtype).view(np.uint8)
            self._noise[dtype] = self.driver.allocate(BLOCK, self.stream)
            self.driver.copy(host, self._noise[dtype], self.stream)()
            self.driver.synchronize(self.stream)

        def part(of: Any, start: int, nbytes: int) -> Any:
            return self.driver.array(of, (nbytes,), "uint8", (1,), start)

        done = min(BLOCK, len(memory))
        self.driver.copy(part(self._noise[dtype], 0, done), part(memory, 0, done), self.stream)()
        while done < len(memory):
            more = min(done, len(memory) - done)
            self.driver.copy(part(memory, 0, more), part(memory, done, more), self.stream)()
            done += more
