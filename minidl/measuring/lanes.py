"""The costs of lanes of the CPU beside each other: hand-overs, bytes that cross from one core to the other, and the
bandwidth of the memory that they share.

They are properties of the machine and of the kind of lanes, not of a graph. Lanes are held to cores of their own while
they are measured: if a busy machine let both run on one core, hand-overs would look slow, and crossing free.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from ..core.graph import Launch
from ..devices.lanes import Work
from ..kernels import Thunk
from ..pricing.cost import Cross
from ..pricing.memory import CACHE, Memory

#: the cost of crossing if it cannot be measured: about 0.1 us a KB in all
ASSUMED = Cross(read=5e-5, write=5e-5, source="assumed")
TOPOLOGY = Path("/sys/devices/system/cpu")
ROUNDS = 5  #: of each measurement
COPIES, PIECES = 8, 4  #: of a lane in a round that measures the bandwidth: copies, in turn of so many pieces
SIZES = (1 << 23, 1 << 26)  #: the least and the most bytes that are copied then
OWN = 1 << 22  #: the least of them of each lane, so that no core's own cache holds them


def measure_lanes(device: Any) -> dict[str, Any]:
    """The fields of a CostModel that say what the lanes of a device cost each other."""
    return {"cores": cores(), **_measured(device, device.lanes_used, lane_cores())}


def cores() -> int:
    """How many cores this process may use; two threads of one core count once."""
    return len(_apart())


def _apart() -> tuple[int, ...]:
    """A thread of each core that this process may use."""
    own = os.sched_getaffinity(0)
    return tuple(sorted({min(own & siblings(core)) for core in own}))


@cache
def _measured(device: Any, kind: str, pair: tuple[int, ...]) -> dict[str, Any]:
    """Measured once in a process for each kind of lanes."""
    sync, wake = measure_hand_over(device, pair)
    spin, slept = device.spin(), sync
    if spin:
        slept, wake = measure_hand_over(device, pair, 2 * spin)
    return {"sync": sync, "spin": spin, "doze": max(0.0, slept - sync), "wake": wake,
            "cross": measure_cross(device, pair)}


def lane_cores() -> tuple[int, ...]:
    """The two cores to which two lanes can be held; fewer if there are no two, or if the system refuses."""
    cores = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, cores)
    except OSError:
        return ()
    return two_cores(frozenset(cores))


def two_cores(cores: frozenset[int]) -> tuple[int, ...]:
    """Two of these cores, if there are two; if there is a choice, not two threads of one core."""
    first, *others = sorted(cores)
    same = siblings(first)
    return (first, *sorted(others, key=lambda core: (core in same, core))[:1])


def siblings(core: int) -> set[int]:
    """The threads of a core, of which one is given."""
    found = {core}
    with suppress(OSError, ValueError):  # the machine does not say
        for part in (TOPOLOGY / f"cpu{core}/topology/thread_siblings_list").read_text().strip().split(","):
            low, _, high = part.partition("-")
            found.update(range(int(low), int(high or low) + 1))
    return found


def probe(lanes: list[list[int]], waits: list[tuple[int, int]], calls: Callable[[int, Any], list[Thunk]]) -> Work:
    """Work that is only to be timed."""
    return Work([f"probe {i}" for i in range(len(lanes))], [0] * len(lanes), lanes, waits, calls, str)


def stamped(device: Any, work: Work, cores: tuple[int, ...] = ()) -> Any:
    """An array (ROUNDS, tasks, 3), by the number of the task: when each was issued, started and ended, in microseconds,
    in each of some runs after a first one. `cores`: lane i runs on core i of these."""
    count, calls = sum(map(len, work.tasks)), work.calls

    def held(task: int, stream: Any) -> list[Thunk]:
        return calls(task, stream) if task < count else [partial(os.sched_setaffinity, 0, {cores[task - count]})]

    if len(cores) >= len(work.tasks):
        work = probe([[count + i, *tasks] for i, tasks in enumerate(work.tasks)], list(work.waits), held)
    before, lanes = os.sched_getaffinity(0), device.lanes(work, trace=True)
    stamps = []
    try:
        lanes.run()
        for _ in range(ROUNDS):
            lanes.run()
            stamps.append(np.concatenate(lanes.stamps()) * 1e6)
    finally:
        lanes.close()
        if cores:
            os.sched_setaffinity(0, before)
    return np.array(stamps)[:, np.argsort([t for lane in work.tasks for t in lane])][:, :count]


def _least(times: Any) -> float:
    """The least of the rounds' medians: other work on the machine only adds to it. `times`: (ROUNDS, samples)."""
    return float(np.median(times, axis=1).min())


