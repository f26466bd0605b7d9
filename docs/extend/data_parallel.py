"""A data-parallel scheduler. It has the same signature and returns a plan, since it adds tasks for sums over ranks."""

import numpy as np

import minidl as ml
from minidl.passes.synchronise import synchronise
from minidl.schedule import Lane, Schedule
from minidl.schedulers.layer_times import layers, with_communication
from minidl.tasks import COLLECTIVE


def last_first(graph, cost, machine):
    """Sums gradients in the order in which they were recorded, on a separate lane; each update follows its sum."""
    graph = synchronise(graph)
    talks = np.isin(graph.kind, [int(k) for k in COLLECTIVE])
    schedule = Schedule.of(graph, {Lane(0): np.flatnonzero(~talks), Lane(0, "comm"): np.flatnonzero(talks)})
    return ml.Plan("last_first", graph, schedule, with_communication(graph, cost, machine.collective), machine.ranks,
                   machine.memory_limit)


if __name__ == "__main__":
    graph, cost = layers([1, 2, 2, 1], [1, 2, 2, 1], [1, 2, 2, 1])
    plan = ml.plan(graph, last_first, cost, ml.Machine(ranks=2, collective=lambda sizes: sum(sizes.values()) / 4))
    print(plan.schedule.grid())
    print(f"{plan.period:g} a step")
