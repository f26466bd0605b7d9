"""Rows of a benchmark of launches: data with a function that measures, ways to time one call, and the time that all
rows share.

All samples are microseconds, by kind: `host`: the issuing thread is busy; `device`: from one queued call to the next
where they run; `first`: from a single call until its first instruction has run; `done`: until the host knows its end.
"""

from __future__ import annotations

import gc
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import numpy as np
from common import spread

#: kind -> samples of a call; or kind -> a number of calls -> samples of them all
Samples = Mapping[str, Any]
LENGTHS = (1, 10, 100, 1000, 10_000)  #: calls, tasks or nodes of one launch
BURST = 0.002  #: seconds of calls in a row that are timed together
MOST = 2.0  #: seconds that suffice for a row
TAIL = {"p99": (99, 500), "p99.9": (99.9, 1000), "max": (100, 500)}  #: name -> percentile, and the samples it needs


@dataclass(frozen=True)
class Row:
    """`how(bench)` measures. `facts`: the numbers that distinguish rows of one sort. `share`: of the time, beside the
    other rows."""

    group: str
    name: str
    what: str
    how: Callable[[Any], Samples]
    facts: Mapping[str, Any] = field(default_factory=dict)
    share: float = 1.0
    unit: str = "us"


class Missing(Exception):
    """This machine lacks something that a row needs; the message names it."""


class Over(BaseException):
    """The time of all rows is over."""


class Bench:
    """Ways to time calls. `until`: when the time of the present row is over, `end`: when that of all rows is."""

    until = end = float("inf")

    def rounds(self, least: int = 4, most: int = 200) -> Iterator[int]:
        for i in range(most):
            if i >= least and perf_counter() >= self.until:
                return
            yield i

    @contextmanager
    def part(self, share: float) -> Iterator[None]:
        """Within, only this share of the row's time is left."""
        before, now = self.until, perf_counter()
        self.until = now + min(MOST, before - now) * share
        try:
            yield
        finally:
            self.until = before

    def bursts(self, call: Callable[[], Any], most: int = 1000, after: Callable[[], Any] = lambda: None) -> list[float]:
        """Microseconds per call, of up to `most` calls in a row. The first calls, and `after`, are not timed."""
        for _ in range(2):  # the first one may compile
            begin = perf_counter()
            call()
            once = perf_counter() - begin
            after()
        calls, samples = max(1, min(most, int(BURST / once))), []
        for _ in self.rounds():
            begin = perf_counter()
            for _ in range(calls):
                call()
            samples.append((perf_counter() - begin) / calls * 1e6)
            after()
        return samples[1:]

    def singles(self, call: Callable[..., Any], before: Callable[[], Any] | None = None,
                after: Callable[[Any], Any] = lambda made: None, least: int = 50, most: int = 20_000) -> list[float]:
        """Microseconds of single calls, each on what `before` has made. `after` gets the call's result, and neither of
        them is timed."""
        samples = []
        for _ in self.rounds(least, most):
            given = () if before is None else (before(),)
            begin = perf_counter()
            made = call(*given)
            samples.append((perf_counter() - begin) * 1e6)
            after(made)
        return samples[1:]

    def over(self, samples: Callable[[int], Samples], lengths: Sequence[int] = LENGTHS) -> Samples:
        """`samples(n)` for each n, as far as the time allows, and for two of them at least."""
        found: dict[str, dict[int, list[float]]] = {}
        for i, n in enumerate(lengths):
            if i > 1 and perf_counter() >= self.until:
                break
            with self.part(1 / (len(lengths) - i)):
                for kind, values in samples(n).items():
                    found.setdefault(kind, {})[n] = values
        return found


def entered(made: Any) -> Any:
    """A context, which may already be one."""
    return made if hasattr(made, "__enter__") else nullcontext(made)


