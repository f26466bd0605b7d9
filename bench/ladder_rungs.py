"""A rung of the ladder: one way to run a training step; and the time of steps, rungs in turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ladder_cases import Effort
from launches import no_collection


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
    copies the next batch to it and `launch()` does the rest."""

    step: Callable[[], Any]
    clock: Any
    ready_s: float
    peak_bytes: int | None = None
    about: dict[str, Any] = field(default_factory=dict)
    bring: Callable[[], Any] | None = None
    launch: Callable[[], Any] | None = None
    close: Callable[[], None] = lambda: None

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


def interleaved(rungs: Mapping[str, Rung], effort: Effort) -> dict[str, list[float]]:
    """Seconds per step, with groups of all rungs in turn; groups of the first `warm_up` seconds do not count."""

    def turn() -> dict[str, float]:
        return {name: rung.clock.seconds(rung.step, effort.group) for name, rung in rungs.items()}

    with no_collection():
        end = time.perf_counter() + effort.warm_up
        while time.perf_counter() < end:
            turn()
        found, end = [turn() for _ in range(effort.groups)], end + effort.seconds
        while time.perf_counter() < end:
            found.append(turn())
    return {name: [group[name] for group in found] for name in rungs}
