"""Random graphs with valid schedules and costs, as a hypothesis strategy."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from hypothesis import strategies as st

from minidl.core.graph import GraphBuilder, TaskGraph
from minidl.core.schedule import Lane, Schedule
from minidl.core.tasks import Kind, as_recorded, task_name
from minidl.core.timeline import Timeline
from minidl.pricing.cost import CostModel, Link
from minidl.pricing.simulation import simulate
from minidl.runtime.checking import random_order, random_schedule


@dataclass
class Plan:
    graph: TaskGraph
    schedule: Schedule
    cost: CostModel

    @property
    def timeline(self) -> Timeline:
        return simulate(self.graph, self.schedule, self.cost)


@st.composite
def plans(draw: st.DrawFn, most: int = 30, latency: bool = False, pairs: bool = False) -> Plan:
    """Tasks read what random earlier ones wrote; lanes are random, in a random order that the edges allow."""
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    tasks, lanes = draw(st.integers(1, most)), draw(st.integers(1, 5))
    builder = GraphBuilder()
    buffers = [builder.buffer(f"b{i}", 8 * int(random.integers(1, 99))) for i in range(tasks)]
    kinds = [Kind.F, Kind.O, Kind.W, Kind.B, Kind.U, Kind.A, Kind.SF]
    for i in range(tasks):
        reads = random.choice(buffers[:i], min(i, int(random.integers(0, 4))), replace=False) if i else []
        kind = Kind(random.choice(kinds))
        number = {"part": i} if kind == (Kind.A) else {"micro_batch": i,
                                                       "destination": int(random.integers(3)) if kind == Kind.SF else 0}
        builder.task(i // 3, kind, **number, late=int(random.integers(2)), iteration=int(random.integers(2)),
                     reads=map(int, reads), writes=[buffers[i]], nbytes=int(random.integers(0, 999)))
    builder.unit_names = {i: f"layer.{i}" for i in range(0, tasks // 3 + 1, 2)}
    graph = builder.build()
    arranged = random_schedule(graph, lanes, random)
    which = tuple(Lane(int(random.integers(0, 2)), name) for name in ("main", "sub1", "sub2", "comm", "more")[:lanes])
    schedule = Schedule(which, arranged.ptr, arranged.keys)
    time = random.integers(0, 6, tasks)
    if pairs:
        order = random_order(graph, arranged, arranged.waits(graph), random)
        schedule = replace(schedule, joined=_joined(graph, schedule, order, time, random))
    cost = CostModel(tasks={task_name(as_recorded(graph.keys[i])): float(time[i]) for i in range(tasks)}, unit="us",
                     link=Link(3.0, 100.0) if latency else Link(), sync=2.0 if latency else 0.0)
    return Plan(graph, schedule, cost)


def _joined(graph: TaskGraph, schedule: Schedule, order: list[int], time: np.ndarray,
            random: np.random.Generator) -> np.ndarray:
    """Pairs that take time, stand together in the whole order and on a lane, and need not wait for each other."""
    place = {task: i for i, task in enumerate(order)}
    ids = schedule.ids(graph).tolist()
    joined = np.zeros(len(ids), bool)
    for entry in range(1, len(ids)):
        first, second = ids[entry - 1], ids[entry]
        joined[entry] = (entry not in schedule.ptr and not joined[entry - 1] and place[second] == place[first] + 1
                         and first not in graph.preds[second] and time[first] > 0 and random.random() < 0.7)
    return joined
