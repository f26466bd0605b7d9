"""The essence of minidl in one sitting: the order of the backward pass is a value.

    python docs/essence.py

NumPy and the standard library alone, to be read from top to bottom. Each section names the files of the engine that do
it in earnest, with devices, memory, processes and all other known orders.

    1  tasks, and edges from what they read and write        minidl/core/tasks.py, minidl/core/graph.py
    2  a tape whose backward pass is a list of tasks         minidl/autograd/tape.py, minidl/ops
    3  a schedule, its waits, and a proof by vector clocks   minidl/core/schedule.py
    4  a clock: what a schedule costs                        minidl/pricing/simulation.py
    5  one device: weight gradients on a second stream       schedulers/single.py
    6  data-parallel ranks: reverse first-k                  schedulers/data_parallel.py, schedulers/iterations.py
    7  pipelines: 1F1B, ZB-H1, fast-forwarding, modulo       schedulers/pipeline
    8  threads, events, and messages between two ranks       minidl/runtime, minidl/passes/send_receive.py
    9  the digits under three orders, with equal bits        docs/tutorial

The idea. A layer y = f(x, w) has two gradients, and both read dy:

    output gradient   O   dx = dy * df/dx    the layer below waits for it
    weight gradient   W   dw = dy * df/dw    nobody waits for it but the update

Frameworks compute both at once, from the last layer to the first. But only the O form a chain: a W may run at any later
moment, beside the chain, in the gaps of a pipeline, or when the network link is free. So a backward pass is not a list
but a graph, and its order is a choice. This file makes the graph, makes choices, proves them, prices them, and runs
them with equal bits. The scheduling is from "Out-of-order backprop" (Oh, Lee, Kim, Seo, EuroSys 2022).
"""

from __future__ import annotations

import gzip
import os
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # a core for each stream: no product may take them all
import numpy as np

# ------------------------------------------------------------------------------------------------------------ 1. Tasks
# A task reads named values and writes named values, and `run` makes the one from the other. It knows no order, stream
# or rank. It prints as unit, kind and micro-batch: 4W0 is the weight gradient of the fifth operation. Kinds: F forward,
# O output gradient, W weight gradient, B both gradients at once, U update, S send, R receive.


@dataclass(frozen=True)
class Task:
    unit: int
    kind: str
    micro: int
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    run: Callable[..., tuple[Any, ...]] = lambda *values: values

    @property
    def name(self) -> str:
        return f"{self.unit}{self.kind}{self.micro}"


Edges = dict[str, list[str]]  # task -> the tasks that must end before it starts
Lanes = dict[str, list[str]]  # a schedule: stream or rank -> its tasks in order
Times = Callable[[str], float]  # task -> time
Spans = dict[str, tuple[float, float]]  # task -> start and end


def edges(tasks: Iterable[Task]) -> Edges:
    """Nobody writes a dependency by hand. Tasks come in the order in which the program would run them, and three rules
    say what another order must keep: a reader waits for the last writer of a value; a writer waits for the writer
    before; and a writer waits for all that still read the old value."""
    writer: dict[str, str] = {}
    readers, preds = defaultdict[str, list[str]](list), Edges()
    for task in tasks:
        before = [writer[v] for v in (*task.reads, *task.writes) if v in writer]
        before += [r for v in task.writes for r in readers[v]]
        preds[task.name] = sorted(set(before) - {task.name})
        for v in task.reads:
            readers[v].append(task.name)
        for v in task.writes:
            writer[v], readers[v] = task.name, []
    return preds


# -------------------------------------------------------------------------------------------------------------- 2. Tape
# An operation emits its forward task and remembers how to go back, which emits its W and O. Nothing is computed yet.


