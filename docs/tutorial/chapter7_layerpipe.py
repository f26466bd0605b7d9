"""Chapter 7. LayerPipe and staleness.

    python docs/tutorial/chapter7_layerpipe.py

All schedules so far are exact: they train with the same numbers as one device would. This chapter gives that up. The
reward is a pipeline that never drains. The price is gradients that are a little old.
"""

from collections import deque

import chapter1_tape as engine
import numpy as np

import minidl as ml
from minidl.schedulers import pipeline
from minidl.schedulers.partition import LayerCosts, assign

# ---------------------------------------------------------------------------------------------------------------------
# Why does a pipeline drain at all? Because the next batch wants the updated weights, and the update wants the gradients
# of the whole batch. That loop closes once per batch, and each time the bubble is paid.
#
# PipeDream (2018) cuts the loop: the next batch simply starts, with the weights that are there. Batches then follow
# each other without end, and in the steady state no rank ever waits. Each number behind a v is the version of the
# weights that a task reads; version 0 is what training starts from.

plan = ml.plan(ml.Pipeline(micro_batches=6), "pipedream", machine=ml.Machine(ranks=3))
cost = ml.CostModel.given(forward=1, output_grad=1, weight_grad=1)
print("PipeDream: 6 batches, each with an update of its own")
print(pipeline.grid(plan, ml.simulate(plan.graph, plan.schedule, cost)))
print(f"in the steady state one batch takes {pipeline.price(plan, cost).period:g}, which is the work of one rank\n")

# Read a column of versions. On rank 0 batch 3 reads version 1, while on rank 2 it reads version 3. And the backward of
# a batch must use the version that its forward used, or its gradient belongs to no network at all. So rank 0 keeps
# several versions. The plan says which, and its proof checks that they exist and that they match.

names = map(ml.core.tasks.task_name, plan.schedule.keys)
rank0 = dict(zip(names, plan.versions.read, strict=True))
assert rank0["0F3"] == rank0["0B3"] == 1
assert rank0["2F3"] == 3


# ---------------------------------------------------------------------------------------------------------------------
# In the steady state only one thing counts: the busiest rank. Its work per batch is the period. So scheduling becomes
# dividing. PipeDream gives each processor a run of whole layers. Here are four layers that cost 3, 6, 4 and 2 each for
# F, O and W. The largest costs 18, and no processor added will make the period less than that.

layers = LayerCosts.given([3, 6, 4, 2], [3, 6, 4, 2], [3, 6, 4, 2])


def show(processors, method):
    found = assign(layers, processors, method)
    print(f"{method} on {processors}: period {found.period:g}, {found.loads.mean() / found.period:.0%} busy")
    for p in range(processors):
        held = [f"{part.layer}{part.kind.name}" + (f" x {part.share:.2f}" if part.share < 1 else "")
                for part in found.parts if part.processor == p]
        print(f"    {p}  {'#' * round(found.loads[p]):18}  {', '.join(held)}")
    return found


whole = show(6, "pipedream")
assert whole.period == 18
assert whole.loads[-1] == 0  # there are more processors than layers

# LayerPipe (2021) divides finer. The output gradient and the weight gradient of a layer are independent, as we know
# since chapter 2, so they may live on different processors. That is the intra-layer part. The inter-layer part cuts an
# output gradient in two, for two neighbours, so that the loads come out even.

intra, inter = show(6, "intra"), show(6, "inter")
assert inter.period <= intra.period < whole.period

# The paper reports 25 % over PipeDream on average, and more than 80 % with 7 to 9 processors. Its rule for dividing is
# not published in detail, so ours is a reconstruction, and these four layers are made up. They show how the gain grows
# if there are more processors than PipeDream can use:

print("\nspeed-up over PipeDream, by number of processors\n")
for processors in range(2, 11):
    base = assign(layers, processors, "pipedream").period
    gain = {method: base / assign(layers, processors, method).period for method in ("intra", "inter")}
    print(f"    {processors:2}   intra {gain['intra']:.2f}   inter {gain['inter']:.2f}  "
          f"{'#' * round(20 * (gain['inter'] - 1))}")
    assert gain["inter"] >= gain["intra"] - 1e-9 >= 1 - 2e-9


