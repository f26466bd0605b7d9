"""multi_region: never slower than the others under the same limit, near the exhaustive optimum, the same bits."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from helpers import classified, drawn, network
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import minidl as ml
from minidl import models, nn, optim, schedulers
from minidl.core.graph import GraphBuilder, TaskGraph
from minidl.core.tasks import Kind
from minidl.passes.boundary import cross_boundary, late_tasks, must_stay
from minidl.plans.memory import MemoryLimitError
from minidl.plans.program import lower
from minidl.pricing.corun import CoRun
from minidl.pricing.cost import Link
from minidl.pricing.simulation import Clock, Lanes
from minidl.runtime.checking import random_schedule
from minidl.schedulers.exhaustive import shortest
from minidl.schedulers.give_back import given_back
from minidl.schedulers.movable import Step
from minidl.schedulers.multi_region import LEAST, found_places, multi_region, planned
from minidl.schedulers.regions import regions
from minidl.schedulers.single import MARGIN


def branches(optimizer: Any) -> TaskGraph:
    """A recorded step of two layers side by side and one above them."""
    ml.seed(0)
    a, b, c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
    opt = optimizer([p for layer in (a, b, c) for p in layer.parameters()], lr=0.1)
    return ml.record(classified(lambda x: c(a(x) + b(x)), opt), np.zeros((2, 4), np.float32), np.zeros(2, int))


def optimum(graph: TaskGraph, duration: list[float], best: float) -> float:
    """The shortest makespan on two streams, by trying all active schedules; `best` is known to be possible."""
    n = len(graph)
    preds, succs = [graph.preds[t].tolist() for t in range(n)], [graph.succs[t].tolist() for t in range(n)]
    tail = [0.0] * n
    for t in reversed(range(n)):
        tail[t] = duration[t] + max((tail[s] for s in succs[t]), default=0.0)
    seen: dict[Any, float] = {}

    def go(done: int, end: dict[int, float], free: tuple[float, float], rest: float) -> None:
        nonlocal best
        if done == (1 << n) - 1:
            best = min(best, max(free))
            return
        if (sum(free) + rest) / 2 >= best - 1e-9:
            return
        open_ends = tuple((t, end[t]) for t in end if any(not done >> s & 1 for s in succs[t]) and end[t] > free[0])
        key = (done, free, open_ends)
        if key in seen:
            return
        seen[key] = 0.0
        for t in range(n):
            if done >> t & 1 or any(not done >> p & 1 for p in preds[t]):
                continue
            ready = max((end[p] for p in preds[t]), default=0.0)
            for lane in (0, 1):
                begin = max(free[lane], ready)
                if begin + tail[t] >= best - 1e-9:
                    continue
                after = tuple(sorted((begin + duration[t], free[1 - lane])))
                go(done | 1 << t, {**end, t: begin + duration[t]}, (after[0], after[1]), rest - duration[t])

    go(0, {}, (0.0, 0.0), sum(duration))
    return best


def best_of_all(graph: TaskGraph, cost: ml.CostModel, known: float) -> float:
    """Over every set of layers whose W and U are one step late."""
    layers = int(graph.unit.max()) + 1
    for count in range(layers + 1):
        for late in itertools.combinations(range(layers), count):
            ids = [t for t in range(len(graph)) if graph.kind[t] in (Kind.W, Kind.U) and graph.unit[t] in late]
            body = cross_boundary(graph, ids).body[0] if ids else graph
            known = min(known, optimum(body, cost.durations(body).tolist(), known))
    return known


def price(graph: TaskGraph, schedule: ml.Schedule, cost: ml.CostModel) -> float:
    run = lower(graph, schedule)
    return ml.simulate(run.graph, run.schedule, cost).makespan


def random_costs(seed: int, layers: int) -> ml.CostModel:
    rng = np.random.default_rng(seed)
    return ml.CostModel.given(*(rng.integers(1, 10, layers).tolist() for _ in range(3)),
                              update=rng.integers(0, 3, layers).tolist())


@pytest.mark.few(2)
@pytest.mark.parametrize("seed", [*range(20), 80, 94, 125, 199,
                                  *(pytest.param(s, marks=pytest.mark.slow) for s in range(200, 240))])
def test_small_graphs_within_2_percent_of_the_optimum(seed: int) -> None:
    layers = 2 + seed % 3
    graph, cost = network(layers), random_costs(seed, layers)
    found = price(graph, multi_region(graph, cost), cost)
    assert found <= 1.02 * best_of_all(graph, cost, found)
    kept = price(graph, multi_region(graph, cost, crossing=False), cost)
    assert kept <= 1.02 * optimum(graph, cost.durations(graph).tolist(), kept)


def sets_that_may_cross(graph: TaskGraph) -> list[frozenset[int]]:
    """Every set of tasks that holds, with a task, all that need it."""
    found = [frozenset[int]()]
    for task in np.flatnonzero(~must_stay(graph))[::-1].tolist():
        found += [some | {task} for some in found if some.issuperset(graph.succs[task].tolist())]
    return found


@pytest.mark.few(1)
@pytest.mark.parametrize(("optimizer", "seed"),
                         [(optim.SGD, 88), (optim.Adam, 139), (optim.Adam, 145), (optim.Adam, 1)])
def test_branches_and_updates_with_a_common_need_within_2_percent(optimizer: Any, seed: int) -> None:
    """Every update of Adam needs the powers of its betas, so these are late only where all updates are."""
    graph, rng = branches(optimizer), np.random.default_rng(seed)
    cost = ml.CostModel(tasks={t.name: float(rng.integers(0, 10)) for t in graph})
    found = price(graph, multi_region(graph, cost), cost)
    best = found
    for late in sets_that_may_cross(graph):
        body = cross_boundary(graph, late).body[0] if late else graph
        best = optimum(body, cost.durations(body).tolist(), best)
    assert found <= 1.02 * best


def test_what_branch_and_bound_makes_late_can_cross() -> None:
    from minidl.schedulers.multi_region import _late_sets, _whole_sets

    for optimizer in (optim.SGD, optim.Adam):
        graph = branches(optimizer)
        step, _ = Step.of(graph, ml.CostModel.analytic()).with_separate_updates({})
        for late in _whole_sets(step):
            cross_boundary(graph, late)
        assert sorted(map(sorted, _late_sets(step))) == sorted(map(sorted, sets_that_may_cross(graph)))


@given(seed=st.integers(0, 10**6), layers=st.integers(1, 4), sync=st.sampled_from([0.0, 0.5, 2.0]))
@settings(max_examples=drawn(30))
def test_branch_and_bound(seed: int, layers: int, sync: float) -> None:
    """Its order is legal and has its makespan, and none that is a list schedule is shorter."""
    graph, cost = network(layers), replace(random_costs(seed, layers), sync=sync)
    duration, preds = cost.durations(graph).tolist(), [graph.preds[t].tolist() for t in range(len(graph))]
    best, order, left = shortest(preds, duration, sync, float("inf"), 10**6)
    assert order is not None
    assert left > 0
    lanes = Lanes.of_tasks(order)
    assert Clock.of(graph, cost, lanes).run(lanes).end.max() == pytest.approx(best)
    assert shortest(preds, duration, sync, best, 10**6)[1] is None
    for key in range(5):
        schedule = random_schedule(graph, 2, np.random.Generator(np.random.Philox(key)))
        assert best <= ml.simulate(graph, schedule, cost).makespan + 1e-9
    if not sync:
        assert best == pytest.approx(optimum(graph, duration, float("inf")))


@pytest.mark.slow
@settings(max_examples=drawn(10), phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(seed=st.integers(0, 10**6), layers=st.integers(1, 6), slow=st.floats(1.0, 2.5),
       crossing=st.booleans(), data=st.data())
def test_never_slower_than_the_others_under_the_same_limit(seed: int, layers: int, slow: float,
                                                           crossing: bool, data: Any) -> None:
    graph = network(layers, nbytes=512)
    groups = {graph.name(t): graph.kind[t].item() for t in range(len(graph))}
    corun = CoRun({k: str(v) for k, v in groups.items()},
                  {"0": {"2": slow}, "1": {"2": 1.2}, "2": {"0": slow, "1": 1.1}})
    cost = ml.CostModel(**{**vars(random_costs(seed, layers)), "corun": corun})
    others = {n: ml.plan(graph, n, cost).schedule for n in ("in_order", "multi_stream")}
    peaks = {name: lower(graph, s).peak_bytes for name, s in others.items()}
    limit = data.draw(st.one_of(st.none(), st.integers(min(peaks.values()), 2 * max(peaks.values()))))
    mine = planned(graph, cost, ml.Machine(memory_limit=limit), crossing=crossing)
    run = lower(graph, mine.schedule)
    assert limit is None or run.peak_bytes <= limit
    assert crossing or not len(late_tasks(graph, mine.schedule))
    fitting = [s for name, s in others.items() if limit is None or peaks[name] <= limit]
    assert price(graph, mine.schedule, cost) <= min(price(graph, s, cost) for s in fitting) * (1 + 1e-9)
    again = multi_region(graph, cost, ml.Machine(memory_limit=limit), crossing=crossing)
    assert again.to_csv() == mine.schedule.to_csv()


def levels(graph: TaskGraph, cost: ml.CostModel) -> Iterator[tuple[int, float]]:
    """(peak, makespan) of the plans from the fastest one to the one that needs least memory."""
    found = planned(graph, cost, ml.Machine())
    with suppress(MemoryLimitError):
        while True:
            yield (peak := lower(graph, found.schedule).peak_bytes), price(graph, found.schedule, cost)
            assert found.within is not None
            found = found.within(peak - 1)


@pytest.mark.slow
def test_the_curve_falls_to_the_smallest_limit_that_can_work() -> None:
    for cost in (random_costs(1, 5), ml.CostModel.given(1, 1, 3)):
        graph = network(5)
        found = [*levels(graph, cost)]
        assert len(found) > 1
        assert all(a > b and fast < slow for (a, fast), (b, slow) in itertools.pairwise(found))
        for peak, makespan in found:
            fits = multi_region(graph, cost, ml.Machine(memory_limit=peak))
            assert lower(graph, fits).peak_bytes <= peak
            assert price(graph, fits, cost) <= makespan * (1 + 1e-9)
        least = found[-1][0]
        assert least <= lower(graph, schedulers.in_order(graph)).peak_bytes
        with pytest.raises(MemoryLimitError, match=f"the smallest limit that can work is {least:,}"):
            multi_region(graph, cost, ml.Machine(memory_limit=least - 1))


@pytest.mark.wide
def test_overlap_is_given_back_step_by_step() -> None:
    """Down to one stream, which takes least; what fits where the recorded order just fits is faster than that."""
    model = models.create("densenet121", preset="tiny")
    opt = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    graph = ml.record(classified(model, opt), np.zeros((4, *model.input_shape), np.float32), np.zeros(4, int))
    cost, machine = ml.CostModel.analytic(), ml.Machine()
    step = Step.of(graph, cost)
    step, places = found_places(step, regions(graph, step.chain, step.duration), True)
    peaks = {name: lower(graph, step.schedule(less)).peak_bytes for name, less in given_back(step, places)}
    found, recorded = planned(graph, cost, machine), schedulers.in_order(graph)
    peak = lower(graph, recorded).peak_bytes
    assert peaks["all on one stream"] == min(peaks.values()) < peak < lower(graph, found.schedule).peak_bytes
    fitting = planned(graph, cost, replace(machine, memory_limit=peak))
    assert lower(graph, fitting.schedule).peak_bytes <= peak
    assert price(graph, fitting.schedule, cost) < price(graph, recorded, cost)
    assert "overlap is given back" in fitting.remarks[0]


@pytest.mark.parametrize(("given", "message"), [
    ({"streams": 3}, "2 streams, not 3"), ({"crossing": "false"}, "crossing is 'false'; it must be true or false")])
def test_what_multi_region_cannot_be_told(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ml.plan(network(2), "multi_region", **given)


@pytest.mark.slow
def test_by_measured_costs_late_tasks_must_save_more_than_a_margin() -> None:
    """Measured costs do not show that what a late task needs has left the caches."""
    graph, undone = network(4), 0
    for long in (20.0, 100.0, 200.0, 400.0, 10_000.0):  # the longer the forward pass, the less late tasks can save
        given = ml.CostModel.given([1.0, 1.0, 1.0, long], 1.0, 2.0, update=0.1)
        prompt, late = (price(graph, multi_region(graph, given, crossing=crossing), given)
                        for crossing in (False, True))
        sizes = [late_tasks(graph, multi_region(graph, replace(given, source=s))).size for s in ("given", "measured")]
        assert bool(sizes[0]) == (late < prompt / (1 + LEAST))
        assert bool(sizes[1]) == (late < prompt / (1 + MARGIN))
        undone += sizes[0] > sizes[1]
    assert undone


@pytest.mark.few(1)
@pytest.mark.parametrize("link", [Link(5.0, 1e3), Link(0.0, 2.0), Link(5.0, None, core=True)])
@pytest.mark.parametrize("seed", range(3))
def test_a_link_changes_nothing_on_one_rank(link: Link, seed: int) -> None:
    """Costs of a machine may have the link of its ranks as well; an order with late tasks could not be priced."""
    graph, cost = network(5), replace(random_costs(seed, 5), wake=0.1, doze=1.0, spin=1.0)
    alone, linked = (ml.plan(graph, "multi_region", c) for c in (cost, replace(cost, link=link)))
    assert (linked.schedule.to_csv(), linked.step) == (alone.schedule.to_csv(), alone.step)


def test_graphs_with_nothing_to_move() -> None:
    assert len(multi_region(GraphBuilder().build())) == 0
    graph = ml.record(models.mlp(4, 4, 3), np.zeros((2, 4), np.float32))
    assert lower(graph, multi_region(graph)).schedule.names(0) == [t.name for t in graph]


def test_several_iterations_stay_as_they_are() -> None:
    """A graph of two steps has its own border inside; nothing is later still."""
    graph = ml.unroll(network(3), 2)
    names = [name for s in [multi_region(graph, ml.CostModel.given(1, 1, 5))] for lane in range(2)
             for name in s.names(lane)]
    assert sorted(names) == sorted(t.name for t in graph)


def test_slow_pairs_are_kept_apart() -> None:
    """Beside the backward pass nothing is won, so weight gradients go beside the next forward."""
    graph, cost = network(8), ml.CostModel.given(3, 3, 1)
    groups = {graph.name(t): graph[t].kind.name for t in range(len(graph))}
    corun = CoRun(groups, {"O": {"W": 2.5}, "W": {"O": 2.5}})
    schedule = multi_region(graph, ml.CostModel(**{**vars(cost), "corun": corun}))
    assert len(late_tasks(graph, schedule)) >= 8
    assert not len(late_tasks(graph, multi_region(graph, cost, crossing=False)))


def test_regions_are_all_of_the_chain() -> None:
    for layers in (1, 3, 40):
        step = Step.of(network(layers), random_costs(0, layers))
        cut = regions(step.graph, step.chain, step.duration)
        assert [r.begin for r in cut] == [0, *(r.end for r in cut[:-1])]
        assert cut[-1].end == len(step.chain)
        assert sum(r.time for r in cut) == pytest.approx(sum(step.duration[t] for t in step.chain))