class Tape:
    def __init__(self) -> None:
        self.tasks: list[Task] = []
        self.back: list[Callable[[], None]] = []
        self.unit, self.micro = 0, 0
        self.summed: set[str] = set()  # gradients that have a value already

    def emit(self, kind: str, unit: int, reads: Iterable[str], writes: Iterable[str], run: Callable[..., Any]) -> None:
        self.tasks.append(Task(unit, kind, self.micro, tuple(reads), tuple(writes), run))

    def op(self, x: str, forward: Callable[..., Any], output_grad: Callable[..., Any], keeps: bool,
           weights: tuple[str, ...] = (), weight_grad: Callable[..., Any] | None = None) -> str:
        """y = forward(x, *weights); dx = output_grad(dy, *weights), or of (dy, y, *weights) if it `keeps` y; dw =
        weight_grad(dy, x). Returns y's name."""
        unit, y, self.unit = self.unit, f"y{self.unit}.{self.micro}", self.unit + 1
        kept = (y,) if keeps else ()
        self.emit("F", unit, (x, *weights), (y,), lambda x, *w: (forward(x, *w),))

        def back() -> None:
            if weight_grad:
                sums = tuple(f"d{w}" for w in weights)
                old = sums if set(sums) <= self.summed else ()
                self.summed.update(sums)  # the order of a sum over micro-batches is part of the graph, so bits are too
                self.emit("W", unit, (f"d{y}", x, *old), sums, lambda dy, x, *old: tuple(
                    a + b for a, b in zip(old, weight_grad(dy, x), strict=True)) if old else weight_grad(dy, x))
            if not x.startswith("x"):  # nobody needs the gradient of the data
                self.emit("O", unit, (f"d{y}", *kept, *weights), (f"d{x}",), lambda *v: (output_grad(*v),))

        self.back.append(back)
        return y

    def linear(self, x: str, w: str, b: str) -> str:
        return self.op(x, lambda x, w, b: x @ w + b, lambda dy, w, b: dy @ w.T, False, (w, b),
                       lambda dy, x: (x.T @ dy, dy.sum(0)))

    def relu(self, x: str) -> str:
        return self.op(x, lambda x: np.maximum(x, 0), lambda dy, y: dy * (y > 0), True)

    def cross_entropy(self, x: str, labels: str) -> str:
        """Its result are the probabilities; the gradient of -log p[label] is theirs less 1 at the label. What the loss
        of a batch multiplies that with, 1 / samples, is data."""
        def softmax(x: np.ndarray, labels: np.ndarray) -> np.ndarray:
            p = np.exp(x - x.max(1, keepdims=True))
            return p / p.sum(1, keepdims=True)

        return self.op(x, softmax, lambda d, p, labels: d * (p - np.eye(p.shape[1])[labels]), True, (labels,))


def record(layers: int, micro_batches: int = 1, lr: float = 0.1) -> list[Task]:
    """One training step of a perceptron with `layers` linear layers: the tasks in the conventional order."""
    tape = Tape()
    for tape.micro in range(micro_batches):
        tape.unit, y = 0, f"x.{tape.micro}"
        for layer in range(layers):
            y = tape.linear(y, f"w{layer}", f"b{layer}")
            y = tape.relu(y) if layer < layers - 1 else y
        tape.cross_entropy(y, f"labels.{tape.micro}")
        while tape.back:  # the backward pass: O and W of all operations in reverse
            tape.back.pop()()
    for layer in range(layers):  # an update is a task of its own, so it may wait, too
        params, grads = (f"w{layer}", f"b{layer}"), (f"dw{layer}", f"db{layer}")
        tape.emit("U", 2 * layer, (*params, *grads), params, lambda w, b, dw, db: (w - lr * dw, b - lr * db))
    return tape.tasks


# --------------------------------------------------------------------------------------------------------- 3. Schedule
# A schedule is data: for each lane, a stream or a rank, its tasks in order. Lanes run side by side, so an edge between
# two of them needs a wait. Vector clocks say which waits are enough: the clock of a task counts, for each lane, the
# tasks that have certainly ended when it ends.


