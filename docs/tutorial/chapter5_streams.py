"""Chapter 5. Streams: run it.

    python docs/tutorial/chapter5_streams.py

So far only the test executors ran anything. Now a schedule meets a device. We predict how long a step takes, run it on
one lane and on two, and look at what happened.
"""

import os
import tempfile
from pathlib import Path

import minidl as ml
from minidl import data, models, nn, optim, schedulers
from minidl.core.report import compare


def build():
    """A model fresh from seed 0, and its step as a graph."""
    ml.seed(0)
    model = models.create("mlp", layers=5, hidden=256)
    optimizer = optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def step(x, y):
        loss = nn.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return model, ml.record(step, *next(data.digits(batch_size=128)))


# ---------------------------------------------------------------------------------------------------------------------
# A stream runs its calls in order. On the CPU it is a worker thread. The first lane needs none: it runs in the
# thread that calls. An event orders two streams: one records it, the other waits for it. Each wait of the schedule
# becomes one event.
#
# Everything else is decided before the first step. The memory plan gives every buffer a place in one arena. Each task
# becomes a list of calls whose arrays already exist. So a step allocates no array and decides nothing. It only calls.

arms = {}
for name, scheduler in {"one lane": schedulers.in_order, "two lanes": schedulers.multi_stream}.items():
    model, graph = build()
    arms[name] = model, graph, ml.StreamExecutor(graph, scheduler(graph), trace=True)

for name, (_, _, run) in arms.items():
    print(f"{name}: {len(run.waits)} waits, {run.peak_bytes:,} bytes at the peak, known before the first step")
    print(run.schedule.grid(width=100) + "\n")


# ---------------------------------------------------------------------------------------------------------------------
# Before we run, we predict. A cost model says how long each task takes. Here it is measured: each task by itself, in
# random legal orders, never in the order that is to be predicted. The simulator then plays the schedule: a lane runs
# its tasks in order, each as early as its lane and its edges allow.

cost = ml.measure(graph, seconds=0.5)
predicted = {name: ml.simulate(graph, run.schedule, cost) for name, (_, graph, run) in arms.items()}

# And now we run. Both arms see the same batches in the same order.

losses = {}
for name, (_, _, run) in arms.items():
    train = data.digits(batch_size=128)
    losses[name] = [float(run(*next(train))) for _ in range(30)]
    print(f"{name}: loss {losses[name][0]:.4f} -> {losses[name][-1]:.4f}")

# The result must not depend on the schedule, to the last bit.

one, two = ([p.numpy().tobytes() for p in model.parameters()] for model, _, _ in arms.values())
assert one == two
assert losses["one lane"] == losses["two lanes"]
print("the parameters are equal, bit for bit\n")


# ---------------------------------------------------------------------------------------------------------------------
# With trace=True an executor keeps a timeline of its last step: when each task was issued, started and ended, and when
# a lane had to wait. The simulator's prediction is a timeline too, of the same type. So both have the same report, and
# can be compared side by side.

timeline = arms["two lanes"][2].timeline
print(timeline.report())

# How to read it. `busy` is the share of the time in which the lane ran a task. `wait` is time in which it waited for
# another lane. `gap` is time between tasks in which it did neither: the cost of launching. The critical path
# is the chain of tasks and waits that made the step as long as it was. To make a step faster, something on that path
# must change.

print("\nPredicted against measured, two lanes:\n")
print(compare(predicted["two lanes"], timeline))

# This file asserts no time, and you should trust no single step either: this one was measured once, on a machine that
# may be busy with other things. With two free cores the second lane takes work off the first. With one core, or with
# tasks of a few microseconds, it costs more than it gives: lanes hand tasks over, each core must fetch what the other
# one has written, and neighbours slow each other down. The cost model has all of it, so `multi_stream` can ask the
# simulator first. Above it was not told the costs, so it used both lanes. With measured costs it may choose one:

plan = ml.plan(graph, "multi_stream", cost)
print(f"\nmulti_stream with measured costs: {plan.remarks[0] if plan.remarks else 'two lanes are worth it'}")

# The rule is in schedulers/single.py. Costs from flops and bytes charge nothing for a second lane, so with
# `--costs analytic` it always shows. The command line measures many steps, both arms in turn:
#
#     python -m minidl compare --model mlp --model-arg hidden=1024 --batch-size 256 --schedulers in_order,multi_stream

print(f"\nthis machine gives us {len(os.sched_getaffinity(0))} cores; one step of each, measured once:")
for name, (_, _, run) in arms.items():
    print(f"    {name:9}  predicted {predicted[name].makespan / 1000:6.2f} ms   measured "
          f"{run.timeline.makespan / 1000:6.2f} ms")

# A timeline can be saved and opened in ui.perfetto.dev. Lanes are threads there, and arrows show who waited for whom.

with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "two_lanes.json"
    timeline.save(path)
    assert len(ml.Timeline.load(path).tasks) == len(graph)
    print(f"\na trace of {path.stat().st_size:,} bytes; `minidl train --trace FILE` writes one")

# ---------------------------------------------------------------------------------------------------------------------
# So far a task runs on one lane, and the second lane has work only while there is a weight gradient to run. On many
# cores that is soon too little. `split` cuts tasks into parts that write disjoint elements: 1F0 becomes 1F0/1 and
# 1F0/2, each with half of the samples, and 1W0/2 has half of the weight's rows. A part waits only for the parts whose
# elements it reads, so the halves of a network's chain run side by side.

whole = ml.plan(graph, "multi_stream", ml.CostModel.analytic())
wide = ml.plan(graph, "multi_stream", ml.CostModel.analytic(), split=2)
print("\npredicted on two lanes:")
print(f"    tasks whole: {whole.predicted_step_ms:.3f} ms; in parts: {wide.predicted_step_ms:.3f} ms")
print(wide.timeline.report().splitlines()[0])

# The split step has bits of its own: a product of half the rows may add in another order. All its schedules have these
# bits, on any number of lanes. We run it on one lane and on two.

found = []
for scheduler in ("in_order", "multi_stream"):
    model, fresh = build()
    plan = ml.plan(fresh, scheduler, ml.CostModel.analytic(), split=2)
    run = ml.StreamExecutor(plan.graph, plan.schedule)
    train = data.digits(batch_size=128)
    found.append(([float(run(*next(train))) for _ in range(30)], [p.numpy().tobytes() for p in model.parameters()]))
    run.close()
assert found[0] == found[1]
assert abs(found[0][0][-1] - losses["one lane"][-1]) < 1e-3

# A part of half the rows is not half the time, and parts need room in the other core's cache. `split="auto"` measures
# tasks and their parts, tries several choices, all tasks whole among them, and takes the fastest: `--split auto`.


# ---------------------------------------------------------------------------------------------------------------------
# Who is to blame when a task is late? `explain` says when a task may start and must end, and which tasks it needs:
#
#     python -m minidl explain 3W0 --model mlp --scheduler multi_stream

for _, _, run in arms.values():
    run.close()

# Exercise 5. Suppose that a weight gradient takes twice as long as an output gradient. Then `sub` has more to do than
# `main`, and main stands idle at the end. exercises/exercise5.py asks for a scheduler that shares the work better. It
# is graded by the simulator on given costs, and by running it against the oracle:
#
#     python docs/tutorial/grade.py 5 my_scheduler.py
