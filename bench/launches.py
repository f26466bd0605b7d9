"""A measurement of launches: a row with a name, a description, and a function that returns samples.

All samples are microseconds per call: `host` is the time of the issuing thread, `device` the time between two queued
calls on the device; `whole` is the time to issue everything, for a row about many calls.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from common import spread

Samples = dict[str, list[float]]


@dataclass(frozen=True)
class Row:
    """`measure()` returns samples by kind; `facts`: the numbers that distinguish rows of one sort (kernels, branches,
    bytes)."""

    group: str
    name: str
    words: str
    measure: Callable[[], Samples]
    facts: Mapping[str, Any] = field(default_factory=dict)


class Missing(Exception):
    """This machine lacks something that a row needs; the message names it."""


def measured(rows: Iterable[Row]) -> Iterator[dict[str, Any]]:
    """The rows of a record, one by one. A row that cannot be measured says why, and the next one follows."""
    for row in rows:
        entry: dict[str, Any] = {"group": row.group, "name": row.name, "words": row.words, **row.facts}
        try:
            with no_collection():
                entry["us"] = {kind: spread(samples, 1.0) for kind, samples in row.measure().items()}
        except ModuleNotFoundError as error:
            entry["missing"] = f"{error.name} is not installed"
        except Missing as error:
            entry["missing"] = str(error)
        except Exception as error:  # the failure of one library does not stop the others
            entry["missing"] = " ".join(f"failed: {type(error).__name__}: {error}".split())[:300]
            print(f"{row.name}: {entry['missing']}", file=sys.stderr)
        yield entry


@contextmanager
def no_collection() -> Iterator[None]:
    """No garbage collection within this context."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def bursts(call: Callable[[], Any], calls: int, rounds: int, after: Callable[[], Any] = lambda: None) -> list[float]:
    """Microseconds per call, in rounds of `calls` calls. A first round, and `after` after each round, are not
    measured."""
    samples = []
    for _ in range(rounds + 1):
        begin = perf_counter()
        for _ in range(calls):
            call()
        samples.append((perf_counter() - begin) / calls * 1e6)
        after()
    return samples[1:]


def pieces(count: int, branches: int) -> list[list[int]]:
    """Kernels 0 to count - 1, distributed over the branches in turn."""
    return [list(range(b, count, branches)) for b in range(branches)]


#: number of branches of a chain (0: two streams in turn) -> description
CHAINS = {1: "straight", 2: "2 branches", 4: "4 branches", 8: "8 branches", 0: "changing streams at every kernel"}
