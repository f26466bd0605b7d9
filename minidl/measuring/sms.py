"""How long tasks take with a part of a GPU's multiprocessors (SMs): each by itself, at three counts; and what groups of
tasks need of a GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ..core.graph import TaskGraph
from ..pricing.cost import CostModel
from ..pricing.sms import Sms
from ..runtime.bound import Bound
from .kernel_times import bandwidth

SIZE = 1 << 28  #: bytes by which the bandwidth of the memory is measured: they fill no cache


def measure_sms(graph: TaskGraph, device: Any, progress: Callable[[float], None] | None = None) -> Sms:
    """The times with about a quarter and a half of the SMs, relative to all. Works on copies, so no parameter changes.
    Calls `progress(share done)`. Raises DeviceError if the GPU cannot be divided.

    Each task is repeated in a replayed graph, as its costs are measured; it finds its data in the cache at each count,
    so what fewer SMs add to the time for memory is shown too low.
    """
    total, step = device.sms
    counts = sorted({max(step, round(total * share / step) * step) for share in (0.25, 0.5)})
    bound = Bound(graph, None, device, private=True)
    bound.load_random(np.random.Generator(np.random.Philox(0)))
    device.once([call for task in range(len(graph)) for call in bound.thunks(task)])  # every buffer has a value then
    found = []
    for i, count in enumerate((*counts, total)):
        stream = device.main if count == total else device.streams((0, 1), count)[1]
        programs = [[bound.thunks(task, stream)] for task in range(len(graph))]
        part = None if progress is None else lambda done, i=i: progress((i + done) / (len(counts) + 1))
        found.append(device.task_times(programs, part, stream=stream))
    *fewer, whole = (np.maximum(times, 1e-6) for times in found)
    slower = np.maximum(np.array(fewer) / whole, 1.0).T.tolist()
    times = {graph.name(t): slower[t] for t in range(len(graph)) if graph[t].iteration == 0}
    return Sms(total, step, counts, times, bandwidth(device, SIZE))


def needs(graph: TaskGraph, cost: CostModel, groups: Mapping[str, str], device: Any) -> dict[str, tuple[float, float]]:
    """Group of tasks -> the shares of the memory's bandwidth, measured now, and of the SMs that they need while they
    run alone, for `CoRun.needs`. A task needs as many SMs as its largest launch fills; tasks count by their time."""
    bound, most = Bound(graph, None, device, private=True), bandwidth(device, SIZE)
    found: dict[str, list[float]] = {}
    for task, time in enumerate(cost.durations(graph).tolist()):
        launches = graph.launches[task]
        total = found.setdefault(groups.get(graph.name(task), ""), [0.0, 0.0, 0.0])
        filled = max((device.filled(launch, bound.array) for launch in launches), default=0.0)
        for i, part in enumerate((time, float(graph.bytes[task]) / most, time * filled)):
            total[i] += part
    return {name: (min(1.0, moved / max(time, 1e-9)), min(1.0, filled / max(time, 1e-9)))
            for name, (time, moved, filled) in found.items() if name}
