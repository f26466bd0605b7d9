"""Data-parallel schedules: published steady states, an event-driven reference, bounds, the search for k."""

from __future__ import annotations

import heapq
import itertools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from command_line import refusal, run, run_json
from helpers import Case, drawn, recorded, refuses, replicas
from hypothesis import given, settings
from hypothesis import strategies as st

import minidl as ml
from minidl import schedulers
from minidl.core.graph import GraphBuilder, Role
from minidl.core.placement import Refused
from minidl.core.tasks import Kind, task_name
from minidl.passes.rewrite import gradients, unroll
from minidl.passes.synchronise import reverse_buckets, synchronise
from minidl.plans.program import lower
from minidl.pricing.collectives import Collective
from minidl.pricing.cost import CostError, CostModel, Link
from minidl.pricing.simulation import times
from minidl.schedulers import data_parallel
from minidl.schedulers.data_parallel import late_updates
from minidl.schedulers.iterations import Iterations, Rules, delayable, search
from minidl.schedulers.layer_times import layers

EXPECTED = json.loads((Path(__file__).parents[1] / "published.json").read_text())["data_parallel"]
NAMES = {"serial": ("no_overlap", None), "ddp_layerwise_barrier": ("barrier", None),
         "ddp_2_equal_buckets_barrier": ("buckets", None), "dear": ("dear", None),
         "fifo_cross_iteration": ("fifo", None), "priority_8_parts": ("priority", None)}
NAMES |= {f"reverse_first_k={k}_priority": ("reverse_first_k", k) for k in range(1, 9)}
HEAD_HEAVY = {"f": [1, 2, 2, 1], "b": [1, 2, 2, 1], "w": [1, 2, 2, 1], "c": [8, 1, 1, 1]}


def planned(name, case, k=None, parts=8, buckets=2, options=None, **more):
    """The plan on given layer times."""
    graph, cost = layers(case["f"], case["b"], case["w"], parts=parts)
    return replicas(graph, name, replace(cost, **more),
                    lambda sizes: sum(case["c"][u] * n / parts for u, n in sizes.items()),
                    buckets=min(buckets, len(case["f"])), part_bytes=1, k=k, **options or {})


def period(name, case, k=None):
    return planned(name, case, k).period


@pytest.mark.parametrize("case", EXPECTED, ids=lambda c: c["case"])
def test_the_published_steady_states(case):
    for label, wanted in case["period"].items():
        name, k = NAMES[label]
        found = planned(name, case, k)
        assert found.period == pytest.approx(wanted, abs=1e-9), label
        assert found.notes["lower_bound"] == pytest.approx(case["lower_bounds"]["max"])


@pytest.mark.parametrize(("lag", "wanted"), [(0, 28), (1, 27), (2, 26), (5, 23), (None, 22)])
def test_a_bound_on_late_weight_gradients_holds_on_given_times(lag, wanted):
    """All should wait, since the first layer's sum is the long one."""
    case = {"f": [1] * 7, "b": [1] * 7, "w": [1] * 7, "c": [8, *[1] * 6]}
    plan = planned("reverse_first_k", case, options={} if lag is None else {"lag": lag})
    assert plan.period == pytest.approx(wanted)
    main = [task_name(key) for key in plan.schedule.keys[: plan.schedule.ptr[1]].tolist()]
    waiting = [sum(main.index(f"{v}W0") > main.index(f"{u}O0") for v in range(u, 7)) for u in range(1, 7)]
    assert max(waiting) == (6 if lag is None else lag), "as an O begins, whose end makes one more W ready"