def measured(rows: Sequence[Row], bench: Bench, end: float) -> Iterator[dict[str, Any]]:
    """The rows of a record, one by one, until `end`: the time is divided among the rows that are left. A row that
    cannot be measured, or was not reached, says why, and the next one follows."""
    bench.end, slack = end, 0.8  # the preparation of a row takes time as well
    for i, row in enumerate(rows):
        entry: dict[str, Any] = {"group": row.group, "name": row.name, "what": row.what, "unit": row.unit,
                                 **row.facts}
        left = bench.end - perf_counter()
        bench.until = perf_counter() + min(MOST, slack * left * row.share / sum(other.share for other in rows[i:]))
        try:
            with at_most(left), no_collection():
                entry |= summary(row.how(bench))
        except ModuleNotFoundError as error:
            entry["missing"] = f"{error.name} is not installed"
        except (Missing, Over) as error:
            entry["missing"] = str(error)
        except Exception as error:  # the failure of one library does not stop the others
            entry["missing"] = " ".join(f"failed: {type(error).__name__}: {error}".split())[:300]
            if getattr(error, "obj", None) is np:  # as numba-cuda for np.row_stack
                entry["missing"] = (f"a package asks for np.{getattr(error, 'name', '')}, which NumPy {np.__version__} "
                                    f"does not have: take an older NumPy, or a newer version of the package")
            print(f"{row.name}: {entry['missing']}", file=sys.stderr)
        yield entry


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raises Over within, when the time is over, and again each second if somebody catches it. A call into a library
    that does not return is not ended."""
    if seconds <= 0:
        raise Over("not reached: the time was over")
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def over(*_: Any) -> None:
        raise Over("not finished: the time was over")

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def no_collection() -> Iterator[None]:
    """No garbage collection within this context."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


# -------------------------------------------------------------------------------------------------------------- numbers
def summary(samples: Samples) -> dict[str, Any]:
    """The values of a row: `us`, percentiles by kind, and `fit`, lines by kind. An entry of another process stays."""
    if samples.keys() & {"us", "fit"}:
        return dict(samples)
    if empty := [kind for kind, found in samples.items() if not found]:
        raise Missing(f"no sample of {', '.join(empty)}")
    fits = {kind: line(found) for kind, found in samples.items() if isinstance(found, Mapping)}
    return {"fit": fits} if fits else {"us": {kind: percentiles(found) for kind, found in samples.items()}}


def percentiles(samples: list[float]) -> dict[str, float]:
    return spread(samples, 1.0) | {name: round(float(np.percentile(samples, q)), 5)
                                   for name, (q, least) in TAIL.items() if len(samples) >= least}


def line(found: Mapping[int, list[float]]) -> dict[str, Any]:
    """Medians as `fixed` + `each` * n, the line whose relative errors have the least squares; `off`: the largest one of
    them. `points`: the samples at each n."""
    points = {n: spread(samples, 1.0) for n, samples in found.items()}
    n, t = np.array([*points], float), np.array([point["median"] for point in points.values()])
    fixed, each = np.linalg.lstsq(np.column_stack([1 / t, n / t]), np.ones(len(n)), rcond=None)[0]
    return {"fixed": round(float(fixed), 5), "each": round(float(each), 5),
            "off": round(float(np.max(np.abs(fixed + each * n - t) / t)), 4), "points": points}


def said(row: Mapping[str, Any]) -> str:
    """The values of a row as text, or why it has none."""
    if "missing" in row:
        return str(row["missing"])
    return ", ".join([
        *(f"{kind} {_digits(f['fixed'])} + {_digits(f['each'])} n us (n to {max(map(int, f['points']))}, off by "
          f"{100 * f['off']:.0f} %)" for kind, f in row.get("fit", {}).items()),
        *(f"{kind} {_digits(t['median'])} us ({_digits(t['p10'])} to {_digits(t['p90'])}"
          + "".join(f", {name} {_digits(t[name])}" for name in TAIL if name in t) + ")"
          for kind, t in row.get("us", {}).items())]) + _rate(row)


def _digits(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def _rate(row: Mapping[str, Any]) -> str:
    times = row.get("us", {}).get("device") or row.get("us", {}).get("host")
    return f", {row['bytes'] / times['median'] / 1000:.3g} GB/s" if times and row.get("bytes", 0) >= 1 << 20 else ""


def nothing_of(count: int) -> Callable[..., None]:
    """A function that does nothing, of so many arguments."""
    space: dict[str, Any] = {}
    exec(f"def nothing({', '.join(f'a{i}' for i in range(count))}):\n    pass\n", space)
    return space["nothing"]


def pieces(count: int, branches: int) -> list[list[int]]:
    """Kernels 0 to count - 1, distributed over the branches in turn."""
    return [list(range(b, count, branches)) for b in range(branches)]


#: number of branches of a chain (0: two streams in turn) -> description
CHAINS = {1: "straight", 2: "2 branches", 4: "4 branches", 8: "8 branches", 0: "changing streams at every call"}
