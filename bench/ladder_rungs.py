"""A rung of the ladder: one way to run a training step; and the time of steps, rungs in turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ladder_cases import Effort
from launches import no_collection

SEEN = 5.0  #: seconds between two reports of the samples so far
GROUP = 0.04  #: seconds of a group of steps that suffice


class RungError(RuntimeError):
    """A rung fails while it is timed. `rung`: its name; the cause is its own error."""

    def __init__(self, rung: str) -> None:
        super().__init__(rung)
        self.rung = rung


@contextmanager
def of_rung(name: str) -> Iterator[None]:
    """Errors inside are this rung's. Raises RungError."""
    try:
        yield
    except Exception as error:
        raise RungError(name) from error


class HostClock:
    """The clock of a device whose steps are done when they return."""

    def seconds(self, step: Callable[[], Any], times: int) -> float:
        """Seconds per step, if `times` steps are issued one after another."""
        begin = time.perf_counter()
        for _ in range(times):
            step()
        return (time.perf_counter() - begin) / times

    def wait(self) -> None:
        """Waits until all issued work is done."""


class DeviceClock:
    """Between two events on the main stream of one of our devices: a step ends there. A step before them is not timed:
    on an idle stream the first event happens at once, and the launch of a step would count."""

    def __init__(self, device: Any) -> None:
        self.driver, self.main = device.driver, device.main
        self.begin, self.end = self.driver.event(True), self.driver.event(True)
        self.start, self.stop = self.driver.record(self.begin, self.main), self.driver.record(self.end, self.main)

    def seconds(self, step: Callable[[], Any], times: int) -> float:
        step()
        self.start()
        for _ in range(times):
            step()
        self.stop()
        self.wait()
        return float(self.driver.elapsed(self.begin, self.end)) / 1e6 / times

    def wait(self) -> None:
        self.driver.synchronize(self.main)


class TorchClock:
    """The same on torch's stream."""

    def __init__(self, torch: Any) -> None:
        self.torch = torch
        self.begin, self.end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def seconds(self, step: Callable[[], Any], times: int) -> float:
        step()
        self.begin.record()
        for _ in range(times):
            step()
        self.end.record()
        self.end.synchronize()
        return float(self.begin.elapsed_time(self.end)) / 1e3 / times

    def wait(self) -> None:
        self.torch.cuda.synchronize()


@dataclass
class Rung:
    """A way to run a step, with its own weights. `step()` issues one on the next batch and does not wait; `ready_s`:
    the seconds to prepare it (recording, planning, capturing, compiling). If a step is one graph of ours, `bring()`
    copies the next batch to it and `launch()` does the rest. `resident()`: a step on a batch that is on the device
    already."""

    step: Callable[[], Any]
    clock: Any
    ready_s: float
    peak_bytes: int | None = None
    about: dict[str, Any] = field(default_factory=dict)
    bring: Callable[[], Any] | None = None
    launch: Callable[[], Any] | None = None
    close: Callable[[], None] = lambda: None
    resident: Callable[[], Any] | None = None

    def host_us(self, times: int, call: Callable[[], Any], before: Callable[[], Any] | None = None) -> list[float]:
        """The caller's microseconds for single calls, each issued to an idle device."""
        found = []
        for _ in range(times):
            if before:
                before()
            self.clock.wait()
            begin = time.perf_counter()
            call()
            found.append((time.perf_counter() - begin) * 1e6)
        self.clock.wait()
        return found


def interleaved(rungs: Mapping[str, Rung], effort: Effort,
                seen: Callable[[Mapping[str, list[float]]], None] = lambda samples: None) -> dict[str, list[float]]:
    """Seconds per step, with groups of all rungs in turn, each of `group` steps or of as many as take GROUP seconds;
    groups of the first `warm_up` seconds do not count. `seen` gets the samples so far, every SEEN seconds. Raises
    RungError."""

    def seconds(name: str, times: int) -> float:
        with of_rung(name):
            return float(rungs[name].clock.seconds(rungs[name].step, times))

    def turn() -> dict[str, float]:
        return {name: seconds(name, sizes[name]) for name in rungs}

    with no_collection():
        sizes = {name: max(1, min(effort.group, int(GROUP / seconds(name, 1)))) for name in rungs}
        end = time.perf_counter() + effort.warm_up
        while time.perf_counter() < end:
            turn()
        found: list[dict[str, float]] = []
        end, next_look = time.perf_counter() + effort.seconds, time.perf_counter() + SEEN

        def samples() -> dict[str, list[float]]:
            return {name: [group[name] for group in found] for name in rungs}

        while len(found) < effort.groups or time.perf_counter() < end:
            found.append(turn())
            if time.perf_counter() >= next_look:
                seen(samples())
                next_look = time.perf_counter() + SEEN
    return samples()