def reference(name, case, k=0, parts=8, buckets=2, iterations=60, released=False):
    """The period by an event-driven run of its own, with none of the engine's parts: W of a layer runs before its O.
    `released`: only layers below k cross the iteration boundary."""
    f, b, w, c = (case[x] for x in "fbwc")
    count = len(f)
    backward = []
    for i in reversed(range(count)):
        if i >= k:
            backward.append(("w", i))
        if i:
            backward.append(("o", i))
    backward += [("w", i) for i in range(k)]
    now, done, ends = 0.0, dict.fromkeys(range(count), 0.0), []
    barrier = name in ("barrier", "buckets", "no_overlap")
    for _ in range(iterations):
        if barrier:
            now = max(now, *done.values())
        if released:
            now = max(now, *(done[i] for i in range(k, count)), 0.0)
        for i in range(count):
            now = max(now, done[i]) + f[i]
        made = {}
        for what, i in backward:
            now += w[i] if what == "w" else b[i]
            if what == "w":
                made[i] = now
        ends.append(now)
        if name == "no_overlap":
            done = dict.fromkeys(range(count), now + sum(c))
            continue
        groups = ([g.tolist() for g in np.array_split(np.arange(count)[::-1], buckets)] if name == "buckets"
                  else [[i] for i in range(count)])
        jobs = []  # (ready, key, layers, time)
        for g in groups:
            ready, cost = max(made[i] for i in g), sum(c[i] for i in g)
            if name in ("priority", "reverse_first_k"):
                place = 0 if released and g[0] >= k else g[0]  # what the next iteration needs before it starts
                jobs += [(ready, (place, g[0], part), g, cost / parts) for part in range(parts)]
            else:
                jobs.append((ready, (ready, -g[0]), g, cost / 2 if name == "dear" else cost))
        free, queue = 0.0, sorted(jobs)
        heap: list = []
        done = {}
        while queue or heap:
            if not heap:
                free = max(free, queue[0][0])
            while queue and queue[0][0] <= free:
                ready, key, g, cost = queue.pop(0)
                heapq.heappush(heap, (key, g, cost))
            _, g, cost = heapq.heappop(heap)
            free += cost
            done |= dict.fromkeys(g, free)
        if name == "dear":
            for i in range(count):
                free += c[i] / 2
                done[i] = free
    steps = np.diff(ends[-20:])
    return float(steps.mean()) if np.ptp(steps) < 1e-6 else None


LAYERS = st.integers(1, 6).flatmap(lambda n: st.fixed_dictionaries(
    {x: st.lists(st.integers(0 if x == "b" else 1, 30 if x == "c" else 9), min_size=n, max_size=n) for x in "fbwc"}))


@settings(max_examples=drawn(230))
@given(case=LAYERS, rule=st.sampled_from([*schedulers.names("data", exact=True), *["released"] * 3]), data=st.data())
def test_periods_are_those_of_an_event_driven_run(case, rule, data):
    """Also by the rule of the released code of reverse_first_k, which is never slower than priority."""
    released = rule == "released"
    name = "reverse_first_k" if released else rule
    k = data.draw(st.integers(0, len(case["f"]))) if name == "reverse_first_k" else None
    wanted = reference(name, case, k or 0, buckets=min(2, len(case["f"])), released=released)
    if wanted is None:
        return  # the reference does not settle
    found = planned(name, case, k, options={"released": True} if released else {})
    assert found.period == pytest.approx(wanted)
    assert found.period >= found.notes["lower_bound"] - 1e-9
    assert name != "priority" or period("reverse_first_k", case) <= found.period * (1 + 1e-9)


@settings(max_examples=drawn(80))
@given(case=LAYERS, name=st.sampled_from(schedulers.names("data", exact=True)), sync=st.sampled_from([0.0, 0.5]),
       wake=st.sampled_from([0.0, 0.25]), data=st.data())
