"""Chapter 4. A schedule and its proof.

    python docs/tutorial/chapter4_schedule.py

The graph says what must come before what. A schedule says where and in which order things run: for every lane the
list of its tasks. It is plain data. It can be read, edited, saved, compared, and proved right before anything runs.
"""

import minidl as ml
from minidl import data, models, nn, optim, schedulers
from minidl.runtime.executors import VersionError

ml.seed(0)
model = models.create("mlp", preset="tiny")  # two linear layers, 64-16-10
optimizer = optim.SGD(model.parameters(), lr=0.1)


def step(x, y):
    loss = nn.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss


x, y = next(data.digits(batch_size=64))
graph = ml.record(step, x, y)

# ---------------------------------------------------------------------------------------------------------------------
# A scheduler is a function from a graph to a schedule. It knows no device and no clock. The simplest is `in_order`:
# everything on one lane, as recorded. `multi_stream` puts F and O on the lane `main`, W and U on the lane `sub`. (Here
# it estimates costs from flops and bytes. With measured costs, tasks as short as these are faster on one lane; then it
# uses one, and says why. Chapter 5 comes back to that.)
#
# `validate` proves a schedule against a graph and gives it back, or says what is wrong. `grid` draws it: lanes are
# rows, time goes to the right, every task takes one unit.

base = schedulers.in_order(graph).validate(graph)
ooo = schedulers.multi_stream(graph).validate(graph)
print("in order\n" + base.grid())
print("\nmulti-stream\n" + ooo.grid())

# Units count from 1 here. Unit 0 turns the 8x8 images into rows of 64, which is only another view: nothing has to run.

# Nothing is special about these two. A schedule of your own is a dictionary of lanes. Here the updates get a third one.

mine = ml.Schedule.from_names({
    ml.Lane(0, "main"): ["1F0", "2F0", "3F0", "4F0", "4O0", "3O0", "2O0"],
    ml.Lane(0, "sub"): ["3W0", "1W0"],
    ml.Lane(0, "updates"): ["3U0", "1U0"],
}).validate(graph)
print("\nby hand\n" + mine.grid())

# As text a schedule is a CSV file with the columns rank, lane, task. The command line writes and reads the same file:
#
#     python -m minidl plan --model mlp --model-arg preset=tiny --costs analytic --scheduler multi_stream --save p.csv
#     python -m minidl check p.csv --model mlp --model-arg preset=tiny

assert ml.Schedule.from_csv(mine.to_csv()).to_csv() == mine.to_csv()
print("\nthe last lines of its CSV file\n    " + "\n    ".join(mine.to_csv().splitlines()[-3:]))


# ---------------------------------------------------------------------------------------------------------------------
# Lanes run at the same time, so edges between lanes must be kept by waits: 3W0 on `sub` waits until 4O0 on `main` has
# ended. `waits` finds the fewest that are enough. An edge needs no wait when lane order or another wait implies it.

waits = ooo.waits(graph)
print(f"\nthe graph has {graph.edges} edges; multi-stream needs {len(waits)} waits:")
for waiter, awaited in waits:
    print(f"    {graph.name(waiter)} waits for {graph.name(awaited)}")
assert len(waits) < graph.edges
assert len(base.waits(graph)) == 0  # one lane needs none


# ---------------------------------------------------------------------------------------------------------------------
# The proof has four parts: every task appears exactly once; no task comes before something that it needs on its own
# lane; the lanes cannot all wait for each other; and the waits order every edge. Let us break them one by one. The
# message names the tasks, and the grid marks them in brackets.


def broken(title, main, sub, waits=None):
    schedule = ml.Schedule.from_names({ml.Lane(0, "main"): main.split(), ml.Lane(0, "sub"): sub.split()})
    try:
        schedule.validate(graph, waits)
    except ml.ScheduleError as error:
        print(f"\n{title}\n{error}")
        return error
    raise AssertionError(f"{title}: the proof should have failed")


chain = "1F0 2F0 3F0 4F0 4O0 3O0 2O0"
error = broken("1. somebody lost a weight gradient", chain, "3U0 1W0 1U0")
assert error.tasks == ("3W0",)
broken("2. a weight gradient that would be counted twice", chain, "3W0 3U0 1W0 1U0 1W0")
broken("3. an update before its gradient", chain, "3U0 3W0 1W0 1U0")

# A deadlock needs two lanes. 1W0 waits for 2O0, which comes after 3U0 on its lane. And 3U0 waits for 3W0, which comes
# after 1W0. On either lane alone the order looks fine.

error = broken("4. a circle", "1F0 2F0 3F0 4F0 4O0 3O0 1W0 3W0", "3U0 2O0 1U0")
assert set(error.tasks) == {"1W0", "2O0", "3U0", "3W0"}

# A race is a wait that is missing. We take the right order and leave out the first of its waits.

error = broken("5. a race", chain, "3W0 3U0 1W0 1U0", waits=waits[1:])


# ---------------------------------------------------------------------------------------------------------------------
# A race is the worst of the five, because such a program mostly works. The lanes happen to be quick or slow, and the
# result is right, until one day it is not. So there are two guards. One is the proof, which looks at no clock. The
# other is an executor for tests. It runs one task at a time, and draws from a seed which lane may go next. It also
# knows which version of each buffer a task means to read. With the missing wait, and with the proof switched off:

caught = []
for seed in range(20):
    try:
        ml.CheckingExecutor(graph, ooo, seed=seed, waits=waits[1:], prove=False)(x, y)
    except VersionError as error:
        caught.append(seed)
        message = error
print(f"\n{len(caught)} of 20 random orders were caught; the last said:\n{message}")
assert caught

# With all waits every order is right, and gives the same bits as the sequential run.


def parameters_after(run):
    """Bytes of the parameters after one step from the same start."""
    for p, start in zip(model.parameters(), started, strict=True):
        p.numpy()[...] = start
    run(x, y)
    return b"".join(p.numpy().tobytes() for p in model.parameters())


started = [p.numpy().copy() for p in model.parameters()]
oracle = parameters_after(ml.SequentialExecutor(graph))
for seed in range(20):
    assert parameters_after(ml.CheckingExecutor(graph, mine, seed=seed)) == oracle
print("\n20 random orders of the three lanes gave the same parameters, bit for bit")

# Exercise 4. exercises/exercise4.csv is a plan of this network that somebody edited by hand. It has several mistakes.
# Copy it, mend it, and let minidl grade it; it exits with 0 when the plan is right:
#
#     cp docs/tutorial/exercises/exercise4.csv my_plan.csv
#     python -m minidl check my_plan.csv --model mlp --model-arg preset=tiny
#
# `python docs/tutorial/grade.py 4 my_plan.csv` asks a little more: that the work is still on two lanes.
