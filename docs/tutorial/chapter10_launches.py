"""Chapter 10. What a launch costs: streams, events, graphs.

    python docs/tutorial/chapter10_launches.py

Giving work to a device takes time itself. For small kernels it takes longer than the work. Here we measure this cost,
and see how streams, events and graphs reduce it.
"""

import queue
import threading
from functools import partial
from time import perf_counter

import numpy as np

import minidl as ml
from minidl import data, models, nn, optim, schedulers
from minidl.devices.device import CPU, no_native_lanes
from minidl.devices.lanes import Event, Stream, Work

# ---------------------------------------------------------------------------------------------------------------------
# A call has a price before it does anything. `np.add` of one number and of a thousand numbers take nearly the same
# time: most of it goes into inspecting the arguments. That is why minidl binds its calls to their arrays once.


def microseconds(call, times=2000):
    """The time of one call, the best of seven rounds: other work on the machine only makes a round slower."""
    rounds = []
    for _ in range(7):
        begin = perf_counter()
        for _ in range(times):
            call()
        rounds.append((perf_counter() - begin) / times * 1e6)
    return min(rounds)


for size in (1, 1000, 100_000):
    x, y, z = np.ones((3, size), np.float32)
    print(f"np.add of {size:7,} numbers: "
          f"{microseconds(partial(np.add, x, y, out=z), 2000 if size < 1e5 else 100):8.2f} us")


# ---------------------------------------------------------------------------------------------------------------------
# A GPU works beside the host. To launch a kernel is to put it into a queue, a stream, and to go on. The launch takes
# the host's time, the kernel the device's. A stream of the CPU is a worker thread, and behaves alike: `start` hands
# over a program, which is a list of calls, and returns before it has run; `join` waits.
#
# An event orders two streams: one records it, the other waits for it. Here the host itself holds a stream back for a
# while, so we can be sure who was first.

log, gate, done = [], Event(), Event()
one, two = Stream("one"), Stream("two")
two.start([done.wait, partial(log.append, "the kernel of stream two")])
one.start([gate.wait, partial(log.append, "the kernel of stream one"), done.record])
log.append("the host has issued everything")
gate.record()
for stream in (one, two):
    stream.join()
    stream.close()
print("\n" + "\n".join(log))
assert log == ["the host has issued everything", "the kernel of stream one", "the kernel of stream two"]


# ---------------------------------------------------------------------------------------------------------------------
# What does a step cost then? Let us write down what a host issues for a schedule: for every task its launch, for every
# wait of the schedule a record on one stream and a wait on the other.


def issues_of(graph, schedule):
    """A list of ("launch", stream, task), ("record", stream, event) and ("wait", stream, event); streams take turns."""
    waits = [(graph.name(waiter), graph.name(source)) for waiter, source in schedule.waits(graph)]
    lanes = [list(schedule.names(lane)) for lane in range(len(schedule.lanes))]
    issues, launched = [], set()
    while any(lanes):
        for stream, tasks in enumerate(lanes):
            before = [source for waiter, source in waits if tasks and waiter == tasks[0]]
            if not tasks or not launched.issuperset(before):
                continue
            task = tasks.pop(0)
            issues += [("wait", stream, source) for source in before] + [("launch", stream, task)]
            issues += [("record", stream, task)] * any(source == task for _, source in waits)
            launched.add(task)
    return issues


# And a clock for it, which is all the model of a GPU that we need. Every call takes the host `call` microseconds. A
# kernel begins when it has been issued, its stream is free, and all events that its stream waits for have happened. It
# takes its work, and a gap of a microsecond or so that the device needs from one kernel to the next.

CALL, GAP = 8.0, 1.0  # microseconds, of the order that people report; the end of this chapter measures yours


def play(issues, work, call=CALL):
    """When the last kernel ends. `work`: how long a kernel takes; `call`: how long the host takes to issue anything."""
    host, free, events = 0.0, {}, {}
    for what, stream, name in issues:
        host += call
        at = free.get(stream, 0.0)
        if what == "launch":
            free[stream] = max(host, at) + work + GAP
        elif what == "record":
            events[name] = at
        else:
            free[stream] = max(at, events[name])
    return max(free.values())


ml.seed(0)
model = models.create("mlp", layers=8, hidden=64)
optimizer = optim.SGD(model.parameters(), lr=0.05)


def step(x, y):
    loss = nn.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss


graph = ml.record(step, *next(data.digits(batch_size=32)))
straight = issues_of(graph, schedulers.in_order(graph))
forked = issues_of(graph, schedulers.multi_stream(graph))
print(f"\n{len(graph)} kernels: {len(straight)} calls on one stream, {len(forked)} on two\n\n"
      f"how long a step takes, in us")

found = {}
for work in (2.0, 8.0, 50.0):
    for streams, issues in ((1, straight), (2, forked)):
        found[work, streams] = play(issues, work)
    print(f"    kernels of {work:3.0f}: one stream {found[work, 1]:7.0f}   two streams {found[work, 2]:7.0f}   gain "
          f"{found[work, 1] / found[work, 2]:.2f}x")