def clocks(lanes: Lanes, waits: Edges) -> dict[str, dict[str, int]]:
    """The vector clock of each task. Raises ValueError if the lanes wait for each other in a circle."""
    clock: dict[str, dict[str, int]] = {}
    known: dict[str, dict[str, int]] = {lane: {} for lane in lanes}
    left = {lane: list(order) for lane, order in lanes.items()}
    while left := {lane: order for lane, order in left.items() if order}:
        ready = [lane for lane, order in left.items() if all(w in clock for w in waits.get(order[0], ()))]
        if not ready:
            stuck = {order[0]: next(w for w in waits[order[0]] if w not in clock) for order in left.values()}
            raise ValueError("deadlock: " + ", ".join(f"{task} waits for {other}" for task, other in stuck.items()))
        for lane in ready:
            task, now = left[lane].pop(0), dict(known[lane])
            for w in waits.get(task, ()):
                now |= {other: max(now.get(other, 0), n) for other, n in clock[w].items()}
            clock[task] = known[lane] = now | {lane: now.get(lane, 0) + 1}
    return clock


def places(lanes: Lanes) -> dict[str, tuple[str, int]]:
    """Task -> its lane, and how many tasks of the lane have ended when it has."""
    return {task: (lane, i) for lane, order in lanes.items() for i, task in enumerate(order, 1)}


def fewest_waits(lanes: Lanes, preds: Edges) -> Edges:
    """The waits that keep all edges: those between lanes, less those that the lane's order or other waits imply."""
    place, waits = places(lanes), Edges()
    clock = clocks(lanes, {t: [p for p in before if place[p][0] != place[t][0]] for t, before in preds.items()})
    for lane, order in lanes.items():
        have: dict[str, int] = {}
        for task in order:
            ahead = [p for p in preds[task] if place[p][0] != lane and have.get(place[p][0], 0) < place[p][1]]
            waits[task] = [p for p in ahead if not any(
                q != p and clock[q].get(place[p][0], 0) >= place[p][1] for q in ahead)]
            have = clock[task]
    return waits


def prove(lanes: Lanes, preds: Edges, waits: Edges) -> None:
    """Raises ValueError unless each task is there once, no lane waits forever, and every edge is kept by lane order and
    waits alone, whatever the tasks' times are."""
    place, count = places(lanes), sum(map(len, lanes.values()))
    if place.keys() != preds.keys() or count != len(place):
        raise ValueError(f"not each task once: {sorted(place.keys() ^ preds.keys()) or 'some are there twice'}")
    clock = clocks(lanes, waits)
    for task, before in preds.items():
        for p in before:
            lane, i = place[p]
            if (clock[task].get(lane, 0) if lane != place[task][0] else place[task][1] - 1) < i:
                raise ValueError(f"{task} may start before {p} has ended")


# ------------------------------------------------------------------------------------------------------------ 4. Clock
# What a schedule costs follows from it: a task starts as soon as its lane is free and what it waits for is there.


def simulate(lanes: Lanes, preds: Edges, duration: Times, latency: float = 0.0) -> Spans:
    """When each task runs. `latency`: from the end of a task until another lane knows of it."""
    place, clock = places(lanes), clocks(lanes, preds)
    spans, free = Spans(), dict.fromkeys(lanes, 0.0)
    for task in sorted(clock, key=lambda t: sum(clock[t].values())):  # the sum grows along edges and lanes
        lane = place[task][0]
        there = [spans[p][1] + latency * (place[p][0] != lane) for p in preds[task]]
        start = max([free[lane], *there])
        spans[task] = start, start + duration(task)
        free[lane] = spans[task][1]
    return spans


def makespan(spans: Spans) -> float:
    return max(end for _, end in spans.values())


def draw(lanes: Lanes, spans: Spans, columns: int, label: Callable[[str], str], width: int = 4) -> str:
    """A row per lane, to scale; a dot is a moment without work."""
    rows, scale = [], columns / makespan(spans)
    for lane, order in lanes.items():
        cells = ["."] * columns
        for task in order:
            first, last = (round(t * scale) for t in spans[task])
            cells[first:last] = [label(task)] * (last - first)
        rows.append(f"{lane:>6} " + "".join(cell.rjust(width) for cell in cells))
    return "\n".join(rows)


