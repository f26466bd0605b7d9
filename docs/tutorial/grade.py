"""Grades an exercise of the tutorial: `python docs/tutorial/grade.py NUMBER FILE`. Exit 0 if it is right, else 1.

Files of exercises are run, so grade only your own.
"""

import contextlib
import io
import itertools
import runpy
import sys
import traceback
from pathlib import Path

import numpy as np

import minidl as ml
from minidl import data, models, nn, optim
from minidl.passes.synchronise import synchronise
from minidl.plans.program import lower
from minidl.runtime import executors
from minidl.schedulers import pipeline
from minidl.schedulers.data_parallel import late_updates
from minidl.schedulers.iterations import lower_bound as bound
from minidl.schedulers.layer_times import layers as chain
from minidl.schedulers.layer_times import with_communication
from minidl.schedulers.partition import LayerCosts, assign

HERE = Path(__file__).resolve().parent


class Wrong(Exception):
    """An exercise is not right yet; the message tells the reader why."""


def require(condition, message):
    if not condition:
        raise Wrong(message)


def load(path, name):
    """The function `name` of a reader's file. Chapters can be imported from it."""
    sys.path.insert(0, str(HERE))
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            content = runpy.run_path(str(path))
    except SyntaxError as error:
        where = path if error.lineno is None else f"{error.filename}, line {error.lineno}"
        raise Wrong(f"{where}: {error.msg}" + (f": {error.text.strip()}" if error.text else "")) from None
    finally:
        sys.path.remove(str(HERE))
    require(callable(content.get(name)), f"{path} has no function {name}")
    return content[name]


def network(micro_batches=1, **arguments):
    """(model, graph) of a step of an MLP, fresh from seed 0, on batches of 32 digits."""
    ml.seed(0)
    model = models.create("mlp", **arguments)
    optimizer = optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def step(x, y):
        for number in range(micro_batches):
            with ml.micro_batch(number):
                loss = nn.cross_entropy(model(x), y)
                loss.backward()
        optimizer.step()
        return loss

    return model, ml.record(step, *next(data.digits(batch_size=32)))


# -------------------------------------------------------------------------------------------------------- the exercises
def exercise1(path):
    """tanh: value, gradient against finite differences."""
    tanh = load(path, "tanh")
    engine = sys.modules.get("chapter1_tape")
    require(engine, f"{path} imports nothing from chapter1_tape, whose `emit` makes an operation")
    random = np.random.default_rng(1)
    x = engine.Tensor(random.standard_normal((5, 4)) * 1.5)
    w = engine.Tensor(random.standard_normal((4, 3)))
    labels = random.integers(0, 3, 5)

    def loss():
        engine.tape.clear()
        return engine.cross_entropy(tanh(tanh(x) @ w), labels)

    require(np.allclose(tanh(x).value, np.tanh(x.value), rtol=1e-12), "the value is not tanh(x)")
    engine.backward(loss())
    for index in np.ndindex(x.value.shape):
        slope, mine = engine.finite_difference(lambda: loss().value, x, index), x.grad[index]
        require(abs(slope - mine) < 1e-6,
                f"at x = {x.value[index]:.4f} the gradient should be {slope:.6f}; yours is {mine:.6f}")
    return "tanh and its gradient are right"


def exercise2(path):
    """Reverse first-k against the rule, for every k of several depths."""
    function = load(path, "reverse_first_k")
    for layers in (1, 2, 4, 7):
        for k in range(layers + 1):
            late = list(range(k))
            expected = []
            for l in range(layers - 1, -1, -1):
                expected += [f"{l}W"] * (l not in late) + [f"{l}O"] * (l > 0)
            expected += [f"{l}W" for l in late]
            mine = list(function(layers, k))
            require(mine == expected, f"{layers} layers, k = {k}: the order should be\n    {' '.join(expected)}\n"
                                      f"yours is\n    {' '.join(map(str, mine))}")
    return "reverse first-k is right for every depth and k"


