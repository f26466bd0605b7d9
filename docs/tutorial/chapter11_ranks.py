"""Chapter 11. A pipeline on two ranks: from the plan to the trace, and two hangs on the way.

    python docs/tutorial/chapter11_ranks.py

Chapter 6 planned pipelines. Here one runs: stages on ranks that share no memory, so everything that goes from one to
the other is a message. Messages can hang. This chapter writes the two hangs that everybody writes once.
"""

import numpy as np

import minidl as ml
from minidl import models, nn, ops, optim
from minidl.core.schedule import Schedule, ScheduleError
from minidl.core.tasks import RECEIVES, SENDS, What
from minidl.passes.messages import check_rendezvous
from minidl.plans.program import lower
from minidl.runtime.comm import Standstill
from minidl.runtime.comm.loopback import LoopBack, run_ranks
from minidl.runtime.executors import DistributedExecutor
from minidl.schedulers import pipeline

# ---------------------------------------------------------------------------------------------------------------------
# A step on four micro-batches, recorded as ever.

MICRO_BATCHES, SHARE = 4, 32
random = np.random.default_rng(0)
parts = []
for _ in range(MICRO_BATCHES):
    parts += [random.standard_normal((SHARE, 64)).astype(np.float32), random.integers(0, 10, SHARE)]


def recorded():
    ml.seed(0)
    model = models.mlp(64, 256, 256, 256, 10)
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(*parts):
        total = None
        for i in range(MICRO_BATCHES):
            with ml.micro_batch(i):
                loss = nn.cross_entropy(model(parts[2 * i]), parts[2 * i + 1]) * (1 / MICRO_BATCHES)
                loss.backward()
                total = loss.detach() if total is None else ops.add(total, loss.detach())
        optimizer.step()
        return total

    return model, ml.record(step, *parts)


# The plan: two stages, in the order called 1F1B. B is a whole backward, O and W in one.

model, graph = recorded()
plan = ml.plan(graph, "one_f_one_b", ml.CostModel.analytic(), ml.Machine(ranks=2))
print(plan.schedule.grid(), "\n")

# Rank 1 reads results of rank 0. One pass adds a send and a receive for each such result. 0SF0>1 sends the result of
# 0F0 to rank 1, and 0RF0>1 receives it there. Each rank gets a lane for each peer and direction, in the order in which
# results are made.

talking, schedule = pipeline.add_communication(plan.graph, plan.schedule)
print(schedule.grid(), "\n")
assert {str(lane) for lane in schedule.lanes} == {"0/main", "0/send->1", "0/recv<-1", "1/main",
                                                  "1/send->0", "1/recv<-0"}

# A rank runs its program: its part of the graph, its lanes, its memory. It needs less memory than the whole.

programs = [lower(talking, schedule, ranks=2, rank=rank) for rank in range(2)]
print(programs[1], "\n")
alone = lower(graph, ml.schedulers.in_order(graph))
print(f"bytes: rank 0 {programs[0].peak_bytes:,}, rank 1 {programs[1].peak_bytes:,}, one "
      f"process {alone.peak_bytes:,}\n")
assert max(p.peak_bytes for p in programs) < alone.peak_bytes


# ---------------------------------------------------------------------------------------------------------------------
# The first hang. Why lanes? The plain way is to write all of a rank in one row: receive, compute, send.

def in_one_row(talking, schedule):
    """Each send right after the task whose result it sends, each receive right before the first task that reads it."""
    rows = {}
    for i, lane in enumerate(schedule.lanes):
        if lane.name == "main":
            row = rows.setdefault(lane, [])
            for task in talking.find(schedule.order(i)).tolist():
                row += [p for p in talking.preds[task].tolist() if talking.kind[p] in RECEIVES and p not in row]
                row += [task, *(s for s in talking.succs[task].tolist() if talking.kind[s] in SENDS)]
    return Schedule.of(talking, rows)


small = ml.plan(ml.Pipeline(3), "one_f_one_b", machine=ml.Machine(2))
first = in_one_row(*pipeline.add_communication(small.graph, small.schedule))
for rank in range(2):
    print(f"rank {rank}: {' '.join(first.names(rank))}")

# It looks right, and with small messages it runs: MPI takes them away before anybody receives them. From some size on
# it does not, and a send then ends only when its receive is posted. That is called a rendezvous. Now rank 0 sends its
# second activation, rank 1 its first gradient, and each waits for the other to receive. Every plan is proved under
# rendezvous:

talking_small = pipeline.add_communication(small.graph, small.schedule)[0]
first.validate(talking_small)  # if sends were buffered, it would run


def circle(talking, schedule):
    """The message of the proof, if it fails."""
    try:
        check_rendezvous(talking, schedule)
    except ScheduleError as error:
        return error.message
    return ""


