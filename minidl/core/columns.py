"""Columns that nobody can change, compressed rows of them, and the loops that run over them.

The arrays of graphs, schedules and programs are read-only, however they were made: a proof holds for what was proved,
so it must not change afterwards.

A loop is written once and runs in two ways: a short one as Python over lists, a long one compiled by numba over arrays.
So small graphs never pay for compilation, and graphs of ten million tasks never pay for Python, nor do searches through
thousands of plans. Proof and simulator share `run_lanes`: earliest starts in lane order, where tasks do not slow each
other down, so that lanes can be timed one by one. The proof counts in unit time, the simulator in the tasks' own times.

This module knows arrays and lists alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import cache, cached_property, wraps
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")
K = TypeVar("K")
Ints = NDArray[np.integer[Any]]
Floats = NDArray[np.floating[Any]]


def read_only(value: T) -> T:
    """The same array, or tuple of arrays, which can no longer be written; other values as they are."""
    for each in value if isinstance(value, tuple) else (value,):
        if isinstance(each, np.ndarray):
            each.setflags(write=False)
    return value


def offsets(sizes: Any) -> Any:
    """Where each of these sizes begins if they follow each other, and where the last one ends, int64."""
    found = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=found[1:])
    return found


def spread(at: Any, values: Any, size: Any, rest: Any = 0, by: np.ufunc | None = None) -> Any:
    """An array of this size (or shape) with `values[i]`, or one value, at each place `at[i]`, and `rest` elsewhere.
    `by`: joins all values of a place, and `rest`; else the last one counts."""
    found = np.full(size, rest, np.asarray(values).dtype)
    if by is None:
        found[at] = values
    else:
        by.at(found, at, values)
    return found


def grouped(pairs: Iterable[tuple[K, T]]) -> dict[K, list[T]]:
    """The values of each key, from pairs (key, value); all in the order of the pairs."""
    found: dict[K, list[T]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found


def in_parts(sizes: Iterable[tuple[T, int]], most: int) -> list[list[T]]:
    """Things with their sizes, in parts of at most `most` together, in their order; a larger one is a part alone."""
    parts, room = list[list[T]](), 0
    for thing, size in sizes:
        if not parts or size > room:
            parts.append([])
            room = most
        parts[-1].append(thing)
        room -= size
    return parts


def column(function: Callable[[Any], T]) -> cached_property[T]:
    """A property that is computed once and whose arrays are read-only."""
    return cached_property(wraps(function)(lambda self: read_only(function(self))))


class Content:
    """The base of a dataclass with arrays among its fields: two are equal if the contents of their fields are."""

    def __init_subclass__(cls) -> None:
        cls.__eq__ = _equal  # type: ignore[method-assign]  # the dataclass makes none then


def _equal(this: Any, other: object) -> bool:
    pairs = ((getattr(this, f.name), getattr(other, f.name)) for f in fields(this) if f.compare)
    return type(this) is type(other) and all(
        a is b or bool(np.array_equal(a, b) if np.ndarray in (type(a), type(b)) else a == b) for a, b in pairs)


class Columns(Content):
    """The base of a frozen dataclass whose fields are arrays, among others: it makes them read-only. Copies and pickles
    have the fields alone, not what is computed from them, and are read-only as well."""

    def __post_init__(self) -> None:
        read_only(tuple(vars(self).values()))

    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        Columns.__post_init__(self)


# ----------------------------------------------------------------------------------------------------------------- rows
@dataclass(frozen=True)
class Rows(Columns):
    """Compressed rows: row i is `ids[ptr[i]:ptr[i + 1]]`."""

    ptr: Ints
    ids: Ints

    @classmethod
    def of(cls, rows: Iterable[Sequence[int]]) -> Rows:
        rows = list(rows)
        ptr = offsets([len(r) for r in rows])
        return cls(ptr, np.fromiter((i for r in rows for i in r), np.int32, int(ptr[-1])))

    @classmethod
    def from_pairs(cls, rows: Ints, ids: Ints, count: int) -> Rows:
        """From (row, id) pairs, in the order of the pairs within a row."""
        return cls(offsets(np.bincount(rows, minlength=count)), ids[np.argsort(rows, kind="stable")].astype(np.int32))

    def __len__(self) -> int:
        return len(self.ptr) - 1

    def __getitem__(self, i: int) -> Ints:
        return self.ids[self.ptr[i] : self.ptr[i + 1]]

    def lists(self) -> list[list[int]]:
        """The rows as lists."""
        ids = self.ids.tolist()
        return [ids[begin:end] for begin, end in pairwise(self.ptr.tolist())]

    def row_of_each(self) -> Ints:
        """For every id, its row."""
        return np.repeat(np.arange(len(self), dtype=np.int32), np.diff(self.ptr))

    def followed_by(self, other: Rows) -> Rows:
        """These rows, followed by the other's."""
        return Rows(np.append(self.ptr, self.ptr[-1] + other.ptr[1:]), np.append(self.ids, other.ids).astype(np.int32))

    def take(self, rows: Ints) -> Rows:
        """Row i of the result is row `rows[i]`; a row may be taken several times."""
        size = np.diff(self.ptr)[rows]
        ptr = offsets(size)
        at = np.arange(ptr[-1], dtype=np.int64) + np.repeat(self.ptr[:-1][rows] - ptr[:-1], size)
        return Rows(ptr, self.ids[at])

    def where(self, mask: NDArray[np.bool_]) -> Rows:
        """The rows at which `mask` is true; the others are empty."""
        return Rows(offsets(np.where(mask, np.diff(self.ptr), 0)), self.ids[mask[self.row_of_each()]])

    def sorted(self) -> Rows:
        """The same rows, ids ascending in each."""
        return Rows(self.ptr, self.ids[np.lexsort((self.ids, self.row_of_each()))])

    def transposed(self, count: int) -> Rows:
        return Rows.from_pairs(self.ids, self.row_of_each(), count)

    def between(self, first: Ints, last: Ints) -> tuple[Rows, Ints]:
        """The edges between actions, from the last task of one to the first of another, and which edges of tasks they
        were. `first`, `last`: of each task's action."""
        target = first[self.row_of_each()]
        kept = np.flatnonzero(first[self.ids] != target)
        kept = kept[np.argsort(target[kept], kind="stable")]
        return Rows.from_pairs(target[kept], last[self.ids[kept]], len(self)), kept


