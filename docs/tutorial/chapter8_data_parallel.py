"""Chapter 8. Data parallelism, and why the first layer matters most.

    python docs/tutorial/chapter8_data_parallel.py

Several ranks train the same network, each on its share of the batch. After the backward pass they sum their gradients,
and every rank makes the same update. This chapter is about the order of these sums.
"""

import numpy as np

import minidl as ml
from minidl import models, nn, optim, schedulers
from minidl.runtime.comm.loopback import run_ranks
from minidl.runtime.executors import DistributedExecutor
from minidl.schedulers.layer_times import layers

# ---------------------------------------------------------------------------------------------------------------------
# Four layers. The numbers are times: of the forward, of the output gradient (layer 0 needs none), of the weight
# gradient, and of the sum over ranks, which is called an all-reduce. The sum of layer 0 takes long.

FORWARD, OUTPUT_GRAD, WEIGHT_GRAD, COMM = [1, 2, 2, 1], [1, 2, 2, 1], [1, 2, 2, 1], [8, 1, 1, 1]
PARTS = 8


def planned(scheduler, k=None):
    """The plan of one iteration in steady state, on a compute lane and a communication lane."""
    graph, cost = layers(FORWARD, OUTPUT_GRAD, WEIGHT_GRAD, parts=PARTS)
    machine = ml.Machine(ranks=2, collective=lambda sizes: sum(COMM[layer] * n / PARTS for layer, n in sizes.items()))
    return ml.plan(graph, scheduler, cost, machine, **schedulers.find(scheduler).known(part_bytes=1, k=k))


# The simplest way: compute, then communicate, one after the other.

serial = planned("no_overlap")
print(f"no overlap: {serial.notes['compute']:g} of computation and {serial.notes['communication']:g} of "
      f"communication make {serial.period:g}\n")
assert serial.period == serial.notes["compute"] + serial.notes["communication"] == 28

# A gradient can travel while the backward pass goes on. But the next forward starts with layer 0, whose gradient comes
# last. If all sums must be there before any update (a barrier), the largest sum is exposed.

barrier = planned("barrier")
print(f"with a barrier: {barrier.period:g}")
print(barrier.programs[0].schedule.grid(), "\n")
assert barrier.period == 25

# Look at the updates U in the grid: they come first. The grid shows one iteration as it repeats, so its updates belong
# to the iteration before. In a schedule without a barrier each update comes just before its layer's forward, and only
# that forward waits. Gradients are also cut in parts, 0A0 to 0A0/7, and the part that is needed first goes first.

priority = planned("priority")
print(f"by priority, across the iteration boundary: {priority.period:g}")
print(priority.programs[0].schedule.grid(), "\n")
assert priority.period == 25

# Nothing gained! The sum of layer 0 is needed first, but it cannot start before the gradient of layer 0 is computed,
# and that is the last thing that the backward pass does. No order of communication can help. The order of computation
# can.

# ---------------------------------------------------------------------------------------------------------------------
# Weight gradients may wait, as chapter 2 showed. Under reverse first-k the first k layers' weight gradients wait until
# all output gradients are done. Then they run in ascending order: layer 0 first, since the next forward needs it first.

for k in range(5):
    found = planned("reverse_first_k", k)
    print(f"    k = {k}   period {found.period:4g}   {'#' * round(2 * found.period)}")
best = planned("reverse_first_k")  # without a k it is searched for
print(f"\nthe best is k = {best.notes['k']}:")
print(best.programs[0].schedule.grid(), "\n")
assert (best.notes["k"], best.period) == (4, 20)

# Nothing can be better than 20, and that can be proved. There is one compute stream and one channel, so a period is at
# least all computation, and at least all communication. And there is a circuit for each layer: from its forward up
# through the layers above and back down to its weight gradient, then the sum, and then its next forward.

assert best.notes["lower_bound"] == 20
print(f"computation {best.notes['compute']:g}, communication {best.notes['communication']:g}, the slowest circuit and "
      f"so the bound {best.notes['lower_bound']:g}\n")


# ---------------------------------------------------------------------------------------------------------------------
# Now for real. Ranks are processes under `mpiexec`; here they are threads of one process, joined by a loop-back. Each
# records its own step. The policy adds the sums to the graph.

RANKS, SHARE = 2, 16
random = np.random.default_rng(0)
images = random.standard_normal((5, RANKS, SHARE, 20)).astype(np.float32)
labels = random.integers(0, 4, (5, RANKS, SHARE))


