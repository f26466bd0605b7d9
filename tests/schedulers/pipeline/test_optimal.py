"""The solver as an oracle: proved optima, and no valid plan that beats them."""

import json
import sys
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import PATIENCE, drawn, need
from hypothesis import given, settings
from hypothesis import strategies as st
from pipelines import POLICIES, plan

from minidl.core.placement import contiguous
from minidl.pricing.cost import CostModel
from minidl.schedulers.pipeline import PipelineError, PipelinePlan, Problem, costs, price, prove, stage_graph
from minidl.schedulers.pipeline.optimal import OBJECTIVES, optimal
from minidl.schedulers.pipeline.zb_auto import zb_auto

COMPARABLE = sorted(name for name, p in POLICIES.items()
                    if p.placement == "contiguous" and not (p.stale or p.sliced or p.arranges) and name != "optimal")
OPTIMA = json.loads((Path(__file__).parents[1] / "published.json").read_text())["exact_optima"]
MEASURE = {"makespan": "makespan", "span": "max_span", "period": "period"}


def solve(problem, objective="makespan", time_limit=PATIENCE):  # so that a busy machine proves what is asked for
    made = optimal(problem, objective, time_limit)
    return SimpleNamespace(schedule=made.schedule, **made.notes["status"])


@pytest.fixture(scope="module", autouse=True)
def _solver():
    need("ortools")


def problem_of(p, m, forward=1, output_grad=1, weight_grad=1, latency=0.0, cap=None):
    cost = costs(contiguous(p), forward, output_grad, weight_grad, latency)
    return Problem.of(contiguous(p), m, cost, cap), cost


def priced(problem, cost, schedule):
    graph = stage_graph(problem.stages, problem.micro_batches)
    return price(prove(PipelinePlan("optimal", graph, schedule, cost, problem.ranks, placement=problem.placement,
                            micro_batches=problem.micro_batches, cap=problem.cap)))


@pytest.mark.few(2)
@pytest.mark.parametrize("case", [pytest.param(case, marks=pytest.mark.slow if case["activation_cap"] in (2, 3) else ())
                                  for case in OPTIMA], ids=lambda case: str(case["activation_cap"]))
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_exact_optima(case, objective):
    problem, cost = problem_of(case["p"], case["m"], case["F"], case["B"], case["W"], cap=case["activation_cap"])
    found = solve(problem, objective)
    assert found.proved
    assert found.status == "OPTIMAL"
    assert found.value == found.bound == case["min_makespan" if objective == "makespan" else "min_max_span"]
    measured = priced(problem, cost, found.schedule)
    assert getattr(measured, MEASURE[objective]) == pytest.approx(found.value, abs=1e-6)
    assert max(measured.peak_activations) <= (case["activation_cap"] or case["m"])


TIMES = st.one_of(st.integers(1, 6), st.sampled_from([0.5, 1.25, 2.7]))


@settings(max_examples=drawn(15))
@given(data=st.data(), p=st.integers(1, 3), m=st.integers(1, 5), latency=st.sampled_from([0, 0.5, 2]))
def test_no_valid_plan_beats_it(data, p, m, latency):
    per_stage = data.draw(st.booleans())
    times = [data.draw(st.lists(TIMES, min_size=p, max_size=p)) if per_stage else data.draw(TIMES) for _ in range(3)]
    free, cost = problem_of(p, m, *times, latency)
    best = {objective: solve(free, objective) for objective in OBJECTIVES}
    for objective, found in best.items():
        assert found.proved
        assert getattr(priced(free, cost, found.schedule), MEASURE[objective]) <= found.value * (1 + 1e-9)
    for name in COMPARABLE:
        if POLICIES[name].needs(p, m, 1):
            continue
        other = price(plan(name, p, m, cost), cost)
        for objective, found in best.items():
            assert getattr(other, MEASURE[objective]) >= found.value * (1 - 1e-9), (name, objective)


@settings(max_examples=drawn(15))
@given(data=st.data(), p=st.integers(1, 4), m=st.integers(1, 6))
def test_a_cap_costs_time_and_zb_auto_stays_close(data, p, m):
    times = [data.draw(st.integers(1, 5)) for _ in range(3)]
    values = []
    for cap in range(1, m + 1):
        problem, cost = problem_of(p, m, *times, cap=cap)
        found = solve(problem, "span")
        assert max(priced(problem, cost, found.schedule).peak_activations) <= cap
        heuristic = priced(problem, cost, zb_auto(problem)).max_span
        assert found.value <= heuristic * (1 + 1e-9) <= found.value * 1.1
        values.append(found.value)
    assert values == sorted(values, reverse=True)