# Kernels of 2 us: the device waits for the host all the time. A second stream has nothing to hide, and its events are
# calls too, so the step gets slower. Kernels of 50 us: the host is far ahead, and only the device's time counts. In
# between, both matter. A rule of thumb: per kernel, a step takes the larger of the host's and the device's time.

assert found[2.0, 2] > found[2.0, 1] > 3 * len(graph) * 2.0
assert found[50.0, 2] < found[50.0, 1] < 1.1 * len(graph) * 50.0


# ---------------------------------------------------------------------------------------------------------------------
# Graphs. Every step issues the same calls. So issue them once, let the driver write down which kernel comes after
# which, and from then on launch the whole thing with one call. That is a CUDA graph. In our clock the host pays once,
# and the device finds everything issued.

print(f"\nthe same by a graph, one launch of {CALL:g} us")
for work in (2.0, 8.0, 50.0):
    replayed = {streams: CALL + play(issues, work, call=0.0) for streams, issues in ((1, straight), (2, forked))}
    print(f"    kernels of {work:3.0f}: one stream {replayed[1]:7.0f}   two streams {replayed[2]:7.0f}   gain "
          f"{replayed[1] / replayed[2]:.2f}x"
          f"   against launches {found[work, 1] / replayed[1]:.2f}x")
    assert replayed[2] < replayed[1] < found[work, 1] + 2 * CALL

# Two things are mixed up easily. A graph takes launches away, streams let kernels overlap. For small kernels the graph
# is the larger gain by far, and only with it does the second stream give anything. Whoever compares two streams in a
# graph with one stream without a graph has measured the graph.
#
# How does the driver know the order? It watches the streams. A launch comes after the last launch on its stream. A wait
# adds the work that the event stood for when it was recorded. Nothing else: the graph has every order that the streams
# had, and no other. minidl checks that each wait of the schedule is a path in the captured graph.
#
# `ml.GraphExecutor` does all that on a GPU. The CPU has no CUDA graphs, and says so.

try:
    ml.GraphExecutor(graph, schedulers.multi_stream(graph))
except ml.DeviceError as error:
    print(f"\non this device: {error}")

# So here is the CPU's price of handing over call by call, against a program handed over at once. It is printed, and
# nothing is asserted: this machine may be busy.

x, y, z = np.ones((3, 1000), np.float32)
small, calls = partial(np.add, x, y, out=z), 500
todo, answers = queue.SimpleQueue(), queue.SimpleQueue()


def serve():
    while (call := todo.get()) is not None:
        answers.put(call())


def one_by_one():
    for _ in range(calls):
        todo.put(small)
        answers.get()


def at_once():
    worker.start([small] * calls)
    worker.join()


server, worker = threading.Thread(target=serve), Stream("worker")
server.start()
print(f"\na small call in a worker thread, handed over and waited for one by one: "
      f"{microseconds(one_by_one, 1) / calls:6.2f} us")
print(f"                                as a program of {calls}:                    "
      f"{microseconds(at_once, 1) / calls:6.2f} us")
todo.put(None)
server.join()
worker.close()


# ---------------------------------------------------------------------------------------------------------------------
# The CPU has its own graph: native lanes. Each call was bound before, so Python only walks a list.
# A native lane is the same list as an array of machine addresses, each with the address of its arguments, and one call
# of compiled code walks it. The rungs of one small call, and then a whole step on both kinds of lane:


def step_on(kind):
    """An executor of the step on this kind of lane."""
    device = CPU()
    device.set_lanes(kind)
    return ml.StreamExecutor(graph, schedulers.in_order(graph), device=device)


if why := no_native_lanes():
    print(f"\n{why}")
else:
    from minidl.devices.native.lanes import NativeLanes

    print(f"\nPython looks up the arguments at each call: {microseconds(lambda: np.add(x, y, out=z)):6.2f} us")
    print(f"bound to its arrays beforehand:              {microseconds(small):6.2f} us")
    for count, said in (1, "native, from Python and back:"), (calls, f"native, one of {calls} in one call:"):
        lanes = NativeLanes(Work(["main"], [0], [[0]], [], lambda task, stream, n=count: [small] * n, str))
        print(f"{said:44} {microseconds(lanes.run, 2000 // count) / count:6.2f} us")
        lanes.close()
    batch = next(data.digits(batch_size=32))
    for kind in ("python", "native"):
        run = step_on(kind)
        print(f"the whole step, {kind} lanes: {microseconds(lambda run=run: run(*batch), 50):8.0f} us")
        run.close()

# ---------------------------------------------------------------------------------------------------------------------
# Measure yours. Every way to issue a kernel, its price for the host, its latency and its gap on the device; events,
# forks and joins; n kernels by calls and by graph, as a fixed price and one for each. If a library is not installed,
# its row says so.
#
#     python bench/launch_overhead.py --quick
#     python bench/launch_overhead.py --device cuda --plot launches.svg

# Exercise 10. Be the driver: exercises/exercise10.py gets a list like the one above, and must return which launch comes
# after which. It knows streams, and no events yet:
#
#     python docs/tutorial/grade.py 10 my_capture.py