def exercise3(path):
    """Compares edges with the edges of recorded graphs; edges that follow from others may be there or not."""
    function = load(path, "edges")
    plain, parts = network(preset="tiny")[1], network(3, preset="tiny")[1]
    for what, graph in {"one step": plain, "three micro-batches": parts, "two steps in a row": ml.unroll(plain, 2),
                        "two steps with two sets of buffers": ml.rename(ml.unroll(plain, 2))}.items():
        tasks = [(t.name, {b.index for b in t.reads}, {b.index for b in t.writes}) for t in graph]
        order = [name for name, _, _ in tasks]
        mine = set(function(tasks))
        right = {(graph.name(p), t.name) for t in graph for p in graph.preds[t.index]}
        for one, other, fault in ((right, mine, "is missing"), (mine, right, "is too much")):
            unreachable = sorted(one - closure(order, other))
            require(not unreachable, f"{what}: the edge {' -> '.join(unreachable[0]) if unreachable else ''} {fault}")
    return "all edges are right, on four graphs"


def closure(order, edges):
    """All pairs (earlier, later) that are joined by a path of edges."""
    before = {name: set() for name in order}
    place = {name: i for i, name in enumerate(order)}
    for earlier, later in sorted(edges, key=lambda edge: place[edge[1]]):
        require(place[earlier] < place[later], f"the edge {earlier} -> {later} goes backward")
        before[later] |= {earlier} | before[earlier]
    return {(earlier, later) for later, all_earlier in before.items() for earlier in all_earlier}


def exercise4(path):
    """A valid plan of the tiny MLP that keeps its work on two lanes."""
    graph = network(preset="tiny")[1]
    schedule = ml.Schedule.load(path).validate(graph)
    sub = [name for lane in range(len(schedule.lanes)) if schedule.lanes[lane].name != "main"
           for name in schedule.names(lane)]
    require(any("W" in name for name in sub),
            "the plan is valid, but no weight gradient is beside the main lane any more")
    return f"the plan is valid\n{schedule.grid()}"


def exercise5(path):
    """A scheduler for two lanes: valid, 20 or less on the given costs, and the same bits as the oracle."""
    scheduler = load(path, "scheduler")
    graph = network(layers=8, hidden=64)[1]
    schedule = scheduler(graph).validate(graph)
    require(len(schedule.lanes) <= 2, f"the schedule uses {len(schedule.lanes)} lanes; two are allowed")
    linear = [float(name.endswith("linear")) for name in graph.unit_names]
    cost = ml.CostModel.given(linear, linear, [2 * l for l in linear])
    makespan = ml.simulate(graph, schedule, cost).makespan
    picture = schedule.grid(width=200)
    require(makespan <= 20,
            f"the schedule is valid and takes {makespan:g} on the given costs; 20 can be reached\n{picture}")
    after = []
    for executor in (ml.SequentialExecutor, lambda graph: ml.StreamExecutor(graph, scheduler(graph))):
        model, graph = network(layers=8, hidden=64)
        run, train = executor(graph), data.digits(batch_size=32)
        after.append(([float(run(*next(train))) for _ in range(3)], [p.numpy().tobytes() for p in model.parameters()]))
    require(after[0] == after[1], "the run and the oracle differ")
    return f"valid, {makespan:g} on the given costs, and the same bits as the oracle\n{picture}"


def exercise6(path):
    """A valid plan for 3 ranks and 4 micro-batches at the proved optimum under its cap."""
    plan = ml.plan(ml.Pipeline(4), ml.Schedule.load(path), machine=ml.Machine(ranks=3, activation_cap=3))
    cost = ml.CostModel.given(1, 1, 1)
    makespan = pipeline.price(plan, cost).makespan
    picture = pipeline.grid(plan, ml.simulate(plan.graph, plan.schedule, cost))
    require(makespan <= 14, f"the plan is valid and takes {makespan:g}; 14 can be reached\n{picture}")
    return f"the plan is valid and takes {makespan:g}\n{picture}"


def exercise7(path):
    """The period of linear partitions, against trying all of them where they are few, and against minidl."""
    function = load(path, "partition")
    random = np.random.default_rng(2)
    for layers, processors in [(1, 1), (3, 5), (4, 2), (6, 3), (7, 4), (20, 7), (60, 16)] * 3:
        times = random.integers(1, 30, layers).tolist()
        costs = LayerCosts.given(times, [0] * layers, [0] * layers)
        period = assign(costs, processors, "pipedream").period
        if layers < 8:
            cuts = itertools.combinations_with_replacement(range(layers + 1), processors - 1)
            period = min(max(sum(times[a:b]) for a, b in itertools.pairwise((0, *cut, layers))) for cut in cuts)
        mine = function(list(times), processors)
        require(mine == period,
                f"times {times} on {processors} processors: the period should be {period:g}; yours is {mine}")
    return "the period is the smallest one, also where there are many ways to divide"