def ends_of_actions(tasks: Ints, second: NDArray[np.bool_]) -> tuple[Ints, Ints]:
    """For each task the first and the last task of its action. `tasks`: in order, lane by lane; `second`: a mask of
    the ones that run as one action with the task before."""
    begin = np.flatnonzero(~second)
    until = np.append(begin[1:], len(tasks))
    return spread(tasks, np.repeat(tasks[begin], until - begin), len(tasks)), spread(
        tasks, np.repeat(tasks[until - 1], until - begin), len(tasks))


# ---------------------------------------------------------------------------------------------------------------- loops
LONG = 50_000  #: from this many steps on a loop is worth compiling
RUNS = 20  #: or once its runs have so many times `LONG` steps together, half a second of Python
writes = True  #: whether compiled loops are kept in files; a process that may only read them sets it to False
_steps: Counter[Callable[..., Any]] = Counter()  #: of each loop in this process


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    import numba

    if not writes:
        from numba.core import caching

        caching._CacheLocator.ensure_cache_path = caching.Cache.save_overload = lambda *_: None
    made = numba.njit(nogil=True, no_cfunc_wrapper=True)(function)
    with suppress(RuntimeError):  # there is no folder to keep it in
        made.enable_caching()
        made._cache._guard_against_spurious_io_errors = lambda: suppress(Exception)  # a full disk
    return made


def prepared(steps: int, *arrays: Any) -> tuple[Any, ...]:
    """The arrays in the form in which `run_loop` passes them on. Use it for arrays that several calls share, or that
    nobody reads afterwards."""
    return arrays if steps >= LONG else tuple(a.tolist() for a in arrays)


def filled(steps: int, count: int, value: float) -> Any:
    """`count` times one value, in the form in which `run_loop` passes it on."""
    return np.full(count, value) if steps >= LONG else [value] * count


def _plain(argument: Any) -> Any:
    """A read-only array as another array on the same memory, so that numba compiles a loop for one kind of array."""
    if not isinstance(argument, np.ndarray) or argument.flags.writeable:
        return argument
    where = argument.__array_interface__
    return np.asarray(SimpleNamespace(__array_interface__={**where, "data": (where["data"][0], False)}, owner=argument))


