"""Chapter 12. Memory for time: keep, compute again, move out, share out.

    python docs/tutorial/chapter12_memory.py

A training step holds what its forward pass made until the backward pass has read it. Here one network is planned five
ways: with all activations kept, with most of them computed again, within a limit, with memory moved out to a file, and
on ranks that share out the optimizer's states.
"""

import minidl as ml
from minidl import data, models, nn, optim
from minidl.runtime.executors import executor
from minidl.schedulers.search.curve import curve


def build():
    """A deep model fresh from seed 0, and its step as a graph."""
    ml.seed(0)
    model = models.create("mlp", layers=17, hidden=64)
    optimizer = optim.Adam(model.parameters(), lr=0.001)

    def step(x, y):
        loss = nn.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return model, ml.record(step, *next(data.digits(batch_size=256)))


def show(name, plan):
    activations = plan.as_json()["activation_peak_bytes"]
    print(f"{name:22} {plan.peak_bytes[0]:10,} bytes, {activations:10,} of them activations, {plan.step:7.1f} us")


# ---------------------------------------------------------------------------------------------------------------------
# The memory of a step. The activations of a layer live from its forward to its backward, so the first layer's live
# longest, and all are alive when the backward pass begins. Memory is planned before anything runs: the peak is known.

model, graph = build()
whole = ml.plan(graph, "in_order")
show("all kept", whole)


# ---------------------------------------------------------------------------------------------------------------------
# Compute again. A forward can run a second time, just before the backward pass of its layer: a task R, as in `4R0`.
# With L blocks, keep the output of every sqrt(L)-th and drop the rest. Then about sqrt(L) outputs are kept, and one
# part of sqrt(L) blocks is alive at a time: memory grows with sqrt(L), for at most one more forward pass (Chen et al.,
# 2016).

again = ml.plan(graph, "in_order", recompute="sqrt")
show("sqrt(L) parts", again)
print("computed again:", " ".join(t.name for t in again.graph if t.kind == ml.Kind.R))
assert again.peak_bytes < whole.peak_bytes
assert again.step > whole.step

# A task R has the same launches on the same inputs, so it makes the same bits.

seen = []
for plan in (whole, again):
    model, fresh = build()
    made = ml.plan(fresh, plan.schedule)
    run, train = executor(made.graph, made.schedule), data.digits(batch_size=256)
    seen.append(([float(run(*next(train))) for _ in range(5)], [p.numpy().tobytes() for p in model.parameters()]))
    run.close()
assert seen[0] == seen[1]
print("after 5 steps: equal losses, and equal parameters bit for bit\n")


# ---------------------------------------------------------------------------------------------------------------------
# A limit. Which activations to keep is a choice, and blocks differ in bytes and in time. A dynamic program over the
# chain of blocks finds the choice with the least time within a limit (rotor: Beaumont et al., 2019). On the command
# line a limit is enough: `--memory-limit 900KB`.

limit = (whole.peak_bytes[0] + again.peak_bytes[0]) // 2
best = ml.plan(graph, "in_order", machine=ml.Machine(memory_limit=limit), recompute="auto")
show("within a limit", best)
print(best.remarks[-1])
assert best.peak_bytes[0] <= limit
assert best.step <= again.step


# ---------------------------------------------------------------------------------------------------------------------
# Move out. An activation that nobody needs for a while can be copied to the host or to a file (D, as in `4D0`), and
# copied back before its backward (H), on lanes beside the computation. So can an optimizer's states between two
# updates. A later task waits for D, since it may use the memory; and H waits for a task before its reader, or it would
# come back at once. If copies are faster than layers, this is free (PipeOffload: Wan et al., 2025).

out = ml.plan(graph, "in_order", offload="all")
show("moved out", out)
print(out.remarks[-1])
for t in out.graph:
    if t.unit == 2 and t.kind in (ml.Kind.D, ml.Kind.H):
        print(t, "waits for", " and ".join(out.graph.name(p) for p in out.graph.preds[t.index]))
assert out.peak_bytes < again.peak_bytes

# The bits stay: a copy is a copy. Nothing is lost if the disk is full, since the room is taken before the first step.

model, fresh = build()
made = ml.plan(fresh, out.schedule)
run, train = executor(made.graph, made.schedule), data.digits(batch_size=256)
assert seen[0] == ([float(run(*next(train))) for _ in range(5)], [p.numpy().tobytes() for p in model.parameters()])
run.close()


# ---------------------------------------------------------------------------------------------------------------------
# Share out. Data-parallel ranks all hold the same optimizer states: two numbers a parameter for Adam. Instead each rank
# can keep the states of its share: gradients are reduce-scattered (AS), each rank updates its share of the parameters,
# and an all-gather (AG) brings the shares to all (ZeRO 1). Level 2 frees whole gradients before the next ones are made.
# On level 3 parameters are in shares as well: an all-gather before each use brings them together (ZeRO 3, FSDP).

ranks = ml.Machine(4, collective=lambda sizes: 5.0)
for shard in (0, 1, 3):
    show(f"4 ranks, shard {shard}", ml.plan(graph, "barrier", machine=ranks, shard=shard))


# ---------------------------------------------------------------------------------------------------------------------
# One curve. Each of these plans is a point: its peak and its time. The points that no other plan beats in both make the
# curve. Every other plan wastes memory or time.

points = curve(graph, ml.CostModel.analytic(), lambda recompute, limit, shard, lag: ml.plan(
    graph, "in_order", machine=ml.Machine(memory_limit=limit), recompute=recompute))
print("\nthe curve")
for point in points:
    print(f"{point.peak:10,} bytes   {point.plan.step:7.1f} us   {point.choice}")

# On a network of your own, as a page on which you can choose a point:
#
#     python -m minidl plan --curve --model gpt --model-arg preset=tiny --scheduler in_order --html curve.html

# Exercise 12. exercises/exercise12.py keeps the activations of every block, whatever the limit. Choose the blocks to
# keep so that the step fits, and takes the least time:
#
#     python docs/tutorial/grade.py 12 my_choice.py