def fresh():
    ml.seed(0)
    model = models.mlp(20, 32, 32, 4)
    return model, optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def on_two_ranks(scheduler, k=None):
    """The parameters of both ranks after five steps, as bytes."""
    ranks = []
    for _ in range(RANKS):
        model, optimizer = fresh()

        def step(x, y, model=model, optimizer=optimizer):
            loss = nn.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            return loss

        machine = ml.Machine(RANKS, collective=lambda sizes: 5 + sum(sizes.values()) / 100)
        ranks.append((model, ml.plan(ml.record(step, images[0, 0], labels[0, 0]), scheduler, machine=machine,
                                     **schedulers.find(scheduler).known(part_bytes=1000, k=k))))

    def work(communicator):
        model, found = ranks[communicator.rank]
        run = DistributedExecutor(found.graph, found.schedule, communicator)
        for x, y in zip(images, labels, strict=True):
            run(x[communicator.rank], y[communicator.rank])  # returns while gradients still travel
        run.close()  # the last updates
        return b"".join(p.numpy().tobytes() for p in model.parameters())

    return run_ranks(RANKS, work)


# And one process that takes both shares as micro-batches:

model, optimizer = fresh()
for x, y in zip(images, labels, strict=True):
    for rank in range(RANKS):
        (nn.cross_entropy(model(ml.array(x[rank])), ml.array(y[rank])) * (1 / RANKS)).backward()
    optimizer.step()
alone = b"".join(p.numpy().tobytes() for p in model.parameters())

for scheduler in ("no_overlap", "barrier", "buckets", "fifo", "priority", "dear", "reverse_first_k"):
    assert on_two_ranks(scheduler, 2 if scheduler == "reverse_first_k" else None) == [alone, alone]
print("seven schedules, two ranks, one process: the same bits everywhere")

# The bits are the same because sums over ranks are taken in the order of the ranks, however the gradients are cut and
# whichever part arrives first. On MPI the same run is
#
#     mpiexec -n 2 python -m minidl train --model mlp --parallel data --scheduler reverse_first_k --steps 100

# ---------------------------------------------------------------------------------------------------------------------
# Experts. A layer may have many experts, of which each token uses a few. The experts are shared out among the ranks, so
# tokens must travel: to the ranks of their experts and back, and their gradients the same way backward. These exchanges
# X are on the chain of forwards and output gradients. In order, a rank waits for each of them. Here every second layer
# has experts, all tasks and exchanges take 1, and there are no sums.

ONES = [1] * 4


def with_experts(micro_batches=1, **options):
    """The plan of a step whose layers 1 and 3 have experts."""
    graph, cost = layers(ONES, ONES, ONES, exchange=[0, 1, 0, 1], micro_batches=micro_batches)
    return ml.plan(graph, "fifo", cost, ml.Machine(ranks=2, collective=lambda sizes: 0), **options)


in_order = with_experts()
print(f"\nwith experts, in order: {in_order.period:g}")
print(in_order.programs[0].schedule.grid(), "\n")
assert in_order.period == in_order.notes["compute"] + 8 == 19

# What does not wait for an exchange? Weight gradients. With hide="weights" those of the experts and of the layers above
# run while rows travel backward: 3W0 beside 3X0/1, 2W0 beside 1X0/3, 1W0 beside 1X0/1. For 3X0/3 there is none yet.

hidden = with_experts(hide="weights")
print(f"weight gradients beside exchanges: {hidden.period:g}")
print(hidden.programs[0].schedule.grid(), "\n")
assert hidden.period == hidden.notes["lower_bound"] == 16

# Forward there is nothing to run beside an exchange, unless another part of the batch is there: two halves take turns.

in_turn = with_experts(2, hide="two_batches")
print(f"two halves of a batch in turn: {in_turn.period:g}\n")
assert in_turn.period == in_turn.notes["compute"] + 0.5

# The same on the command line, with the time for which a rank only waits for exchanges; `explain` says which they are:
#
#     python -m minidl simulate --parallel data --scheduler fifo --forward 1,1,1,1 --output-grad 1,1,1,1 \
#         --weight-grad 1,1,1,1 --comm 0,0,0,0 --exchange 0,1,0,1 --scheduler-arg hide=weights
#
# Exercise 8. The bound. exercises/exercise8.py asks for the lower bound of the period from the four lists of times.
# Grade it with
#
#     python docs/tutorial/grade.py 8 my_bound.py