def run_loop(function: Callable[..., Any], steps: int, *arguments: Any) -> tuple[Any, SimpleNamespace]:
    """Calls `function(*arguments)`, which works in place on its arrays, and returns (its result, its arguments after
    the call, by the names of its parameters).

    `function` may use nothing but loops, numbers, indexing, and `heapq` on lists that it makes itself. Below `LONG`
    steps it gets lists in place of arrays, unless this process runs it often; `prepared` arrays are passed on as they
    are.
    """
    names = function.__code__.co_varnames[: len(arguments)]
    if not any(isinstance(a, list) for a in arguments):  # these are prepared for a short run
        _steps[function] += steps
        steps = max(steps, _steps[function] // RUNS)
    if steps >= LONG:
        arguments = tuple(map(_plain, arguments))
        return _compiled(function)(*arguments), SimpleNamespace(**dict(zip(names, arguments, strict=True)))
    lists = [a.tolist() if isinstance(a, np.ndarray) else a for a in arguments]
    result = function(*lists)
    after = [np.array(new, old.dtype) if isinstance(old, np.ndarray) else new
             for new, old in zip(lists, arguments, strict=True)]
    return result, SimpleNamespace(**dict(zip(names, after, strict=True)))


def run_lanes(ptr: Any, tasks: Any, rank: Any, lane_of: Any, pred_ptr: Any, preds: Any, duration: Any, far: Any,
              release: Any, free: Any, *, sync: float = 0.0) -> tuple[int, Floats, Floats, Floats]:
    """(how many tasks ran, begin, end, when the last predecessor was there); the last three by task, -1 if it never
    ran.

    Lane i runs `tasks[ptr[i]:ptr[i + 1]]` in order, not before time `free[i]`, which is set to its end. Task t waits
    for `preds[pred_ptr[t]:pred_ptr[t + 1]]` and until `release[t]`. A predecessor on another lane of its rank counts
    `sync` later, on another rank `far` later: one number per edge, or one for all. `lane_of`: the lane of each task;
    `rank`: the rank of each lane. Where `release` and `far` are empty, they and `sync` do not count. All columns are
    `prepared`.
    """
    n, lanes = len(duration), len(rank)
    of_lanes = [filled(n, lanes, x) for x in (0, -1, 0)]
    of_tasks = [filled(n, n, x) for x in (-1, -1.0, -1.0, 0.0)]
    done, after = run_loop(
        _run_lanes, n, float(sync), int(len(far) > 0), int(len(far) > 1), int(len(release) > 0), ptr, tasks, rank,
        lane_of, pred_ptr, preds, duration, far, release, free, *of_lanes, *of_tasks)
    return done, np.asarray(after.begin), np.asarray(after.end), np.asarray(after.ready)


def _run_lanes(sync, delays, each, waits, ptr, tasks, rank, lane_of, pred_ptr, preds,  # type: ignore[no-untyped-def]
               duration, far, release, free, at, sleeper, stack, waiting, begin, end, ready):
    """Every lane runs until it must wait for a task of another lane, which then wakes it. `waiting[t]`: the first lane
    that waits for task t; `sleeper[lane]`: the next one. `stack`: the lanes that can go on, at first all."""
    done, top = 0, len(stack)
    for lane in range(top):
        stack[lane] = top - 1 - lane
    while top > 0:
        top -= 1
        lane = stack[top]
        i, last, time = ptr[lane] + at[lane], ptr[lane + 1], free[lane]
        while i < last:
            task = tasks[i]
            arrival, blocked = release[task] if waits else 0.0, -1
            for e in range(pred_ptr[task], pred_ptr[task + 1]):
                p = preds[e]
                reach = end[p]
                if reach < 0:
                    blocked = p
                    break
                if delays and lane_of[p] != lane:
                    reach += sync if rank[lane_of[p]] == rank[lane] else far[e * each]
                if reach > arrival:
                    arrival = reach
            if blocked >= 0:
                sleeper[lane], waiting[blocked] = waiting[blocked], lane
                break
            ready[task] = arrival
            if arrival > time:
                time = arrival
            begin[task] = time
            time += duration[task]
            end[task] = time
            done += 1
            other = waiting[task]
            while other >= 0:
                stack[top] = other
                top += 1
                other = sleeper[other]
            i += 1
        at[lane], free[lane] = i - ptr[lane], time
    return done