def kind_of(task: str) -> str:
    return task.strip("0123456789")


# ---------------------------------------------------------------------------------------------------- 5. Single device
# The chain F and O stays on the main stream. Weight gradients and updates go to a second stream, in the order in which
# they become ready (section 4 of the paper).


def greedy(preds: Edges, lanes: Iterable[str], lane_of: Callable[[str], str], urgency: Callable[[str, float], Any],
           duration: Times, latency: float = 0.0) -> Lanes:
    """A free lane runs one of its ready tasks at once: that with the smallest `urgency` (task, ready since when)."""
    schedule: Lanes = {lane: [] for lane in lanes}
    ended, free = dict[str, float](), dict.fromkeys(schedule, 0.0)
    while len(ended) < len(preds):
        ready = {t: max((ended[p] + latency * (lane_of(p) != lane_of(t)) for p in preds[t]), default=0.0)
                 for t in preds if t not in ended and all(p in ended for p in preds[t])}
        start = {t: max(free[lane_of(t)], at) for t, at in ready.items()}
        lane = min(schedule, key=lambda lane: min((start[t] for t in ready if lane_of(t) == lane), default=np.inf))
        soonest = min(start[t] for t in ready if lane_of(t) == lane)
        task = min((t for t in ready if lane_of(t) == lane and start[t] == soonest), key=lambda t: urgency(t, ready[t]))
        ended[task] = free[lane] = soonest + duration(task)
        schedule[lane].append(task)
    return schedule


def multi_stream(preds: Edges, duration: Times) -> Lanes:
    """`preds` lists the tasks in the conventional order, which stays the order of F and O."""
    number = {task: i for i, task in enumerate(preds)}
    return greedy(preds, ("main", "sub"), lambda t: "sub" if kind_of(t) in "WU" else "main",
                  lambda t, since: (since * (kind_of(t) in "WU"), number[t]), duration)


# ----------------------------------------------------------------------------------------------------- 6. Data-parallel
# Each rank has all layers and a part of the batch, so gradients are summed over ranks, one transfer at a time. The next
# forward pass needs the first layer's sum first, but the backward pass makes that one last. Reverse first-k: the weight
# gradients of the first k layers wait until all others are made, and come first layer first (section 5 of the paper).


def reverse_first_k(layers: int, k: int) -> list[str]:
    """The compute lane of one iteration; k = 0 is the conventional order."""
    order = [f"{i}F0" for i in range(layers)]
    for i in reversed(range(layers)):
        order += [f"{i}W0"] * (i >= k) + [f"{i}O0"] * (i > 0)
    return order + [f"{i}W0" for i in range(k)]


def period(order: list[str], duration: Times, transfer: list[float], parts: int = 8, barrier: bool = False) -> float:
    """The time of an iteration in the long run. Transfers go in parts, the lowest layer of those that are there first.
    The next forward of a layer waits for its own sum; with `barrier`, for all."""
    summed, now, before, steady = [0.0] * len(transfer), 0.0, 0.0, list[float]()
    while len(steady) < 40:  # the settled pattern may be longer than one iteration
        made: list[tuple[float, int]] = []
        for task in order:
            layer = int(task[: task.index(kind_of(task))])
            if kind_of(task) == "F":
                now = max(now, max(summed) if barrier else summed[layer])
            now += duration(task)
            if kind_of(task) == "W":
                made.append((now, layer))
        waiting, channel = [], 0.0
        while made or waiting:
            channel = max(channel, made[0][0]) if not waiting else channel
            while made and made[0][0] <= channel:
                waiting += [made.pop(0)[1]] * parts
            waiting.remove(layer := min(waiting))
            summed[layer] = channel = channel + transfer[layer] / parts
        steady.append(now - before)
        before = now
    return sum(steady[20:]) / 20