print(f"\n{circle(talking_small, first)}\n")
assert "0SF1>1 waits for 1SO0>0" in circle(talking_small, first)

# ---------------------------------------------------------------------------------------------------------------------
# The second hang. The known cure is that odd ranks receive first where even ranks send first.


def swapped(schedule):
    """On odd ranks a receive goes before the send next to it."""
    rows = {lane: schedule.names(i) for i, lane in enumerate(schedule.lanes)}
    for lane, row in rows.items():
        for i in range(len(row) - 1):
            if lane.rank % 2 and "S" in row[i] and "R" in row[i + 1]:
                row[i], row[i + 1] = row[i + 1], row[i]
    return Schedule.from_names(rows)


cured = swapped(first)
assert not circle(talking_small, cured)
print(f"cured, rank 1: {' '.join(cured.names(1))}\n")

# It helps, until a rank has two stages. Then a send and the receive that it waits for need not be neighbours any more:

looped = ml.plan(ml.Pipeline(4), "interleaved", machine=ml.Machine(2))
talking_looped, lanes = pipeline.add_communication(looped.graph, looped.schedule)
second = swapped(in_one_row(talking_looped, lanes))
print(f"{circle(talking_looped, second)}\n")
assert "3SO0>0 waits for 0SF2>1" in circle(talking_looped, second)

# One arrangement always works: a lane for each peer and direction, in the sender's order, receives posted early, and
# only the task that reads a message waits for it. Put each message right after its source, and you see why no circle
# can close.

assert not circle(talking_looped, lanes)

# ---------------------------------------------------------------------------------------------------------------------
# Now the run. Ranks are threads here, joined by a loop-back whose sends are all rendezvous.

own = []
for _ in range(2):
    model, graph = recorded()
    found = ml.plan(graph, "one_f_one_b", ml.CostModel.analytic(), ml.Machine(ranks=2))
    own.append((model, *pipeline.add_communication(found.graph, found.schedule)))


def work(communicator):
    model, talking, schedule = own[communicator.rank]
    run = DistributedExecutor(talking, schedule, communicator, trace=True)
    for _ in range(3):
        run(*parts)
    timeline = run.timeline_of_all()
    run.close()
    held = {id(s.live) for s in run.program.graph.storages}
    return timeline, {i: p.numpy().tobytes() for i, p in enumerate(model.parameters()) if id(p.storage) in held}


(timeline, of_rank_0), (_, of_rank_1) = run_ranks(2, work)

# Each rank has its own stage's parameters. Together they equal the parameters of one process, bit for bit.

model, graph = recorded()
run = ml.SequentialExecutor(graph)
for _ in range(3):
    run(*parts)
assert [(of_rank_0 | of_rank_1)[i] for i in range(8)] == [p.numpy().tobytes() for p in model.parameters()]
print("two ranks and one process: the same bits\n")

# And the trace of both ranks, on one clock. Idle time counts as *wait* until the message is sent, then as *transfer*,
# so you see whether the plan or the link is to blame. `timeline.save("step.json")` makes a file for ui.perfetto.dev.

print(timeline.report(), "\n")
for rank in range(2):
    here = np.array([lane.rank == rank and lane.name == "main" for lane in timeline.lanes])[timeline.lane]
    spent = {what.name.lower(): (timeline.end - timeline.start)[here & (timeline.what == what)].sum() for what in What}
    print(f"rank {rank}: " + ", ".join(f"{what} {us:.0f} us" for what, us in spent.items()))

# ---------------------------------------------------------------------------------------------------------------------
# If something hangs all the same, say in a step of your own, minidl gives up after a minute (here: half a second), and
# one line says who waits for whom.


def both_receive(communicator):
    from minidl import Kind
    from minidl.runtime.comm import Host
    from minidl.runtime.comm.flight import Entry, Flight

    peer = 1 - communicator.rank
    transfer = communicator.bind(Kind.RF, Host(communicator, [np.zeros(2048)], sums=False), None, peer)
    flight = Flight(communicator)
    flight.begin([[Entry(0, transfer, None, 16384, name=f"{peer}RF0>{communicator.rank}", peers=(peer,))]])
    flight.run()


LoopBack.wait_seconds = 0.5
try:
    run_ranks(2, both_receive)
except Standstill as error:
    print(f"\n{error}\n")

# On MPI the run is
#
#     mpiexec -n 2 python -m minidl train --model mlp --parallel pipeline --scheduler one_f_one_b --micro-batches 4
#         --steps 100 --trace step.json
#
# Exercise 11. A hang. The plan in exercises/exercise11.csv hangs under rendezvous sends. Move receives so that it does
# not, and leave the computation of each rank in its order. Grade it with
#
#     python docs/tutorial/grade.py 11 my_messages.csv
