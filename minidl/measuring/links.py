"""The cost of links between ranks: of a message, of a sum over ranks, and of the core that both share with tasks. All
ranks measure together."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from socket import gethostname
from threading import Thread
from time import perf_counter
from typing import Any

import numpy as np

from ..core.graph import View
from ..core.schedule import RankGrid
from ..core.tasks import Kind
from ..devices.device import cpu
from ..pricing.cost import CostModel, Link
from ..runtime.comm import SLOTS, Communicator
from ..runtime.comm.flight import Entry, Flight, Patience
from ..runtime.comm.handover import handover
from .lanes import siblings
from .measure import transfer_time

SIZES = (8, 2**18)  #: bytes of the messages that measure a link
REPEATS = 20


def measure_messages(communicator: Communicator, grid: RankGrid) -> Link:
    """The slowest link between two consecutive ranks of a replica, in microseconds and bytes per microsecond; the same
    on every rank. On one machine the ranks' own cores move the messages, between tasks."""
    size = grid.ranks
    found = [_between(communicator, first + a, first + (a + 1) % size)
             for first in range(0, grid.size, size) for a in range(size if size > 2 else size - 1)]
    return max(found, key=lambda link: float(link.time(SIZES[1])))


def _between(communicator: Communicator, first: int, second: int) -> Link:
    """The link of these two ranks, which the first one measures."""
    took = []
    for size in SIZES:
        out, into = np.zeros(size, np.uint8), np.zeros(size, np.uint8)
        communicator.gather(None)
        if communicator.rank in (first, second):
            peer = first + second - communicator.rank
            moves = communicator._send(out, peer, 0), communicator._receive(into, peer, 0)
            in_turn = moves if communicator.rank == first else moves[::-1]
            took.append(transfer_time([_turn(communicator, in_turn, peer) for _ in range(REPEATS)]) / 2)
    found = communicator.gather((took, gethostname()))
    (latency, longer), host = found[first]
    return Link(latency, (SIZES[1] - SIZES[0]) / max(longer - latency, 1e-3), core=host == found[second][1])


def _turn(communicator: Communicator, moves: Sequence[Callable[[], Iterator[None]]], peer: int) -> float:
    """Microseconds of a message to the other rank and a message back."""
    begin = perf_counter()
    patience = Patience(communicator, lane=True)
    for move in moves:
        for _ in move():
            patience.wait((peer,), "the link's measurement")
    return (perf_counter() - begin) * 1e6


def measure_link(communicator: Communicator, device: Any = None, group: Communicator | None = None,
                 sizes: tuple[int, int, int] = (4, 2**18, 2**22), repeats: int = 15) -> tuple[float, float]:
    """Microseconds of an all-reduce of gradients on a device (default: the CPU): (per all-reduce, per byte). All ranks
    return rank 0's figures. `group`: the ranks that sum with this one (default: all); others sum at the same time.

    A row of the smallest size gives the first figure, as small sums of a step come in rows; the difference of the other
    two sizes gives the second, so that bursts of a link do not count.
    """
    device, group = device or cpu(), group or communicator
    hand, flight, took = handover(device), Flight(communicator), []
    for size, row in zip(sizes, (4 * SLOTS, 1, 1), strict=True):
        nbytes, transfers = 4 * max(size // 4, group.size), []
        memory = [device.allocate(nbytes) for _ in range(min(row, SLOTS))]  # held while it is used
        for slot, own in enumerate(memory):
            array = device.array(own, View(0, (nbytes // 4,), (1,), 0, "float32"))
            device.write(array, np.zeros(nbytes // 4, np.float32))
            transfers.append(group.bind(Kind.A, hand.place(group, [array], ()), slot))
        entries = [Entry(i, transfers[i % SLOTS], i % SLOTS, nbytes) for i in range(row)]
        times = []
        for _ in range(repeats):
            communicator.gather(None)
            begin = perf_counter()
            for entry in entries:
                flight.submit(entry)
            flight.drain()
            device.synchronize()
            times.append((perf_counter() - begin) * 1e6 / row)
        took.append(transfer_time(times))
    slope = max(0.0, (took[2] - took[1]) / (sizes[2] - sizes[1]))
    each, rate = communicator.gather((took[0], slope))[0]
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
    one core computes and moves gradients on it, see `share_of_core`. All ranks call it together."""
    places = communicator.gather((gethostname(), sorted(os.sched_getaffinity(0))))
    hosts = [host for host, _ in places]
    return max(1, min(len({core for there, cores in places if there == host for core in cores}) // hosts.count(host)
                      for host in hosts))


def share_of_core(communicator: Communicator, repeats: int = 7, size: int = 2**21, width: int = 448) -> float:
    """The share of its core that a rank needs to sum gradients, from 0 to 1: a transfer naps between its parts, and the
    core computes meanwhile. It follows from the time of both at once, a sum of `size` bytes and a product of `width`,
    over the time of one after the other. All ranks measure at the same time; all return rank 0's."""
    hand, flight = handover(cpu()), Flight(communicator)
    factor, product = np.ones((2, width, width), np.float32)
    transfer = communicator.bind(Kind.A, hand.place(communicator, [np.zeros(size // 4, np.float32)], ()), 0)

    def compute() -> None:
        np.matmul(factor, factor, out=product)

    def communicate() -> None:
        flight.submit(Entry(0, transfer, 0, size))
        flight.drain()

    times = []
    for _ in range(repeats):
        for together, call in ((None, compute), (None, communicate), (compute, communicate)):
            thread = Thread(target=together) if together else None
            communicator.gather(None)
            begin = perf_counter()
            if thread:
                thread.start()
            call()
            if thread:
                thread.join()
            times.append(perf_counter() - begin)
    computed, summed, both = np.reshape(times, (-1, 3)).min(axis=0)  # other work on the machine only adds time
    return float(np.clip(communicator.gather(2 * both / (computed + summed) - 1)[0], 0.0, 1.0))


def among_ranks(cost: CostModel, communicator: Communicator) -> CostModel:
    """The costs of one process's lanes, for ranks that share out the cores of their machines and sum gradients. All
    ranks call it together."""
    if cost.cores is None or communicator.size == 1:
        return cost
    cores = cores_of_each(communicator)
    return replace(cost, cores=cores, summing=share_of_core(communicator.host) if cores == 1 else 1.0)