# --------------------------------------------------------------------------------------------------------- 7. Pipelines
# A rank holds some layers, a stage, and micro-batches pass through the stages. A rank is a lane. What a policy decides
# is the order of its tasks; the gaps in the grid, the bubble, are what it is judged by.


def stages(count: int, micro_batches: int, fused: bool = False) -> list[Task]:
    """The tasks of a mini-batch of stages: F up, then O (or B = O and W) down, for each micro-batch."""
    tasks = []
    for i in range(micro_batches):
        tasks += [Task(s, "F", i, (f"y{s - 1}.{i}",), (f"y{s}.{i}",)) for s in range(count)]
        for s in reversed(range(count)):
            tasks.append(Task(s, "B" if fused else "O", i, (f"dy{s}.{i}", f"y{s}.{i}"), (f"dy{s - 1}.{i}",)))
        if not fused:
            tasks += [Task(s, "W", i, (f"dy{s}.{i}", f"y{s - 1}.{i}"), (f"dw{s}",)) for s in range(count)]
    return tasks


def in_turn(rank: int, micro_batches: int, ahead: int, lag: int | None) -> list[str]:
    """`ahead` forwards; then in turn an O, the W of `lag` micro-batches before, an F; then all W that are left. Without
    `lag`, a B in place of O and W."""
    o, last = "B" if lag is None else "O", micro_batches if lag is None else lag
    order = [f"{rank}F{i}" for i in range(min(ahead, micro_batches))]
    for i in range(micro_batches):
        order += [f"{rank}{o}{i}"] + [f"{rank}W{i - last}"] * (i >= last)
        order += [f"{rank}F{i + ahead}"] * (i + ahead < micro_batches)
    return order + [f"{rank}W{i}" for i in range(max(0, micro_batches - last), micro_batches) if lag is not None]


def one_f_one_b(ranks: int, micro_batches: int) -> Lanes:
    """As few forwards ahead as keep the rank busy (DAPPLE, 2020). Bubble (p-1)(F+O+W)."""
    return {f"rank{r}": in_turn(r, micro_batches, ranks - r, None) for r in range(ranks)}


def zb_h1(ranks: int, micro_batches: int) -> Lanes:
    """The same with O apart from W: the rank below gets its gradient sooner, and W fills the gaps (Qi et al., 2023).
    Bubble (p-1)(F+O-W), with the memory of 1F1B."""
    return {f"rank{r}": in_turn(r, micro_batches, ranks - r, r) for r in range(ranks)}


def fast_forward(tasks: list[Task], ranks: int, rank_of: Callable[[int], int], duration: Times, latency: float = 0.0,
                 kinds: str = "OFW") -> Lanes:
    """Gradient fast-forwarding (section 6): a free rank runs a ready O before F before W, the oldest micro-batch first,
    so no output gradient waits for a weight gradient. Modulo allocation, stage s on rank s mod p, goes with it: while
    one rank computes a W, the next one computes the O of the stage below. `kinds` FB is the conventional backward."""
    task = {t.name: t for t in tasks}
    return greedy(edges(tasks), [f"rank{r}" for r in range(ranks)], lambda name: f"rank{rank_of(task[name].unit)}",
                  lambda name, _: (kinds.index(task[name].kind), task[name].micro, task[name].unit), duration, latency)


# ---------------------------------------------------------------------------------------------------- 8. Threads, ranks
# A stream is a thread, a wait is an event. Ranks share no values: each has a store of its own, and what one rank makes
# and another reads goes through a queue, by a send task and a receive task.
PATIENCE = 60.0  # seconds: a wait that takes longer is an error, and not a hang