def test_the_simulator_says_the_same_of_the_plan_unrolled(case, name, sync, wake, data):
    k = data.draw(st.integers(0, len(case["f"]))) if name == "reverse_first_k" else None
    found = planned(name, case, k, sync=sync, wake=wake)
    graph, cost = found.graph, found.cost
    lower(graph, found.schedule)
    assert found.period >= found.notes["lower_bound"] - 1e-9
    assert 0 <= data_parallel.hidden(found) <= 1 + 1e-9
    n = 24
    rolled = unroll(graph, n)
    _, end, _ = times(rolled, found.schedule.repeated(n).validate(rolled), cost)
    backward = [max(end[t] for t in np.flatnonzero((rolled.iteration == i) & (rolled.kind <= Kind.W)))
                for i in range(n)]
    steps = np.diff(backward[n // 2 : n - 2])  # at the end nothing goes on beside
    if np.ptp(steps) < 1e-9:
        assert steps[0] == pytest.approx(found.period)


def orders_of_backward(count):
    """Every order in which one stream can run the backward pass: each weight gradient anywhere after its gradient."""
    tasks = [("o", i) for i in reversed(range(1, count))]
    results = {tuple(tasks)}
    for i in reversed(range(count)):
        grown = set()
        for order in results:
            first = order.index(("o", i + 1)) + 1 if i + 1 < count else 0
            grown |= {(*order[:at], ("w", i), *order[at:]) for at in range(first, len(order) + 1)}
        results = grown
    return sorted(results)


@pytest.mark.few(1)
@pytest.mark.parametrize("seed", range(6))
def test_reverse_first_k_is_within_five_percent_of_every_order_with_few_layers(seed):
    random = np.random.default_rng(seed)
    count = 4
    case = {x: random.integers(1, 6, count).tolist() for x in "fbwc"}
    case["c"] = (random.dirichlet(np.full(count, 0.6)) * sum(case["f"] + case["b"] + case["w"])).round(3).tolist()
    found = planned("priority", case)
    graph, cost = found.graph, found.cost
    best = np.inf
    for order in orders_of_backward(count):
        body = late_updates(graph).body[0]
        steady = Iterations(body, cost, Rules(first="need"))
        forward = [t for t in steady.body if body.kind[t] == Kind.F]
        steady.body = [*forward, *(body.index(f"{i}{what.upper()}0") for what, i in order)]
        best = min(best, steady.periods([0])[0])
    assert period("reverse_first_k", case) <= best / 0.95


@pytest.mark.parametrize("best", [0, 333, 345, 1000])  # 336 is among the first values that are tried
def test_search_finds_the_smallest_of_the_best_and_asks_less_than_all(best):
    asked = []

    def values(some):
        asked.extend(some)
        return [abs(n - best) for n in some]

    assert search(values, 1000) == best
    assert len(asked) == len(set(asked)) < 150
    assert [search(lambda some, k=k: [abs(n - k) for n in some], 48) for k in range(49)] == [*range(49)]
    assert search(lambda some: [1.0] * len(some), 20) == 0
    assert search(lambda some: [-n for n in some], 20, fits=lambda n: n <= 7) == 7
    with pytest.raises(ValueError, match="no k fits"):
        search(lambda some: [1.0] * len(some), 5, fits=lambda n: False)


def test_a_weight_gradient_without_an_update_waits_for_nothing():
    """Nor one that an output gradient needs."""
    builder = GraphBuilder()
    gradient = [builder.buffer(f"g{unit}", 8, Role.GRADIENT) for unit in range(3)]
    for unit in range(3):
        builder.task(unit, Kind.W, writes=[gradient[unit]])
    builder.task(1, Kind.O, reads=[gradient[1]])
    for unit in range(2):
        builder.task(unit, Kind.U, reads=[gradient[unit]])
    assert delayable(builder.build()) == [0]


def test_what_cannot_be_asked_for():
    """More in test_one_line."""
    graph, cost = layers([1] * 4, [1] * 4, [1] * 4)
    refuses((lambda: ml.plan(graph, "priority", cost, k=1),
             "scheduler priority takes no argument 'k'; it takes: part_bytes"),
            (lambda: ml.plan(graph, "buckets", cost, buckets=9), "too few for 9 buckets"),
            (lambda: layers([1, 2], [1], [1, 2]), "one time per layer"))


# ------------------------------------------------------------------------------------------------------------ the pass
CASE = Case(("linear", "relu", "dropout", "tied", "linear", "tied"), width=6, micro_batches=2)


def test_parts_cover_every_gradient_once_and_are_of_equal_size():
    graph = recorded(CASE)
    found = synchronise(graph, part_bytes=40)
    parts = {}
    for task in found:
        if task.kind == Kind.A:
            parts.setdefault(task.unit, []).append(task)
    for update, buffers in gradients(graph).items():
        mine = parts[int(graph.unit[update])]
        assert sum(t.bytes for t in mine) == graph.buffer_bytes[buffers].sum()
        assert max(t.bytes for t in mine) <= 44
        windows = sorted((v.storage, v.offset, v.shape[0]) for t in mine for v in t.launches[0].reads)
        for (s, at, n), (z, start, _) in itertools.pairwise(windows):
            assert s != z or at + n == start
    assert min(t.index for t in found if t.kind == Kind.U) > max(t.index for t in found if t.kind != Kind.U)
    body = late_updates(found).body[0]
    assert all(body.buffer(b).role == Role.STATE for t in body if t.kind == Kind.A for b in body.reads[t.index])
    assert not late_updates(found).doubled, "gradients are spent before they are written again: one copy is enough"


def test_only_the_updates_wait_for_communication():
    graph = synchronise(recorded(CASE), part_bytes=40)
    two = unroll(graph, 2)
    waits = [(two[int(p)], two[t]) for t in range(len(two))
             for p in two.preds[t] if two.kind[p] == Kind.A and two.kind[t] != Kind.A]
    assert waits
    assert all(after.kind == Kind.U and after.iteration == before.iteration and after.unit == before.unit
               for before, after in waits)


def test_a_program_waits_across_the_boundary_for_every_transfer_once():
    found = planned("priority", HEAD_HEAVY)
    graph, program = found.graph, found.programs[0]
    transfers = {t.name for t in graph if t.kind == Kind.A}
    assert program.runs_on
    assert sorted(task_name(transfer) for _, transfer in program.boundary_waits) == sorted(transfers)
    assert all(task_name(late).endswith("U0@1") for late, _ in program.boundary_waits)
    kept = planned("no_overlap", HEAD_HEAVY).programs[0]
    assert not kept.runs_on
    assert not kept.boundary_waits


def test_buckets_fill_in_reverse_and_hold_everything():
    graph = recorded(CASE)
    buckets = reverse_buckets(graph, 150)
    units = [int(graph.unit[u]) for bucket in buckets for u in bucket]
    assert units == sorted(units, reverse=True)
    assert set(units) == {int(graph.unit[u]) for u in gradients(graph)}
    assert len(buckets) > 1
    assert [t.kind for t in synchronise(graph, buckets) if t.kind == Kind.A] == [Kind.A] * len(buckets)


def test_a_step_that_returns_what_ranks_still_change_is_refused():
    """Parameters, gradients and norms are not yet what they will be when a rank's step returns."""
    for what in (lambda w, opt: w, lambda w, opt: w.grad, lambda w, opt: opt._norm):
        w = ml.Parameter(np.ones(3, np.float32))
        opt = ml.optim.SGD([w], 0.1, max_norm=1.0)

        def step(x, w=w, opt=opt, what=what):
            (w * x).sum().backward()
            opt.step()
            return what(w, opt)

        with pytest.raises(Refused, match=r"^sums over ranks: the step returns ((grad )?parameter|gradient norm), "
                                             r"which is not final yet, as .*\(\dU0\)"):
            synchronise(ml.record(step, np.ones(3, np.float32)))


def test_what_cannot_be_synchronised():
    model, opt, _ = CASE.make()
    x, y = CASE.batches(1)[0][:2]

    def late(x, y):
        loss = ml.nn.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        return model(x)

    refuses((lambda: synchronise(ml.record(late, x, y)), "after the update"),
            (lambda: synchronise(ml.record(lambda x: x + 1.0, x)), "updates nothing"),
            (lambda: synchronise(synchronise(recorded(CASE))), "synchronised already"),
            (lambda: synchronise(recorded(CASE), []), "exactly once"), error=Refused)


def test_a_memory_limit_bounds_k():
    step = recorded(Case(("linear",) * 6, width=32, batch=64))

    def found(k=None, limit=None):
        return replicas(step, "reverse_first_k", None, lambda sizes: 5.0, limit=limit, part_bytes=1000, k=k)

    peaks = [found(k).peak_bytes[0] for k in range(len(delayable(step)) + 1)]
    assert peaks[-1] > peaks[0]
    assert found(limit=peaks[0]).peak_bytes[0] <= peaks[0]


@pytest.mark.slow
def test_resnet50_reaches_the_ceiling_over_a_barrier():
    """What any order can gain over a barrier, by communication over computation, with times by arithmetic."""
    from minidl.training.job import Job
    from minidl.training.recorded import Recorded

    step = Recorded(Job(model="resnet50", data="synthetic", batch_size=1))
    flops = CostModel(tasks={step.graph.name(t): float(step.graph.flops[t]) for t in range(len(step.graph))})
    compute, nbytes = step.graph.flops.sum(), sum(p.bytes for p in step.model.parameters())
    for ratio, ceiling in ((0.5, 1.0), (0.75, 1.09), (1.0, 1.34), (1.25, 1.27), (1.5, 1.22)):
        found = {}
        for name in ("barrier", "priority", "reverse_first_k"):
            found[name] = replicas(step.graph, name, flops, lambda s, r=ratio: r * compute * sum(s.values()) / nbytes)
        gain = found["barrier"].period / found["reverse_first_k"].period
        assert gain == pytest.approx(ceiling, abs=0.01)
        assert found["reverse_first_k"].period <= found["priority"].period
        assert found["reverse_first_k"].period <= found["reverse_first_k"].notes["lower_bound"] / 0.95


# --------------------------------------------------------------------------------------------------------- collectives
def test_what_an_all_reduce_costs():
    link = Link(1.0, 10.0)
    assert Collective(1, link).time(100) == 0
    assert Collective(4, link).time(100) == pytest.approx(6 * (1 + 2.5))
    assert Collective(5, link, "tree").time(100) == pytest.approx(6 * 11)
    assert Collective(4, link, "parameter_server").time(100) == pytest.approx(2 + 2 * 4 * 3 * 10 / 16)
    assert Collective(4, link, "parameter_server", 4).time(100) == pytest.approx(2 + 2 * 4 * 3 * 10 / 24)
    assert Collective(4, Link(1.0), "tree").time(100) == 4
    for wrong in ({"shape": "star"}, {"servers": 2}, {"ranks": 0}, {"shape": "parameter_server", "servers": 9}):
        with pytest.raises(CostError):
            Collective(**{"ranks": 4, "link": link, **wrong})
    for shape in ("ring", "tree", "parameter_server"):  # more ranks never cost less
        took = [Collective(2**n, Link(5.0, 1000.0), shape).time(1e6) for n in range(1, 13)]
        assert took == sorted(took)


# ---------------------------------------------------------------------------------------------------------- the command
TIMES = ["--forward", "1,2,2,1", "--output-grad", "1,2,2,1", "--weight-grad", "1,2,2,1", "--comm", "8,1,1,1"]


def test_the_command_prices_given_times(capsys):
    def priced(*flags):
        return run_json(capsys, "simulate", "--parallel", "data", *flags)[1]

    found = priced("--scheduler", "reverse_first_k", *TIMES)
    assert (found["period"], found["lower_bound"], found["k"]) == (20, 20, 4)
    assert priced("--scheduler", "reverse_first_k", "--k", "2", *TIMES)["period"] == 23
    assert priced("--scheduler", "reverse_first_k", "--k", "auto", *TIMES)["k"] == 4
    assert priced("--scheduler", "priority", "--parts", "1", *TIMES)["period"] == 25
    assert priced("--scheduler", "barrier", "--forward", "1", "--output-grad", "1", "--weight-grad", "2", "--comm",
                  "3")["period"] == 6


@pytest.mark.few(1)
@pytest.mark.parametrize("flags", [
    ["data", "--ranks", "4", "--scheduler", "barrier"], ["data", "--ranks", "4", "--scheduler", "reverse_first_k"],
    ["pipeline", "--ranks", "2", "--replicas", "2", "--scheduler", "zb_h1", "--micro-batches", "2"]])
def test_a_batch_is_that_of_all_ranks_in_plans_and_in_training(capsys, flags):
    """Plan, simulation and training price the same step: a rank's share of the batch."""
    common = ["--model", "mlp", "--costs", "analytic", "--batch-size", "32", "--parallel", *flags]
    link = ["--latency", "50", "--bandwidth", "1GB"]
    planned, trained = (run_json(capsys, *argv)[1] for argv in (
        ["plan", *common, *link], ["train", *common, "--dry-run"]))
    for key in ("tasks", "peak_bytes", "predicted_step_ms"):
        assert planned[key] == trained[key], key
    if flags[0] == "data":
        simulated = run_json(capsys, "simulate", *common, *link)[1]
        assert simulated["period"] == pytest.approx(1000 * trained["predicted_step_ms"], abs=0.1)
        assert "a batch of 33 rows cannot be divided equally among 4 ranks" in refusal(
            capsys, "plan", *common, "--batch-size", "33")


def test_links_that_take_no_time_are_told(capsys):
    argv = ["simulate", "--parallel", "data", "--scheduler", "priority", *TIMES[:-2], "--comm"]
    for comm, says in (("0,0,0,0", "links take no time; --bandwidth and --latency"), ("1,1,1,1", "of a step")):
        (line,) = [line for line in run(capsys, *argv, comm)[1].splitlines() if line.startswith("communication")]
        assert says in line