def exercise8(path):
    """The lower bound of data-parallel periods, against minidl on random layers."""
    function = load(path, "lower_bound")
    random = np.random.default_rng(3)
    for count in [1, 2, 4, 4, 6, 9] * 4:
        times = [random.integers(1, 9, count).tolist() for _ in range(3)]
        comm = (random.integers(1, 9, count) * random.choice([1, 6], count)).tolist()
        graph, cost = chain(*times, parts=1)
        graph = synchronise(graph)
        body = late_updates(graph).body[0]
        right = bound(body,
                      with_communication(graph, cost, lambda sizes, comm=comm: sum(comm[layer] for layer in sizes)))
        mine = function(*times, comm)
        require(abs(mine - right) < 1e-9, f"forward {times[0]}, output gradient {times[1]}, weight gradient "
                                          f"{times[2]}, communication {comm}: the bound is {right:g}; yours is {mine}")
    return "the bound is right, also where a layer's circuit is the slowest"


def exercise9(path):
    """A scheduler for two lanes across the border: 18 or less on the given costs, and the same bits as the oracle."""
    scheduler = load(path, "scheduler")
    graph = network(layers=8, hidden=64)[1]
    schedule = scheduler(graph)
    require(isinstance(schedule, ml.Schedule), f"scheduler returned {schedule!r}; it has to return a Schedule")
    run = lower(graph, schedule)
    require(len(run.schedule.lanes) <= 2, f"the schedule uses {len(run.schedule.lanes)} lanes; two are allowed")
    linear = [float(name.endswith("linear")) for name in graph.unit_names]
    makespan = ml.simulate(run.graph, run.schedule,
                           ml.CostModel.given(linear, linear, [2 * l for l in linear])).makespan
    picture = run.schedule.grid(width=200)
    require(makespan <= 18,
            f"the schedule is valid and takes {makespan:g} on the given costs; 18 can be reached\n{picture}")
    after = []
    for make in (ml.SequentialExecutor, lambda graph: executors.executor(graph, scheduler(graph))):
        model, graph = network(layers=8, hidden=64)
        step, train = make(graph), data.digits(batch_size=32)
        after.append(([float(step(*next(train))) for _ in range(5)], [p.numpy().tobytes() for p in model.parameters()]))
    require(after[0] == after[1], "the run and the oracle differ")
    return f"valid, {makespan:g} on the given costs, and the same bits as the oracle\n{picture}"


def exercise10(path):
    """What a capture finds, on programs drawn at random, up to edges that follow from others."""
    function = load(path, "capture")
    random = np.random.default_rng(4)
    for streams, events, length in [(1, 1, 8), (2, 1, 12), (2, 3, 20), (3, 3, 30), (4, 2, 60)] * 6:
        issues, frontier, recorded, right, order = [], [set() for _ in range(streams)], {}, set(), []
        for number in range(length):
            stream, event = int(random.integers(streams)), f"e{random.integers(events)}"
            what = str(random.choice(["launch", "record", "wait"] if event in recorded else ["launch", "record"]))
            if what == "launch":
                right |= {(earlier, f"k{number}") for earlier in frontier[stream]}
                frontier[stream] = {f"k{number}"}
                order.append(f"k{number}")
            elif what == "record":
                recorded[event] = set(frontier[stream])
            else:
                frontier[stream] |= recorded[event]
            issues.append((what, stream, f"k{number}" if what == "launch" else event))
        mine = set(function(list(issues)))
        strange = {name for edge in mine for name in edge} - set(order)
        require(not strange, f"{', '.join(sorted(map(str, strange)))}: edges join launches")
        said = "\n    ".join(f"{what:6} on stream {stream}: {name}" for what, stream, name in issues)
        for one, other, fault in ((right, mine, "is missing"), (mine, right, "is too much")):
            unreachable = sorted(one - closure(order, other))
            require(not unreachable, f"{' -> '.join(unreachable[0]) if unreachable else ''} {fault} in\n    {said}")
    return "every captured graph is right"