def run(tasks: Iterable[Task], lanes: Lanes, waits: Edges, stores: dict[str, dict[str, Any]]) -> Spans:
    """Runs each lane in a thread of its own, on its store. Returns when each task ran, in seconds."""
    work, begin = {task.name: task for task in tasks}, time.perf_counter()
    ended, spans = {name: threading.Event() for name in work}, Spans()

    def lane(lane: str) -> None:
        for name in lanes[lane]:
            for other in waits.get(name, ()):
                if not ended[other].wait(PATIENCE):
                    raise TimeoutError(f"{name} has waited {PATIENCE:g} s for {other}")
            task, store, start = work[name], stores[lane], time.perf_counter()
            store.update(zip(task.writes, task.run(*(store[v] for v in task.reads)), strict=True))
            spans[name] = start - begin, time.perf_counter() - begin
            ended[name].set()

    with ThreadPoolExecutor(len(lanes)) as threads:
        list(threads.map(lane, lanes))  # an error in a lane is raised here
    return spans


def expanded(lanes: Lanes, tasks: list[Task], stage_of: Callable[[int], int]) -> Lanes:
    """An order of stages as the order of a recorded step: each O of a stage is all O of its operations, and so on. The
    updates of a rank come last."""
    inside: defaultdict[str, list[str]] = defaultdict(list)
    for t in tasks:
        inside[f"{stage_of(t.unit)}{t.kind}{t.micro if t.kind != 'U' else ''}"].append(t.name)
    return {lane: [name for action in [*order, lane.removeprefix('rank') + 'U'] for name in inside[action]]
            for lane, order in lanes.items()}


def with_messages(tasks: list[Task], lanes: Lanes) -> tuple[list[Task], Lanes, dict[str, Any]]:
    """The step with a send after each task whose result another rank reads, and a receive before its first reader
    there; and the queues, which all stores hold."""
    place, made = places(lanes), {v: t for t in tasks for v in t.writes}
    reader: dict[tuple[str, str], str] = {}  # value and lane -> the first that reads it
    for t in tasks:
        for v in t.reads:
            if v in made and place[made[v].name][0] != (lane := place[t.name][0]):
                reader[v, lane] = min(reader.get((v, lane), t.name), t.name, key=place.__getitem__)
    sends, receives = defaultdict[str, list[Task]](list), defaultdict[str, list[Task]](list)
    queues, found = dict[str, Any](), list[Task]()
    for t in tasks:
        reads = tuple(f"{v}@{place[t.name][0]}" if (v, place[t.name][0]) in reader else v for v in t.reads)
        found.append(replace(t, reads=reads))
        for v, lane in [key for key in reader if key[0] in t.writes]:
            queues[channel := f"{v}>{lane}"] = queue.SimpleQueue()
            send = Task(t.unit, f"S{t.kind}", t.micro, (v, channel), (channel,), lambda x, q: (q.put(x) or q,))
            receive = Task(t.unit, f"R{t.kind}", t.micro, (channel,), (f"{v}@{lane}",),
                           lambda q: (q.get(timeout=PATIENCE),))
            found += [send, receive]
            sends[t.name].append(send)
            receives[reader[v, lane]].append(receive)
    return found, {lane: [t if isinstance(t, str) else t.name for task in order for t in (
        *receives[task], task, *sends[task])] for lane, order in lanes.items()}, queues


# ----------------------------------------------------------------------------------------------------------- 9. Digits
def digits() -> tuple[np.ndarray, np.ndarray]:
    """1,797 handwritten digits of 8 x 8 pixels, 0 to 1, and their labels."""
    with gzip.open(Path(__file__).parents[1] / "minidl/data/optdigits.csv.gz", "rt") as file:
        rows = np.loadtxt(file, delimiter=",")
    return rows[:, :-1] / 16, rows[:, -1].astype(int)


WIDTHS, BATCH, MICRO_BATCHES = (64, 256, 256, 10), 100, 4


