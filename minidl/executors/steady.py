"""Runs steps whose delayed tasks cross the border: a first step, bodies in turn, and a drain when someone looks.

After any step, whoever reads a parameter (`Tensor.numpy`, an eager op, another executor, a checkpoint) finds what
synchronous training would have left: reading drains first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from .. import device as devices
from .. import tape as tapes
from ..border import Border
from ..crossing import steady
from ..graph import Role, TaskGraph, View
from ..kernels import Thunk
from ..memory import plan_memory
from ..schedule import Schedule
from ..tape import Storage
from .guard import Guard
from .stream import GraphExecutor, StreamExecutor


class SteadyExecutor:
    """Call it with a step's inputs; it returns the step's outputs.

    `schedule(graph)` makes the schedule of each graph of the border: of the bodies, the first step and the drain;
    `lanes` runs each.
    """

    def __init__(self, border: Border, schedule: Callable[[TaskGraph], Schedule], *, device: Any = None, trace: bool = False,
                 memory_limit: int | None = None, lanes: type[StreamExecutor] = StreamExecutor) -> None:
        self.border = border
        self.device = device or tapes.current().device
        specs = list(border.first[0].storages)
        for pair in border.copies.values():
            for s in pair:
                live = Storage(specs[s].name, specs[s].shape, specs[s].dtype, Role.STATE, self.device.allocate(max(specs[s].bytes, 1)))
                specs[s] = replace(specs[s], live=live)
        self._storages = tuple(specs)

        graphs = [replace(g, storages=self._storages) for pair in (border.first, border.body, border.drain) for g in pair]
        schedules = [schedule(g) for g in graphs]
        plans = [plan_memory(g, s, memory_limit) for g, s in zip(graphs, schedules, strict=True)]
        arena = self.device.allocate(max(1, *(p.arena_bytes for p in plans)))  # they take turns
        runs = [lanes(g, s, device=self.device, trace=trace, settles=False, plan=p, arena=arena)
                for g, s, p in zip(graphs, schedules, plans, strict=True)]
        self._first, self._body, self._drain = runs[:2], runs[2:4], runs[4:]
        self._scalars = [self._scalar(s) for s in border.snapshots]
        self._parity, self._pending = 0, False
        self._guard = Guard(forks=True)  # what runs the parts has threads, and a guard of its own

    @property
    def schedule(self) -> Schedule:
        """That of a body."""
        return self._body[0].schedule

    @property
    def graph(self) -> TaskGraph:
        """A body."""
        return self._body[0].graph

    @property
    def peak_bytes(self) -> int:
        """Of the largest part; they share nothing at the same time."""
        return max(run.peak_bytes for run in (*self._first, *self._body, *self._drain))

    @property
    def timeline(self) -> Any:
        """Of the body that ran last, where `trace` was asked for."""
        return self._body[1 - self._parity].timeline

    def _scalar(self, s: int) -> list[Thunk]:
        """Calls that copy the host's scalar to its two copies."""
        spec = self._storages[s]
        view = View(0, spec.shape, devices.strides_of(spec.shape), 0, spec.dtype)
        live = self.device.array(spec.live.data, view)
        return [self.device.copier(live, self.device.array(self._storages[c].live.data, view)) for c in self.border.copies[s]]

    def __call__(self, *inputs: Any) -> Any:
        if tapes.unsettled - {self}:
            tapes.settle()
        with self._guard:
            p = self._parity
            for copies in self._scalars:
                copies[p]()
            run = (self._body if self._pending else self._first)[p]
            self._pending = False  # a step that fails leaves nothing that could be finished
            tapes.unsettled.discard(self)
            result = run(*inputs)
            self._parity, self._pending = 1 - p, True
            tapes.unsettled.add(self)
            return result

    def settle(self) -> None:
        """Finishes the step before: runs its delayed tasks now."""
        tapes.unsettled.discard(self)
        if self._pending:
            with self._guard:
                self._pending = False
                self._drain[1 - self._parity]()

    def close(self) -> None:
        """Settles and ends the worker threads."""
        self.settle()
        for run in (*self._first, *self._body, *self._drain):
            run.close()


def executor(graph: TaskGraph, schedule: Schedule, *, device: Any = None, trace: bool = False,
             memory_limit: int | None = None) -> StreamExecutor | SteadyExecutor:
    """What runs a recorded graph under a schedule, also one in which tasks are late: `4W0@1`. On a device that can
    capture, steps are replayed by one launch."""
    border = steady(graph, schedule).border
    device = device or tapes.current().device
    lanes = GraphExecutor if device.captures else StreamExecutor
    if border is None:
        return lanes(graph, schedule, device=device, trace=trace, memory_limit=memory_limit)
    return SteadyExecutor(border, schedule.only, device=device, trace=trace, memory_limit=memory_limit, lanes=lanes)
