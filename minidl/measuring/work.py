"""The work of a graph's tasks: by kernel family, with the least time for it on a device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ..core.columns import Floats
from ..core.graph import Launch, TaskGraph
from ..core.tasks import as_recorded
from ..core.work import Work
from ..kernels import KERNELS
from ..kernels.group import shared_out
from .kernel_times import bandwidth, rate

BALANCE = 2.0  #: flops that take as long as a byte, if no rates are known
SIZES = (1 << 14, 1 << 18, 1 << 22, 1 << 26)  #: bytes for which the bandwidth of a floor is measured
Floor = Callable[[Floats, Floats], Floats]  #: microseconds that so many flops and bytes take at least


def work_of(graph: TaskGraph, floor: Floor | None = None) -> Work:
    """The work of the tasks that launch kernels. `floor`: on the device of the run."""
    sums = defaultdict[tuple[int, str], list[float]](lambda: [0.0, 0.0])
    for key, launches in zip(as_recorded(graph.keys).tolist(), graph.launches, strict=False):
        for family, flops, nbytes in (part for launch in launches for part in work_of_launch(launch)):
            row = sums[key, family]
            row[0] += flops
            row[1] += nbytes
    rows = sorted(sums)
    families = sorted({family for _, family in rows})
    key, at = np.array([(k, families.index(f)) for k, f in rows], np.int64).reshape(-1, 2).T
    every, moved = np.array([sums[row] for row in rows]).reshape(-1, 2).T
    least = np.maximum(every / BALANCE, moved) if floor is None else floor(every, moved)
    share = np.maximum(least, 1e-9)  # a launch may do nothing that counts
    _, task = np.unique(key, return_inverse=True)
    return Work(tuple(families), key, at, share / np.bincount(task, share)[task], every, moved,
                None if floor is None else least)


def work_of_launch(launch: Launch) -> Iterator[tuple[str, float, float]]:
    """(kernel family, flops, bytes) of a launch, or of each member of a group."""
    for one in _members(launch):
        if (kernel := KERNELS.get(one.kernel)) is not None:  # a sum over ranks is no kernel
            yield (kernel.reference.__module__.rpartition(".")[2],
                   float(kernel.flops(one.reads, one.writes)) if kernel.flops else 0.0,
                   sum(view.size * np.dtype(view.dtype).itemsize for view in (*one.reads, *one.writes)))


def _members(launch: Launch) -> list[Launch]:
    """The launches of a group of weight gradients, without scratch; any other launch alone."""
    of = dict(launch.constants)["of"] if launch.kernel == "group" else ()
    return [Launch(member[0], tuple(reads), tuple(writes))
            for member, (_, reads, writes, _) in zip(of, shared_out(launch.views, of), strict=True)] or [launch]


def by_rates(flops_per_us: float, bytes_per_us: float) -> Floor:
    """A roofline of two numbers."""
    return lambda flops, nbytes: np.maximum(flops / flops_per_us, nbytes / bytes_per_us)


def of_device(device: Any) -> Floor:
    """The least microseconds for flops and bytes on a device, by its rate and its bandwidth, measured now: about a
    second. The bandwidth is the best for so many bytes or more, of SIZES: fewer bytes are not slower, but their calls
    are a larger share of the measured time."""
    most, known = rate(device), [bandwidth(device, size) for size in SIZES]
    best = np.maximum.accumulate(known[::-1])[::-1]

    def least(flops: Floats, nbytes: Floats) -> Floats:
        return np.maximum(flops / most, nbytes / best[np.minimum(np.searchsorted(SIZES, nbytes), len(SIZES) - 1)])

    return least