def test_a_time_limit_gives_the_best_found_and_its_bound():
    problem, cost = problem_of(6, 24, 7.3, 5.9, 4.1, 0.7, cap=7)
    found = solve(problem, "period", time_limit=0.05)
    assert not found.proved
    assert found.status == "FEASIBLE"
    assert 0 < found.bound < found.value
    assert priced(problem, cost, found.schedule).period <= found.value * (1 + 1e-9)


def test_times_without_a_common_tick_are_rounded_and_the_status_says_so():
    cost = CostModel.given(float(np.pi), float(np.e), 2.0)
    made = plan("optimal", 2, 3, cost)
    status = made.notes["status"]
    assert status["proved"]
    assert status["rounded_to"] == pytest.approx(np.pi / 1000)
    assert status["value"] == pytest.approx(price(made).makespan, rel=2e-3)
    assert price(made).makespan <= price(plan("zb_auto", 2, 3, cost)).makespan * 1.002


@pytest.mark.parametrize(("change", "options", "message"), [
    ({"cap": 0.5}, {}, "smallest feasible cap is 1"),
    ({}, {"objective": "bubble"}, "unknown objective 'bubble'; known: makespan, span, period"),
    ({}, {"time_limit": 0}, "time limit")])
def test_bad_input_is_one_clear_line(change, options, message):
    with pytest.raises(PipelineError, match=message):
        solve(problem_of(2, 4, **change)[0], **options)


def test_without_ortools_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ortools.sat.python", None)
    with pytest.raises(PipelineError, match=r"minidl\[optimal\]"):
        solve(problem_of(2, 4)[0])


def legal_orders(m, cap):
    """Every order of one rank's F, O and W, micro-batches in any order, with at most `cap` live activations."""
    def grow(order, done, live):
        if len(order) == 3 * m:
            yield order
        for i in range(m):
            if done[i] < 3 and not (done[i] == 0 and live == cap):
                yield from grow((*order, (done[i], i)), (*done[:i], done[i] + 1, *done[i + 1 :]),
                                live + {0: 1, 1: 0, 2: -1}[done[i]])
    return list(grow((), (0,) * m, 0))


def figures(orders, times, latency):
    """(makespan, largest span) of one order per rank, by relaxation; None if they block each other."""
    p, end, at, free, first = len(orders), {}, [0] * len(orders), [0.0] * len(orders), [None] * len(orders)
    moved = True
    while moved:
        moved = False
        for r, order in enumerate(orders):
            while at[r] < len(order):
                kind, i = order[at[r]]
                source = {0: (r - 1, 0), 1: (r + 1, 1) if r < p - 1 else (r, 0), 2: (r, 1)}[kind]
                if source[0] >= 0 and (*source, i) not in end:
                    break
                ready = end[*source, i] + latency * (source[0] != r) if source[0] >= 0 else 0.0
                begin = max(free[r], ready)
                first[r] = begin if first[r] is None else first[r]
                free[r] = end[r, kind, i] = begin + times[kind]
                at[r], moved = at[r] + 1, True
    if any(at[r] < len(order) for r, order in enumerate(orders)):
        return None
    return max(free), max(last - begin for last, begin in zip(free, first, strict=True))


@pytest.mark.parametrize("count", [6, pytest.param(40, marks=pytest.mark.slow)])
def test_no_order_at_all_is_faster_not_even_one_that_is_not_first_in_first_out(count):
    """Brute force over every legal order, without the assumption of `optimal` that micro-batches stay in order."""
    random = np.random.default_rng(count)
    for _ in range(count):
        p, m = ((1, 3), (2, 2), (3, 2))[random.integers(3)]
        times, latency = random.integers(1, 6, 3).tolist(), int(random.integers(3))
        cap = int(random.integers(1, m + 1))
        problem, _ = problem_of(p, m, *times, latency, cap=cap)
        found = [figure for orders in product(legal_orders(m, cap), repeat=p)
                 if (figure := figures(orders, times, latency)) is not None]
        for objective, best in (("makespan", min(f[0] for f in found)), ("span", min(f[1] for f in found))):
            assert solve(problem, objective).value == pytest.approx(best), (p, m, times, latency, cap, objective)
