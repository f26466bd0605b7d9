"""A data-parallel scheduler: it says how ranks sum gradients, and orders the step with these sums."""

import numpy as np

import minidl as ml
from minidl.core.schedule import Lane, Schedule
from minidl.core.tasks import COLLECTIVE
from minidl.schedulers.data_parallel import Policy
from minidl.schedulers.layer_times import layers


def by_record(graph, cost, machine):
    """Sums gradients in the order in which they were recorded, on a separate lane; each update follows its sum."""
    talks = np.isin(graph.kind, [int(k) for k in COLLECTIVE])
    return Schedule.of(graph, {Lane(0): np.flatnonzero(~talks), Lane(0, "comm"): np.flatnonzero(talks)})


last_first = Policy(by_record)  # each update's gradients travel alone; see `Sums` for others


if __name__ == "__main__":
    graph, cost = layers([1, 2, 2, 1], [1, 2, 2, 1], [1, 2, 2, 1])
    plan = ml.plan(graph, last_first, cost, ml.Machine(ranks=2, collective=lambda sizes: sum(sizes.values()) / 4))
    print(plan.schedule.grid())
    print(f"{plan.period:g} a step")
