"""Chapter 9. Regions: where a weight gradient waits best.

    python docs/tutorial/chapter9_regions.py

Chapter 5 put weight gradients on a second stream as soon as they were ready. Here we ask where each of them goes best,
and let some of them wait until the next iteration.
"""

from contextlib import suppress
from dataclasses import replace

import minidl as ml
from minidl import data, models, nn, optim, schedulers
from minidl.passes.boundary import late_tasks
from minidl.passes.group import groups_in
from minidl.plans.memory import MemoryLimitError
from minidl.plans.program import lower
from minidl.pricing.corun import CoRun
from minidl.pricing.explain import explain
from minidl.runtime.executors import executor


def build(**arguments):
    """A model fresh from seed 0, its optimizer, and its step as a graph."""
    ml.seed(0)
    model = models.create("mlp", layers=8, hidden=64)
    optimizer = optim.SGD(model.parameters(), lr=0.05, momentum=0.9, **arguments)

    def step(x, y):
        loss = nn.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return model, optimizer, ml.record(step, *next(data.digits(batch_size=32)))


# ---------------------------------------------------------------------------------------------------------------------
# Why a weight gradient can wait. Only one task reads its result, the update of its layer; and no task needs the update
# before the layer's next forward. So it may run at any time between two moments: its release, when the gradient from
# above is ready, and its deadline, the next forward of its own layer. For the last layers the release comes early and
# the deadline late; for the first layer they nearly meet.
#
# But it may not change the numbers. The next forward of a layer always comes after its update: that is an edge.

model, optimizer, graph = build()
print(graph["15W0"].label, "is needed by", [graph.name(t) for t in graph.succs[graph.index("15W0")]])

# Suppose that a weight gradient takes twice as long as the rest. Then the second stream has more to do than the main
# one while the backward pass runs, and nothing at all during the forward pass.

linear = [float(name.endswith("linear")) for name in graph.unit_names]
cost = ml.CostModel.given(linear, linear, [2 * l for l in linear])
kept = schedulers.multi_region(graph, cost, crossing=False)
crossing = schedulers.multi_region(graph, cost)


def price(schedule, cost):
    """The time of a step as it repeats."""
    run = lower(graph, schedule)
    return ml.simulate(run.graph, run.schedule, cost).makespan


for name, schedule in {"in order": schedulers.in_order(graph),
                       "multi_stream": schedulers.multi_stream(graph, cost=cost), "regions, border kept": kept,
                       "regions": crossing}.items():
    print(f"{name:22} {price(schedule, cost):5.1f}   late: {[graph.name(t) for t in late_tasks(graph, schedule)]}")
assert price(crossing, cost) < price(kept, cost) < price(schedulers.multi_stream(graph, cost=cost), cost)

# In a schedule `15W0@1` is 15W0 one step late. It comes first on its stream, since it is the weight gradient of the
# step before. Its inputs are kept in two copies that are used in turn, so that the forward beside it does not overwrite
# them.

print("\n" + crossing.grid(width=100) + "\n")


# ---------------------------------------------------------------------------------------------------------------------
# Launch overhead. On a GPU a small kernel may take less time than to launch it. Then the device waits for the host, and
# a second stream hides launches, not arithmetic. Published gains of overlap were often measured so. If the whole step
# is replayed at once, as a CUDA graph or here as a list of calls that were bound before, launches cost next to nothing,
# and only the true gain of overlap is left: at most (F + O + W) / (F + O). Always compare with one stream that is
# recorded too.

alone, busy = sum(2 * l for l in linear), price(schedulers.in_order(graph), cost)
print(f"weight gradients are {alone / busy:.0%} of this step, so hiding all of them gives at most "
      f"{busy / (busy - alone):.2f}x\n")


# ---------------------------------------------------------------------------------------------------------------------
# Regions. Two tasks at once are rarely twice as fast: they share memory, caches, and on a CPU the interpreter. How much
# they lose depends on the pair. So cut the chain into regions of like kernels, and measure each pair of a region and a
# kind of weight gradient: `minidl.measuring.pairs`. Its gain is the work done together in the time of one. Then
# place the pairs, the largest gain first, as long as there is room beside the region.
#
# Here is a machine on which tasks beside the backward pass gain nothing.

kinds = {graph.name(t): graph[t].kind.name for t in range(len(graph))}
shared = replace(cost, corun=CoRun(kinds, {"O": {"W": 2.2}, "W": {"O": 2.2}}))
for name, schedule in {"multi_stream": schedulers.multi_stream(graph, cost=cost),
                       "regions, pairs known": schedulers.multi_region(graph, shared)}.items():
    print(f"{name:22} {price(schedule, shared):5.1f}   late: {len(late_tasks(graph, schedule))} tasks")
