"""A pipeline scheduler: an order of F, O and W (or of F and B, which is O and W) on each rank. minidl does the rest."""

import numpy as np

import minidl as ml
from minidl import models, nn, optim
from minidl.core.tasks import Kind
from minidl.schedulers import pipeline
from minidl.schedulers.pipeline.problem import RankOrder, schedule_of


def last_in_first_out(problem):
    """All forwards; then output gradients, the latest micro-batch first; then weight gradients, which are added in
    order."""
    count = problem.micro_batches
    kind = [Kind.F] * count + [Kind.O] * count + [Kind.W] * count
    micro_batch = [*range(count), *reversed(range(count)), *range(count)]
    return schedule_of([RankOrder(kind, [rank] * 3 * count, micro_batch) for rank in range(problem.ranks)])


lifo = pipeline.Policy(last_in_first_out, "contiguous")


if __name__ == "__main__":
    # on given times, here 1
    made = ml.plan(ml.Pipeline(micro_batches=4), lifo, machine=ml.Machine(ranks=3))
    print(pipeline.grid(made, made.timeline))
    model = models.mlp(8, 16, 16, 4)
    opt = optim.SGD(model.parameters(), lr=0.1)

    def step(x, y):
        for i in range(2):
            with ml.micro_batch(i):
                nn.cross_entropy(model(x[2 * i : 2 * i + 2]), y[2 * i : 2 * i + 2]).backward()
        opt.step()

    graph = ml.record(step, np.zeros((4, 8), np.float32), np.zeros(4, np.int64))
    plan = ml.plan(graph, lifo, machine=ml.Machine(ranks=2))
    print(plan.schedule.grid())