def train(tasks: list[Task], lanes: Lanes, queues: dict[str, Any] | None = None
          ) -> tuple[float, dict[str, np.ndarray], dict[str, float]]:
    """Proves the schedule, then trains by it. With `queues` every lane is a rank and has its own store. Returns the
    share of the last 297 digits that it reads right, the parameters, and the median times of tasks in seconds."""
    draw, (x, labels), times = np.random.default_rng(0), digits(), defaultdict[str, list[float]](list)
    waits = fewest_waits(lanes, preds := edges(tasks))
    prove(lanes, preds, waits)
    shared: dict[str, Any] = {f"b{i}": np.zeros(m) for i, m in enumerate(WIDTHS[1:])}
    shared |= {f"w{i}": draw.normal(0, np.sqrt(2 / n), (n, m)) for i, (n, m) in enumerate(pairwise(WIDTHS))}
    shared |= {f"dy{2 * len(WIDTHS) - 3}.{i}": 1 / BATCH for i in range(MICRO_BATCHES)}
    stores = {lane: shared if queues is None else {**shared, **queues} for lane in lanes}
    for begin in [*range(0, 1500, BATCH)] * 20:
        for i, part in enumerate(np.split(np.arange(begin, begin + BATCH), MICRO_BATCHES)):
            for store in stores.values():
                store |= {f"x.{i}": x[part], f"labels.{i}": labels[part]}
        for task, (start, end) in run(tasks, lanes, {} if queues else waits, stores).items():  # queues are the waits
            times[task].append(end - start)
    place, y = places(lanes), x[1500:]
    trained = {v: stores[place[t.name][0]][v] for t in tasks if t.kind == "U" for v in t.writes}
    for i in range(len(WIDTHS) - 1):
        y = (np.maximum(y, 0) if i else y) @ trained[f"w{i}"] + trained[f"b{i}"]
    return float((y.argmax(1) == labels[1500:]).mean()), trained, {t: float(np.median(s)) for t, s in times.items()}


def main() -> None:
    def each(task: str) -> float:
        return 2.0 if kind_of(task) == "B" else 1.0

    for policy in (one_f_one_b, zb_h1):
        lanes = policy(4, 6)
        spans = simulate(lanes, edges(stages(4, 6, policy is one_f_one_b)), each)
        ticks = round(makespan(spans))
        print(f"{policy.__name__} on four ranks: {ticks} ticks\n{draw(lanes, spans, ticks, str)}\n")
    for title, place, kinds in (("", 4, "FB"), (", fast-forwarded", 4, "OFW"), (", modulo as well", 1, "OFW")):
        step = stages(8, 1, kinds == "FB")
        lanes = fast_forward(step, 2, lambda stage: stage // place % 2, each, kinds=kinds)  # noqa: B023
        print(f"8 layers on two ranks{title}: {makespan(simulate(lanes, edges(step), each)):g} ticks")
    for k in (0, 2):
        print(f"4 layers, data-parallel, k = {k}: {period(reverse_first_k(4, k), each, [1.0] * 4):g} ticks a step")

    tasks = record(len(WIDTHS) - 1, MICRO_BATCHES, lr=0.2)
    preds = edges(tasks)
    right, first, duration = train(tasks, {"main": list(preds)})
    spans = simulate(streams := multi_stream(preds, duration.__getitem__), preds, duration.__getitem__)
    print(f"\n{len(tasks)} tasks take {1000 * sum(duration.values()):.2f} ms in order; predicted on two streams: "
          f"{1000 * makespan(spans):.2f} ms\n{draw(streams, spans, 112, kind_of, 1)}\n\n"
          f"in order: {right:.1%} of new digits are read right")
    ranks = with_messages(tasks, expanded(zb_h1(2, MICRO_BATCHES), tasks, lambda unit: int(unit > 1)))
    for title, arguments in (("multi_stream on two threads", (tasks, streams)), ("zb_h1 on two ranks", ranks)):
        again, other, _ = train(*arguments)
        if not all(np.array_equal(first[v], other[v]) for v in first):
            raise SystemExit(f"{title}: the bits differ")
        print(f"{title}: {again:.1%}, and all parameters have equal bits")


if __name__ == "__main__":
    main()
