"""A scheduler for one device: a function (graph, cost, machine) to a schedule. Its other parameters are options."""

import numpy as np

import minidl as ml
from minidl import models, nn
from minidl.core.schedule import Lane, Schedule
from minidl.core.tasks import Kind


def updates_apart(graph, cost, machine, lanes: int = 2):
    """Updates in turn on separate lanes; all other tasks in recorded order."""
    update = graph.kind == Kind.U
    orders = {Lane(0): np.flatnonzero(~update)}
    orders |= {Lane(0, f"update{i}"): np.flatnonzero(update)[i::lanes] for i in range(lanes)}
    return Schedule.of(graph, orders)


if __name__ == "__main__":
    from minidl import optim

    model = models.mlp(8, 16, 16, 4)
    opt = optim.SGD(model.parameters(), lr=0.1)

    def step(x, y):
        loss = nn.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        return loss

    graph = ml.record(step, np.zeros((2, 8), np.float32), np.zeros(2, np.int64))
    print(ml.plan(graph, updates_apart, lanes=3).schedule.grid())  # `plan` proves whatever the scheduler returns
