"""Chapter 3. The task graph.

    python docs/tutorial/chapter3_graph.py

In chapter 2 we wrote the dependencies by hand. That works for a stack of layers and for nothing else. Here the graph
follows automatically from the buffers that each task reads and writes.
"""

import numpy as np

import minidl as ml
from minidl import models, nn, optim

# ---------------------------------------------------------------------------------------------------------------------
# A training step in minidl is an ordinary function. Called with arrays, it trains: every op runs when it is called.

ml.seed(0)
model = models.mlp(4, 8, 3)
optimizer = optim.SGD(model.parameters(), lr=0.1)


def step(x, y):
    loss = nn.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss


# Given to `record`, the same function yields its tasks. Nothing is computed and no parameter changes. Of the example
# only the shapes and types matter.

before = [p.numpy().copy() for p in model.parameters()]
graph = ml.record(step, np.zeros((2, 4), np.float32), np.zeros(2, np.int64))
assert all((p.numpy() == b).all() for p, b in zip(model.parameters(), before, strict=True))

# A task reads buffers and writes buffers. A buffer is a piece of memory with a name and a role. Here they are, in the
# order in which the step emitted them. This order is the sequential order; it is always a legal one. The name of
# an activation begins with the unit that makes it.


def names(buffers):
    return ", ".join(f"{b.name.replace('mlp/', '')}" for b in buffers)


for task in graph:
    print(f"{task.name}  reads {names(task.reads)}\n     writes {names(task.writes)}")

# Find 2W0 and 2O0 in the list: the two gradients of the second linear layer. They read the same gradient, and neither
# reads the other's result. Find the updates 0U0 and 2U0: they read a gradient and overwrite a weight.


# ---------------------------------------------------------------------------------------------------------------------
# Now the edges. The first rule is plain: a task that reads a buffer comes after the task that wrote it. Eight lines:


def read_after_write(graph):
    """All pairs (earlier, later) where the later task reads what the earlier one wrote."""
    edges, writer = set(), {}
    for task in graph:
        edges |= {(writer[b.index], task.name) for b in task.reads if b.index in writer}
        writer |= {b.index: task.name for b in task.writes}
    return edges


# The graph has its own edges. `graph.preds[t]` are the tasks that task t must wait for. Let us compare.

mine = read_after_write(graph)
all_edges = {(graph.name(p), task.name) for task in graph for p in graph.preds[task.index]}
assert mine < all_edges
print(f"\n{len(mine)} edges come from reading what was written. These are still missing:\n")
for earlier, later in sorted(all_edges - mine):
    print(f"    {earlier} -> {later}")

# The missing ones all lead to an update. An update overwrites the weight in place. The forward task and the output
# gradient read that weight, and they mean the old one. So the update must wait until they have read. This is the second
# rule, write after read. A third rule, write after write, keeps two writers of one buffer in order.
#
# These are the only three rules. Nobody writes an edge by hand anywhere in minidl. If a task reads a new buffer
# tomorrow, its edges are right tomorrow.


# ---------------------------------------------------------------------------------------------------------------------
# The edges leave freedom. To see how much, ask of each task: how early could it run, and how late, if every task took
# one unit of time and lanes were free? Tasks of the critical chain have no choice. The others have a range.

preds = [graph.preds[t].tolist() for t in range(len(graph))]
succs = [graph.succs[t].tolist() for t in range(len(graph))]
early, late = [0] * len(graph), [0] * len(graph)
for t in range(len(graph)):
    early[t] = max((early[p] + 1 for p in preds[t]), default=0)
end = max(early)
for t in reversed(range(len(graph))):
    late[t] = min((late[s] - 1 for s in succs[t]), default=end)

print("\nwhere each task may run (# is the critical chain):\n")
for task in graph:
    first, last = early[task.index], late[task.index]
    mark = "#" if first == last else "-"
    print(f"    {task.name:4}", "".join(mark if first <= n <= last else "." for n in range(end + 1)))
assert late[graph.index("2W0")] > early[graph.index("2W0")]
assert all(early[t] == late[t] for t in range(len(graph)) if graph[t].kind == ml.Kind.O)


# ---------------------------------------------------------------------------------------------------------------------
# Why are the edges about buffers and not about layers? Because that makes the next thing free of special cases: cut the
# batch in two micro-batches and add up their gradients. A task of micro-batch 1 ends in 1. The addition is a read and a
# write of the same buffer, so 0W1 comes after 0W0. The order of the additions is part of the graph, and with it the
# last bit of the sum.


def step_in_two(x0, y0, x1, y1):
    for number, (x, y) in enumerate([(x0, y0), (x1, y1)]):
        with ml.micro_batch(number):
            (nn.cross_entropy(model(x), y) * 0.5).backward()
    optimizer.step()


half = (np.zeros((1, 4), np.float32), np.zeros(1, np.int64))
two = ml.record(step_in_two, *half, *half)
print("\n0W1 waits for", *(two.name(p) for p in two.preds[two.index("0W1")]))
assert two.index("0W0") in two.preds[two.index("0W1")]
assert two.index("0W0") not in two.preds[two.index("1O1")]  # the chain does not care


# ---------------------------------------------------------------------------------------------------------------------
# A pass makes a graph from a graph. `unroll` puts several steps in a row. A task of the next step gets #1. Two kinds of
# edges cross the border between the steps.

unrolled = ml.unroll(graph, 2)


def crossing(g):
    return {(g.name(p), t.name) for t in g for p in g.preds[t.index] if t.iteration > g[int(p)].iteration}


print("\nacross the border of two steps:", *(f"{a} -> {b}" for a, b in sorted(crossing(unrolled))), sep="\n    ")
assert ("2U0", "2F0#1") in crossing(unrolled)  # the next forward pass reads the updated weight
assert ("2W0", "1F0#1") in crossing(unrolled)  # ... and it writes the activation that 2W0 has yet to read

# The first kind is the training itself: U -> F. The second kind, W -> F, is only about memory: the forward pass of the
# next step writes into the same activation buffers. A second set of buffers, used in turn, takes it away. That pass is
# called `rename`.

renamed = ml.rename(unrolled, copies=2)
print("\nwith two sets of buffers:", *(f"{a} -> {b}" for a, b in sorted(crossing(renamed))), sep="\n    ")
assert all(earlier.split("#")[0][1] == "U" for earlier, _ in crossing(renamed))

# The remaining edges start at an update. So 2W0 may now run beside the next forward pass, until its own layer's turn.
# That is how far out of order backprop can go and still be exactly the same training.
#
# Exercise 3. `read_after_write` above knows one rule of three. exercises/exercise3.py asks for all of them. It is
# graded on graphs of several kinds, against the graph's own edges:
#
#     python docs/tutorial/grade.py 3 my_edges.py
