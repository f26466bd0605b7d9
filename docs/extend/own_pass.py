"""A pass: a function from a draft to a draft. This one adds tasks that keep a moving average of the weights."""

from dataclasses import replace

import numpy as np

import minidl as ml
from minidl import models, nn, optim
from minidl.autograd.tensor import Tensor, host_storage
from minidl.core.graph import Launch, Role
from minidl.core.tasks import Kind
from minidl.passes.draft import Draft
from minidl.passes.versions import updates


def averaged(draft, weight=0.1):
    """After each update, an average of the weights moves towards them. Every average outlives the step, in memory of
    its own that begins with the weights. It reads weights, and nothing reads it, so all other tasks keep their bits."""
    graph, e = draft.graph, draft.edit()
    for t in updates(graph).tolist():
        weights = [b for b in graph.writes[t].tolist() if graph.buffer(b).role == Role.PARAMETER]
        average = e.copies(weights, "average", role=Role.STATE)
        for s, copy in average.storages.items():
            begin = Tensor(graph.storages[s].live).numpy()
            e.specs[copy] = replace(e.specs[copy], live=host_storage(begin, Role.STATE, e.specs[copy].name))
        e.task(t, int(graph.unit[t]), Kind.U, int(graph.micro_batch[t]) + 1, stage=int(draft.stage[t]),
               reads={*weights, *average.buffers.values()}, writes=average.buffers.values(),
               launches=[Launch("lerp", (e.whole(copy), e.whole(s)), (e.whole(copy),), constants=(("weight", weight),))
                         for s, copy in average.storages.items()])
    return e.draft


if __name__ == "__main__":
    model = models.mlp(8, 16, 16, 4)
    opt = optim.SGD(model.parameters(), lr=0.1)

    def step(x, y):
        loss = nn.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        return loss

    x, y = np.random.default_rng(0).standard_normal((4, 8), dtype=np.float32), np.array([0, 1, 2, 3])
    wanted = [p.numpy().copy() for p in model.parameters()]
    graph = averaged(Draft.of(ml.record(step, x, y))).graph
    plan = ml.plan(graph, "multi_stream")
    print(plan.schedule.grid())
    run = ml.StreamExecutor(graph, plan.schedule)
    for _ in range(5):
        run(x, y)
        wanted = [a + np.float32(0.1) * (p.numpy() - a) for a, p in zip(wanted, model.parameters(), strict=True)]
    found = [Tensor(s.live).numpy() for s in graph.storages if s.name.endswith("average")]
    assert all(np.allclose(a, b, atol=1e-6) for a, b in zip(found, wanted, strict=True))