# ---------------------------------------------------------------------------------------------------------------------
# How old are the gradients? Let every stage do one forward and one backward per tick of a clock, for different batches.
# A batch goes up one stage per tick, turns round at the last stage, and comes down again.

STAGES = 3


def forward_tick(stage, batch):
    return batch + stage


def backward_tick(stage, batch):
    return batch + (STAGES - 1) + (STAGES - 1 - stage)


print("\nwhat each stage does in a tick: F and B of which batch\n")
for stage in reversed(range(STAGES)):
    cells = []
    for tick in range(9):
        done = [f"{letter}{b}" for letter, when in (("F", forward_tick), ("B", backward_tick))
                for b in range(9) if when(stage, b) == tick]
        cells.append(" ".join(done).ljust(6))
    print(f"    stage {stage}  ", *cells)

# Between the forward of a batch and its backward lie 0 ticks on stage 2, 2 on stage 1, and 4 on stage 0. In each of
# these ticks the stage updated its weights once, for another batch. In general the delay is 2 S, where S is the number
# of stages that come after. LayerPipe2 (2025) states it for layers: Delay(l) = 2 S(l).

assert [backward_tick(s, 0) - forward_tick(s, 0) for s in range(STAGES)] == [4, 2, 0]

# Does a network learn with gradients that old? We can try without any pipeline, with the engine of chapter 1. Each
# layer has a queue: a gradient enters it when it is computed, and is applied `delay` steps later.


def train(delay_of_layer, rate, steps=800):
    """The loss after each step, from the same start each time."""
    random = np.random.default_rng(0)
    for layer in engine.layers:
        layer.w.value = random.standard_normal(layer.w.value.shape) * np.sqrt(2 / layer.w.value.shape[0])
        layer.b.value = np.zeros_like(layer.b.value)
    queues, losses = [deque() for _ in engine.layers], []
    for _ in range(steps):
        engine.tape.clear()
        for p in engine.parameters:
            p.grad = None
        loss = engine.loss_of_network()
        engine.backward(loss)
        losses.append(float(loss.value))
        for layer, queue, delay in zip(engine.layers, queues, delay_of_layer, strict=True):
            queue.append((layer.w.grad, layer.b.grad))
            if len(queue) > delay:
                w, b = queue.popleft()
                layer.w.value -= rate * w
                layer.b.value -= rate * b
    return losses


print("\nloss of chapter 1's network after 800 steps, one layer per stage\n")
print("    rate   delays 0, 0, 0   delays 4, 2, 0   delays 20, 10, 0")
loss = {}
for rate in (0.5, 0.05):
    for delay in ([0, 0, 0], [4, 2, 0], [20, 10, 0]):
        loss[rate, delay[0]] = np.mean(train(delay, rate)[-20:])
    print(f"    {rate:<5}  " + "".join(f"{loss[rate, oldest]:<17.4f}" for oldest in (0, 4, 20)))

# A gradient is old news when the weights have moved much since. At a small rate they have not, and a delay of 4 hardly
# shows. At a large rate it costs a great deal. So staleness is not free, and it is not fatal either. It is one more
# thing to trade: the pipeline never waits, and each step is worth a little less.

assert all(value < 0.65 for value in loss.values())  # all of them learned something
assert loss[0.5, 20] > 2 * loss[0.5, 0]  # old gradients and large steps
assert loss[0.05, 4] < 1.1 * loss[0.05, 0]  # small steps

# Above, a batch used the same weights forward and backward, as PipeDream does. That takes 2 S + 1 versions of a layer's
# weights. LayerPipe2 also has a cheap way that rebuilds old weights from a moving average of the updates. On ranks that
# is --scheduler layerpipe2 --scheduler-arg history=average. PACI (2026) keeps no old weights at all: it bounds how far
# they drift by updating less often.
#
# Exercise 7. Everything in the second part came from one small algorithm: divide a row of times among processors, in
# order, so that the busiest has as little as possible. exercises/exercise7.py asks for it. Grade it with
#
#     python docs/tutorial/grade.py 7 my_partition.py
