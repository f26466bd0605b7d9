"""The bandwidth to far memory and back: on the CPU a file, on CUDA the host."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import numpy as np

from ..core.graph import Launch, View
from ..pricing.cost import Link
from .measure import undisturbed

SIZE = 1 << 24  #: bytes that are copied at once, more than caches hold
REPEATS = 8


def measure_far(device: Any) -> Link:
    """Microseconds of the copies of D and H, as they run in a step: the mean of both directions. All pages of the file
    have been touched before, and those that the system keeps in RAM are as fast as RAM. Raises OSError if there is no
    room for the file."""
    memory = device.far(SIZE), device.allocate(SIZE)
    ends = [View(i, (SIZE // 4,), (1,), 0, "float32") for i in (0, 1)]
    calls = [device.bind(Launch("copy", (a,), (b,)), lambda view: device.array(memory[view.storage], view))
             for a, b in (ends, ends[::-1])]
    times = np.empty((1 + REPEATS, 2))
    for repeat in range(1 + REPEATS):
        for i, way in enumerate(calls):
            begin = perf_counter()
            device.once(way)
            device.synchronize()
            times[repeat, i] = (perf_counter() - begin) * 1e6
    return Link(bandwidth=SIZE / float(undisturbed([times[1:]]).mean()))