assert price(schedulers.multi_region(graph, shared), shared) < price(schedulers.multi_stream(graph, cost=cost), shared)

# Here `multi_stream` got the costs without the pairs. With them it sees that two streams are slower, and uses one; it
# does not move tasks to where they would gain.

print("\nmulti_stream, pairs known: " + ml.plan(graph, "multi_stream", shared).remarks[0])
assert price(schedulers.multi_stream(graph, cost=shared), shared) == price(schedulers.in_order(graph), shared)


# ---------------------------------------------------------------------------------------------------------------------
# Waiting costs memory: the inputs of a late task stay alive. Under a limit the scheduler gives up some overlap.

plan = ml.plan(graph, "multi_region", cost)
with suppress(MemoryLimitError):
    while True:
        print(f"{plan.peak_bytes[0]:12,} bytes   {plan.step:5.1f}")
        plan = plan.within(plan.peak_bytes[0] - 1)


# ---------------------------------------------------------------------------------------------------------------------
# Company. On a GPU a small kernel takes little more than its launch. Weight gradients that may wait can wait for each
# other, and become one launch. Each keeps its own product, so no bit changes. Suppose that a weight gradient takes 2,
# of which the launch is 1.5, and that each task costs 1 more if it lies between two others.

dear = replace(cost, launch=1.0, node=1.5)
for policy in ("in_order", "multi_stream"):
    for size in ("none", 2, 4, 8):
        plan = ml.plan(graph, policy, dear, group_weights=size)
        groups = groups_in(plan.graph).values()
        print(f"{policy:14} {size!s:>4} {plan.step:5.1f} {plan.peak_bytes[0]:9,} bytes", *groups)

# One stream gains with each launch that is saved. On two, the second one stands still until a group is complete, and
# after the last group nothing is left to run beside it: pairs are best here, and one group of all is worse than none.
# The picture shows who waits: 17W0 is the first pair. 15W0 could have run right after 16O0. It waits for 13W0, whose
# gradient 14O0 makes, two tasks later; so long the input and the gradient of layer 15 stay alive. That is the memory
# above.

pairs = ml.plan(graph, "multi_stream", dear, group_weights=2)
print("\n" + pairs.schedule.grid(width=100) + "\n")
print(explain(pairs.priced.graph, pairs.priced.schedule, pairs.cost, "17W0"))

# The simulator knows both prices: the launch that is saved, and the wait. `auto` asks it.

best = ml.plan(graph, "multi_stream", dear, group_weights="auto")
print("\n" + best.remarks[-1])
assert best.step == pairs.step < ml.plan(graph, "multi_stream", dear).step
assert ml.plan(graph, "multi_stream", dear, group_weights=8).step > ml.plan(graph, "multi_stream", dear).step

# On a CPU a native call costs nanoseconds, so there `auto` leaves weight gradients alone.
#
#     python -m minidl plan --scheduler multi_stream --group-weights auto --model mlp
#     python -m minidl explain 3W0 --scheduler multi_stream --group-weights 4 --model mlp --costs analytic


# ---------------------------------------------------------------------------------------------------------------------
# And it is still synchronous training. After any step a parameter has the value that training in order would give:
# reading it first runs the tasks that are late. Reading a loss or a learning rate runs none of them.

seen = []
for schedule in (schedulers.in_order(graph), crossing):
    model, optimizer, fresh = build()
    run, train = executor(fresh, schedule), data.digits(batch_size=32)
    losses = []
    for step in range(20):
        optimizer.lr = 0.05 / (1 + step / 10)
        losses.append(float(run(*next(train))))
    seen.append((losses, [p.numpy().tobytes() for p in model.parameters()]))
    run.close()
assert seen[0] == seen[1]
print("\nafter 20 steps: equal losses, and equal parameters bit for bit")

# With one feature no task may be late: clipping by the global norm needs every gradient before the first update.

print(*ml.plan(build(max_norm=1.0)[2], "multi_region", cost).remarks, sep="\n")

# On a network of your own:
#
#     python -m minidl compare --model mobilenet_v3_large --model-arg preset=tiny \
#         --schedulers in_order,multi_stream,multi_region
#     python -m minidl plan --curve --scheduler multi_region --model densenet121 --model-arg preset=tiny

# Exercise 9. exercises/exercise9.py puts all weight gradients beside the backward pass, and the step takes 24 on the
# costs above. Choose which of them run one step late, and place the rest, so that the step takes 18 or less:
#
#     python docs/tutorial/grade.py 9 my_regions.py