def exercise11(path):
    """Two ranks, three micro-batches, messages in one row with the computation: no rendezvous that waits for ever."""
    schedule = ml.Schedule.load(path)
    ml.plan(ml.Pipeline(3), schedule, machine=ml.Machine(ranks=2))
    for lane, order in enumerate(("0F0 0F1 0B0 0F2 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2")):
        mine = [name for name in schedule.names(lane) if not {"S", "R"} & set(name)]
        require(len(schedule.lanes) == 2 and " ".join(mine) == order,
                f"rank {lane} computes {' '.join(mine)} now; it should be {order}, on one lane")
    return f"it runs, whatever the size of the messages\n{schedule.grid()}"


def time_of(kept, whole, output, again, limit):
    """The time to compute again all blocks but these; None if a moment needs more than the limit."""
    held = [w if b in kept else o for b, (w, o) in enumerate(zip(whole, output, strict=True))]
    if any(sum(held[:b]) + whole[b] > limit for b in range(len(whole))):
        return None
    return sum(time for b, time in enumerate(again) if b not in kept)


def exercise12(path):
    """The blocks that keep their activations, against every choice, on chains drawn at random."""
    function = load(path, "keep")
    random = np.random.default_rng(5)
    for count in [1, 2, 3, 5, 7, 8] * 5:
        output = random.integers(0, 5, count).tolist()
        whole = [size + int(random.integers(0, 9)) for size in output]
        again = random.integers(1, 9, count).tolist()
        limit = int(random.integers(0, sum(whole) + 2))
        choices = (time_of({b for b in range(count) if bits >> b & 1}, whole, output, again, limit)
                   for bits in range(1 << count))
        right = min((time for time in choices if time is not None), default=None)
        mine = function([*whole], [*output], [*again], limit)
        said = f"whole {whole}, output {output}, again {again}, limit {limit}"
        require(mine is None or set(mine) <= {*range(count)}, f"{said}: {mine} is no set of blocks")
        time = None if mine is None else time_of({*mine}, whole, output, again, limit)
        require(mine is None or time is not None, f"{said}: {sorted(mine or ())} needs more than the limit")
        require(time == right, f"{said}: {'nothing' if right is None else right} is computed again at best; "
                               f"yours is {time}")
    return "every choice fits and is the fastest"


def exercise13(path):
    """Versions of weights under logs drawn at random, on losses with curvature."""
    function = load(path, "replay")
    random = np.random.default_rng(6)
    for steps in (0, 1, 3, 10, 40):
        matrix, start = random.standard_normal((4, 4)), random.standard_normal(4)
        log = [int(random.integers(max(0, t - 3), t + 1)) for t in range(steps)]

        def gradient(w, matrix=matrix):
            return np.sin(w) + matrix @ w

        right = [start]
        for t, version in enumerate(log):
            right.append(right[t] - 0.05 * gradient(right[version]))
        mine = function(start.copy(), gradient, 0.05, [*log])
        require(len(mine) == steps + 1, f"{steps} updates make {steps + 1} versions, not {len(mine)}")
        for t, (yours, wanted) in enumerate(zip(mine, right, strict=True)):
            require(np.allclose(yours, wanted, rtol=1e-12), f"log {log}: version {t} is {yours}, not {wanted}")
    return "every version is the logged run's"


EXERCISES = {1: exercise1, 2: exercise2, 3: exercise3, 4: exercise4, 5: exercise5, 6: exercise6, 7: exercise7,
             8: exercise8, 9: exercise9, 10: exercise10, 11: exercise11,
             12: exercise12, 13: exercise13}


def main(arguments):
    if len(arguments) != 2 or not arguments[0].isdecimal() or int(arguments[0]) not in EXERCISES:
        print(f"usage: python docs/tutorial/grade.py NUMBER FILE, with a NUMBER of {', '.join(map(str, EXERCISES))}",
              file=sys.stderr)
        return 2
    path = Path(arguments[1])
    if not path.is_file():
        print(f"{path}: there is no such file", file=sys.stderr)
        return 2
    try:
        print("right:", EXERCISES[int(arguments[0])](path))
        return 0
    except (Wrong, ml.ScheduleError) as error:
        print("not yet:", error)
    except (Exception, SystemExit, KeyboardInterrupt) as error:  # of the reader's code, or its result
        lines = [line for frame, line in traceback.walk_tb(error.__traceback__)
                 if frame.f_code.co_filename == str(path)]
        print(f"not yet: {type(error).__name__}: {error}" + (f" ({path}, line {lines[-1]})" if lines else ""))
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
