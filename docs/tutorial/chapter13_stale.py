"""Chapter 13. When the gradient is not today's.

    python docs/tutorial/chapter13_stale.py

Until chapter 6 every order gave the same numbers. Chapter 7 let a pipeline run without a barrier, so its gradients are
old. This chapter asks what that costs. It follows a delay by hand, logs which weights each task of a real run read,
repeats that run bit for bit, and ends with another way to be inexact: sweeps in place of a chain.
"""

import numpy as np

import minidl as ml
from minidl import data, nn, optim
from minidl.core.tasks import task_name
from minidl.runtime.comm.loopback import run_ranks
from minidl.runtime.executors import DistributedExecutor
from minidl.runtime.version_log import as_lines, staleness
from minidl.schedulers import pipeline
from minidl.testing.replay import Replay

# ---------------------------------------------------------------------------------------------------------------------
# A delay by hand. The smallest network is one number w with the loss w*w/2, so its gradient is w. Take the gradient at
# the weights of d updates ago: w[t+1] = w[t] - rate * w[t-d]. Without a delay any rate below 2 converges.


def train(rate, delay, steps=2000):
    """The size of w after some steps, beginning with 1."""
    w = [1.0] * (delay + 1)
    for _ in range(steps):
        w.append(w[-1] - rate * w[-1 - delay])
    return abs(w[-1])


print("the largest rate that converges")
for delay in (0, 1, 2, 4, 8):
    largest = max(rate for rate in np.arange(0.005, 2.0, 0.01) if train(rate, delay) < 0.1)
    bound = 2 * np.sin(np.pi / (4 * delay + 2))
    print(f"    {delay} updates late: {largest:.3f}, in theory {bound:.3f}")
    assert bound - 0.02 < largest < bound

# The bound is 2 sin(pi / (4d+2)): it is where a solution z**t of the recurrence has |z| = 1. Eight updates late, a rate
# must be a tenth. So a stale pipeline that trains badly may only need a smaller rate. PipeMare divides the rate of each
# stage by its delay plus one, and lets it grow back over the first steps (`--rates-by-delay`):

for delay in (0, 1, 2, 4, 8):
    assert train(1.5 / (delay + 1), delay) < 0.1
    assert not delay or train(1.5, delay, 200) > 1
print("a rate of 1.5 diverges if gradients are late; divided by the delay plus one it converges for all these delays")


# ---------------------------------------------------------------------------------------------------------------------
# Which version did a task read? Here is a network on two ranks under PipeDream, with an update after each of four
# micro-batches. The ranks are threads; a log writes down the version of the weights that each task really found in
# memory. It does not ask the plan.

RANKS, MICRO_BATCHES, STEPS = 2, 4, 3


def build():
    """A model fresh from seed 0, and its step as a graph: an update after each micro-batch."""
    ml.seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
    optimizer = optim.SGD(model.parameters(), lr=0.05)

    def step(*parts):
        for i in range(MICRO_BATCHES):
            with ml.micro_batch(i, 16 * i):
                nn.cross_entropy(model(parts[2 * i].flatten(1)), parts[2 * i + 1]).backward()
                optimizer.step()

    return model, ml.record(step, *batches[0])


train_data = data.digits(batch_size=16)
batches = [[array for _ in range(MICRO_BATCHES) for array in next(train_data)] for _ in range(STEPS)]
ranks = [build() for _ in range(RANKS)]
cost = ml.CostModel.analytic()
stages = pipeline.balanced(ranks[0][1], cost, RANKS)  # of each layer


def work(communicator):
    """Trains one rank's stage; returns its log and its parameters."""
    model, graph = ranks[communicator.rank]
    own = ml.plan(graph, "pipedream", cost, ml.Machine(RANKS))
    run = DistributedExecutor(*own.with_messages, communicator, logged=True)
    for batch in batches:
        run(*batch)
    run.close()
    held = {id(spec.live) for spec in run.program.graph.storages if spec.live is not None}
    return run.log.entries, {i: p.numpy() for i, p in enumerate(model.parameters()) if id(p.storage) in held}


