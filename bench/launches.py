"""What a measurement of launches is: a row with a name, a line of plain words, and a function that gives samples.

All samples are microseconds for one call: `host` is how long the thread that issues is busy, `device` how far apart the
calls lie where they run, once they are queued; `whole` is one issue of everything, where a row is about many.
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
    """`measure()` gives samples by kind; `facts`: the numbers that tell rows of one sort apart (kernels,
    branches, bytes)."""

    group: str
    name: str
    words: str
    measure: Callable[[], Samples]
    facts: Mapping[str, Any] = field(default_factory=dict)


class Missing(Exception):
    """What a row needs and this machine has not; the message says which."""


def measured(rows: Iterable[Row]) -> Iterator[dict[str, Any]]:
    """The rows of a record, one by one. A row that cannot be measured says why, and the others go on."""
    for row in rows:
        entry: dict[str, Any] = {"group": row.group, "name": row.name, "words": row.words, **row.facts}
        try:
            with no_collection():
                entry["us"] = {kind: spread(samples, 1.0) for kind, samples in row.measure().items()}
        except ModuleNotFoundError as error:
            entry["missing"] = f"{error.name} is not installed"
        except Missing as error:
            entry["missing"] = str(error)
        except Exception as error:  # one library's trouble is not the others'
            entry["missing"] = " ".join(f"failed: {type(error).__name__}: {error}".split())[:300]
            print(f"{row.name}: {entry['missing']}", file=sys.stderr)
        yield entry


@contextmanager
def no_collection() -> Iterator[None]:
    """Garbage is not collected meanwhile."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def bursts(call: Callable[[], Any], calls: int, rounds: int, after: Callable[[], Any] = lambda: None) -> list[float]:
    """Microseconds a call, in rounds of some calls; `after` each round, and one round before, are not measured."""
    samples = []
    for _ in range(rounds + 1):
        begin = perf_counter()
        for _ in range(calls):
            call()
        samples.append((perf_counter() - begin) / calls * 1e6)
        after()
    return samples[1:]


def pieces(count: int, branches: int) -> list[list[int]]:
    """Kernels 0 to count - 1, dealt out to the branches in turn."""
    return [list(range(b, count, branches)) for b in range(branches)]


#: kinds of chains: how many branches (0: two streams that take turns), and how that is said
CHAINS = {1: "straight", 2: "2 branches", 4: "4 branches", 8: "8 branches", 0: "changing streams at every kernel"}
