"""The cost of links between ranks: of a message, and of a sum over ranks. All ranks measure together."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from socket import gethostname
from time import perf_counter
from typing import Any

import numpy as np

from ..core.graph import View
from ..core.schedule import RankGrid
from ..core.tasks import Kind
from ..devices.device import cpu
from ..pricing.cost import CostModel, Cross, Link
from ..runtime.comm import SLOTS, Communicator, Host
from ..runtime.comm.flight import Entry, Flight
from ..runtime.comm.handover import handover
from .lanes import siblings
from .measure import transfer_time

SIZES = (8, 2**18)  #: bytes of the messages that measure a link
REPEATS, ROW = 20, 8  #: of each measurement, and messages in a row
TASK = 2**21  #: bytes that a task reads and writes: more than a core's own cache holds


def measure_messages(communicator: Communicator, grid: RankGrid) -> Link:
    """The slowest link between two consecutive ranks of a replica, in microseconds and bytes per microsecond; the same
    on every rank. On one machine the ranks' own cores move the messages, between tasks."""
    size = grid.ranks
    found = [_between(communicator, first + a, first + (a + 1) % size)
             for first in range(0, grid.size, size) for a in range(size if size > 2 else size - 1)]
    return max(found, key=lambda link: float(link.time(SIZES[1])))


def _between(communicator: Communicator, first: int, second: int) -> Link:
    """The link of these two ranks: on one machine the time that both take of their cores for a message, between tasks;
    between machines half the time of a message there and back."""
    hosts, rank = communicator.gather(gethostname()), communicator.rank
    core, pair = hosts[first] == hosts[second], (first, second)
    flight, made, took = Flight(communicator, lane=True), set[int](), list[float]()
    for size in SIZES:
        entries = []
        for i in range((ROW if core else 2) * (rank in pair)):
            sends = (rank == first) == (core or i == 0)
            place = Host(communicator, [np.zeros(size, np.uint8)], sums=False)
            move = communicator.bind(Kind.SF if sends else Kind.RF, place, None, sum(pair) - rank, i)
            after = [i] if core else [0] * i  # the task before it; the message to which it is the answer
            entries.append(Entry(i, move, None, size, [partial(made.__contains__, a) for a in after if sends],
                                 done=[partial(made.add, i)], in_turn=True))
        times = _times(communicator, flight, entries, made, core * (ROW + SLOTS), REPEATS, ends=not core)
        took.append(transfer_time(times) / (ROW if core else 2))
    found = communicator.gather(took)
    latency, longer = np.sum([found[r] for r in pair], axis=0).tolist() if core else found[first]
    return Link(latency, (SIZES[1] - SIZES[0]) / max(longer - latency, 1e-3), core=core)


def _times(communicator: Communicator, flight: Flight, entries: Sequence[Entry], made: set[int], looks: int,
           repeats: int, device: Any = None, ends: bool = True) -> list[float]:
    """Microseconds of a row of transfers, each time of some: of a look after each of so many tasks, which puts the
    task's number into `made`, and until all have ended if `ends`. All ranks measure together."""
    task, times = np.ones((2, bool(looks) * TASK // 4), np.float32), []
    for _ in range(repeats):
        communicator.gather(None)
        made.clear()
        flight.begin([entries])
        spent = 0.0
        for i in range(looks):
            np.copyto(*task)
            begin = perf_counter()
            made.add(i)
            flight.look()
            spent += perf_counter() - begin
        begin = perf_counter()
        flight.run()
        (device or cpu()).synchronize()
        times.append((spent + ends * (perf_counter() - begin)) * 1e6)
    return times


def measure_link(communicator: Communicator, device: Any = None, group: Communicator | None = None,
                 sizes: tuple[int, int, int] = (4, 2**18, 2**22), repeats: int = 15,
                 lane: bool = False) -> tuple[float, float]:
    """Microseconds of an all-reduce of gradients on a device (default: the CPU): (per all-reduce, per byte). All ranks
    return rank 0's figures. `group`: the ranks that sum with this one (default: all); others sum at the same time.
    `lane`: whether the lane that computes also sums, see `Program.polls`. It then looks at the sums in flight between
    tasks, as in a step, and finds little of what it needs in the core's cache.

    A row of the smallest size gives the first figure, as small sums of a step come in rows; the difference of the other
    two sizes gives the second, so that bursts of a link do not count, from their lower quartiles, since other work on
    the machine takes memory bandwidth for a while.
    """
    device, group = device or cpu(), group or communicator
    hand, flight, took = handover(device), Flight(communicator, lane=lane), []
    for size, row in zip(sizes, (4 * SLOTS, 1, 1), strict=True):
        nbytes, transfers = 4 * max(size // 4, group.size), []
        memory = [device.allocate(nbytes) for _ in range(min(row, SLOTS))]  # held while it is used
        for slot, own in enumerate(memory):
            array = device.array(own, View(0, (nbytes // 4,), (1,), 0, "float32"))
            device.write(array, np.zeros(nbytes // 4, np.float32))
            transfers.append(group.bind(Kind.A, hand.place(group, [array], ()), slot))
        made = set[int]()
        entries = [Entry(i, transfers[i % SLOTS], i % SLOTS, nbytes, [partial(made.__contains__, i)] * lane)
                   for i in range(row)]
        times = [time / row for time in _times(communicator, flight, entries, made, row * lane, repeats, device)]
        took.append(transfer_time(times) if row > 1 else float(np.quantile(times, 0.25)))
    each, rate = communicator.gather((took[0], max(0.0, (took[2] - took[1]) / (sizes[2] - sizes[1]))))[0]
    return float(each), float(rate)


def hold_to_cores(communicator: Communicator) -> None:
    """Holds this process to its part of its machine's cores, if the ranks there may all use the same ones, at least one
    each: where they are free to move, the threads that sum push other ranks off their cores. A launcher's own binding
    stays. All ranks call it together, before they start threads."""
    place = gethostname(), sorted(os.sched_getaffinity(0), key=lambda core: (min(siblings(core)), core))
    places = communicator.gather(place)
    here = [rank for rank, (host, _) in enumerate(places) if host == place[0]]
    if all(places[rank] == place for rank in here) and 1 < len(here) <= len(place[1]):
        with suppress(OSError):  # the system may refuse
            os.sched_setaffinity(0, np.array_split(place[1], len(here))[here.index(communicator.rank)].tolist())


def cores_of_each(communicator: Communicator) -> int:
    """How many cores each rank has to itself, at least 1: the least of any machine's cores over its ranks. A rank with
    one core computes and moves gradients on it. All ranks call it together."""
    places = communicator.gather((gethostname(), sorted(os.sched_getaffinity(0))))
    hosts = [host for host, _ in places]
    return max(1, min(len({core for there, cores in places if there == host for core in cores}) // hosts.count(host)
                      for host in hosts))


def among_ranks(cost: CostModel, communicator: Communicator) -> CostModel:
    """The costs of one process's lanes, for ranks that share out the cores of their machines and sum gradients. Where
    each has one core, its lane also sums, so nothing is handed over. All ranks call it together."""
    if cost.cores is None or communicator.size == 1:
        return cost
    cores = cores_of_each(communicator)
    if cores == 1:
        cost = replace(cost, sync=0.0, doze=0.0, wake=0.0, cross=Cross())
    return replace(cost, cores=cores)