found = run_ranks(RANKS, work)
log = [entry for entries, _ in found for entry in entries]
print("\nthe first lines of the log of rank 0")
print("\n".join(as_lines(found[0][0])[:6]))
for stage, late in staleness(log).items():
    print(f"stage {stage}: its forwards are {late.mean():.2f} updates late, at most {late.max()}")
assert staleness(log)[1].max() == 0
assert staleness(log)[0].max() == 1

# The last stage is never late: it updates before it reads again. Stage 0 of two is one update late, since one more
# batch is on its way by the time it hears of the first. On p ranks, stage s is p-1-s updates late.


# ---------------------------------------------------------------------------------------------------------------------
# One process can repeat this. It runs the tasks of each step in the order in which they were recorded, and before each
# task it puts the version in place that the log names. Nothing is left to chance, so all bits agree: asynchronous
# training can be debugged like any other program.

model, graph = build()
replay = Replay(graph, stages)
for step, batch in enumerate(batches):
    replay(tuple(batch), [entry for entry in log if entry.step == step])
for _, own in found:
    for i, value in own.items():
        assert model.parameters()[i].numpy().tobytes() == value.tobytes()
print("a replay of the log: bit-identical parameters")

# Nothing else is needed, not even a planned order. Let threads race for the weights, and keep the log:
#
#     python -m minidl train --model mlp --micro-batches 8 --scheduler pd_asgd --scheduler-arg clock=real \
#         --steps 20 --log-versions log.jsonl
#
# No two such runs are alike, and `--replay log.jsonl` in place of `--log-versions log.jsonl` repeats each bit for bit.

# A single wrong entry gives another run. Here every task reads the newest weights, as in plain training:

model, graph = build()
run = ml.StreamExecutor(graph, ml.schedulers.in_order(graph))
for batch in batches:
    run(*batch)
run.close()
assert any(model.parameters()[i].numpy().tobytes() != value.tobytes() for _, own in found for i, value in own.items())
print(f"with the newest weights: other ones. {task_name(log[0].key)} began with version {log[0].version} in both")


# ---------------------------------------------------------------------------------------------------------------------
# Sweeps. Old weights are one way to break the chain of the backward pass; here is another. Output gradients go from the
# last layer to the first, o[l] = o[l+1] J[l]. Instead start with zeros, and compute all of them at once from the ones
# of the sweep before (Jacobi; Song et al., 2021). A sweep makes one more layer exact, from the top. So as many sweeps
# as layers give the gradients of backprop, and on enough processors K sweeps take the time of K layers.

random = np.random.default_rng(0)
LAYERS, WIDTH = 8, 32
jacobians = [random.standard_normal((WIDTH, WIDTH)) * 0.6 / np.sqrt(WIDTH) for _ in range(LAYERS)]
top = random.standard_normal(WIDTH)

exact = [top]
for j in reversed(jacobians):
    exact.insert(0, exact[0] @ j)

sweep = [np.zeros(WIDTH)] * LAYERS + [top]
print("\nrelative error of all output gradients")
for k in range(1, LAYERS + 1):
    sweep = [sweep[layer + 1] @ jacobians[layer] for layer in range(LAYERS)] + [top]
    error = np.linalg.norm(np.array(sweep) - np.array(exact)) / np.linalg.norm(exact)
    print(f"    {k} sweeps: {error:.1e}")
    assert all(np.array_equal(sweep[layer], exact[layer]) for layer in range(LAYERS - k, LAYERS + 1))
assert error == 0

# The error falls fast here because these layers shrink gradients: layers far above hardly matter. In minidl a
# sweep is a pass over the graph, so its tasks are proved, priced and drawn like all others:
#
#     python -m minidl compare --model mlp --model-arg layers=8 --backward jacobi --sweeps 3 --schedulers in_order
#
# Exercise 13. exercises/exercise13.py trains on the newest weights. Train on the versions that a log names:
#
#     python docs/tutorial/grade.py 13 my_replay.py
