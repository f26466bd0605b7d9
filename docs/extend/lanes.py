"""A new kind of lane: how a device runs the lanes of a step. This one runs all lanes in the caller's thread, in
turn."""

import numpy as np

import minidl as ml
from minidl import models, nn, optim
from minidl.devices.device import CPU


class InTurns:
    """`work` has the tasks of each lane, the waits, and the calls of a task, see `minidl.devices.lanes`."""

    def __init__(self, work, trace=False):
        self.tasks = work.tasks
        self.calls = {task: work.calls(task, None) for tasks in work.tasks for task in tasks}
        self.awaited = {}
        for waiter, source in work.waits:
            self.awaited.setdefault(waiter, set()).add(source)

    def run(self):
        remaining, done = [list(tasks) for tasks in self.tasks], set()
        while any(remaining):
            for lane in remaining:
                if lane and self.awaited.get(lane[0], set()) <= done:
                    task = lane.pop(0)
                    for call in self.calls[task]:
                        call()
                    done.add(task)

    def close(self):
        pass


class Device(CPU):
    lanes = InTurns


if __name__ == "__main__":
    def trained(device):
        ml.seed(0)
        model = models.mlp(8, 16, 16, 4)
        opt = optim.SGD(model.parameters(), lr=0.1)

        def step(x, y):
            loss = nn.cross_entropy(model(x), y)
            loss.backward()
            opt.step()
            return loss

        x, y = np.random.default_rng(0).standard_normal((4, 8), dtype=np.float32), np.array([0, 1, 2, 3])
        graph = ml.record(step, x, y)
        run = ml.StreamExecutor(graph, ml.plan(graph, "multi_stream").schedule, device=device)
        return [float(run(x, y)) for _ in range(10)]

    assert trained(Device()) == trained(None)  # the same bits, as under every kind of lane
    print("equal")