def stamp_overhead(device: Any) -> float:
    """Microseconds from one stamp to the next where nothing runs between."""
    stamps = stamped(device, probe([[*range(1000)]], [], lambda task, stream: []))
    return _least(stamps[..., 2] - stamps[..., 1])


def measure_cross(device: Any, cores: tuple[int, ...], rounds: int = 40, nbytes: int = 1 << 14) -> Cross:
    """`cross` of a CostModel, in microseconds a byte: one lane writes and reads what the other one, or it itself, has
    just touched. With fewer than two cores nothing crosses, so it is assumed."""
    if len(cores) < 2:
        return ASSUMED
    theirs, own, copy, zeros = (np.zeros(nbytes // 4, np.float32) for _ in range(4))
    # by four: the other lane writes, this one reads what the other wrote, writes itself, reads what it wrote itself
    calls: list[list[Thunk]] = [[partial(np.square, source, out=to)] for source, to in
                                ((zeros, theirs), (theirs, copy), (zeros, own), (own, copy))]
    tasks = range(4 * rounds)
    lanes = [[t for t in tasks if t % 4], [t for t in tasks if not t % 4]]
    waits = [pair for t in lanes[1] for pair in ((t + 1, t), (t + 4, t + 3)) if pair[0] < 4 * rounds]
    stamps = stamped(device, probe(lanes, waits, lambda task, stream: calls[task % 4]), cores)
    far_write, far_read, write, read = (_least((stamps[..., 2] - stamps[..., 1])[:, i::4]) for i in range(4))
    return Cross(max(0.0, far_read - read) / nbytes, max(0.0, far_write - write) / nbytes, "measured")


def measure_memory(device: Any, nbytes: int) -> Memory | None:
    """`memory` of a CostModel for a step with about so many bytes, in bytes per microsecond: of one lane, and of one on
    each core; None if there are no two, or if a core's own cache holds the step."""
    if nbytes <= CACHE or len(lane_cores()) < 2:
        return None
    return _measured_memory(device, device.lanes_used, _apart(), 1 << (int(np.clip(nbytes, *SIZES)) - 1).bit_length())


@cache
def _measured_memory(device: Any, kind: str, cores: tuple[int, ...], nbytes: int) -> Memory:
    """Measured once in a process for each kind of lanes and size."""
    return Memory(copied(device, cores[:1], nbytes), copied(device, cores, nbytes), len(cores))


def copied(device: Any, cores: tuple[int, ...], nbytes: int) -> float:
    """The bytes per microsecond that lanes on these cores read and write together if each copies its part of so many.
    They begin when all can. Where other work stops a lane, the others are as fast as without it."""
    count = len(cores)
    size = max(nbytes // count, OWN) // (8 * PIECES)
    data = np.ones((count, PIECES, 2, size), np.float32)
    # without Python between the copies, if the lanes are native
    copy = [[device.bind(Launch("relu", (source,), (to,)), lambda array: array) for source, to in own] for own in data]
    lanes = [[lane, *range(count + lane * COPIES, count + (lane + 1) * COPIES)] for lane in range(count)]
    waits = [(own[1], other) for own in lanes for other in range(count) if other != own[0]]
    calls: list[list[Thunk]] = [[]] * count + [own[i % PIECES] for own in copy for i in range(COPIES)]
    stamps = stamped(device, probe(lanes, waits, lambda task, stream: calls[task]), cores)
    return 8 * size * count / _least((stamps[..., 2] - stamps[..., 1])[:, count:])


def measure_hand_over(device: Any, cores: tuple[int, ...], busy: float = 0.0) -> tuple[float, float]:
    """Microseconds, of two lanes that take turns: from the end of a task until the task that awaits it on the other
    lane starts; and from its end until its own lane goes on. `busy`: about how long each task takes."""
    data = np.ones(max(1, int(busy * 1e3)), np.float32)  # at most some elements a nanosecond
    calls: list[Thunk] = [partial(np.sqrt, data, out=data)] * 4 if busy else []
    turns = 12 if busy else 200
    lanes = [[*range(0, turns, 2)], [*range(1, turns, 2)]]
    stamps = stamped(device, probe(lanes, [(t + 1, t) for t in range(turns - 1)], lambda task, stream: calls), cores)
    issued, start, end = (stamps[..., i] for i in range(3))
    return _least(start[:, 1:] - end[:, :-1]), _least(issued[:, 2:] - end[:, :-2])
