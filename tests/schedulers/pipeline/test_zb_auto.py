"""The zero-bubble search: known optima, the published rates, the cap, and the bound that it is held against."""

import json
from pathlib import Path

import numpy as np
import pipelines
import pytest
from helpers import drawn
from hypothesis import given, settings
from hypothesis import strategies as st
from pipelines import plan

from minidl.core.placement import contiguous
from minidl.core.tasks import Kind, unpack
from minidl.pricing.simulation import times
from minidl.schedulers.pipeline import PipelineError, PipelinePlan, Problem, costs, price, prove, stage_graph, v_shape
from minidl.schedulers.pipeline.bounds import lower_bounds
from minidl.schedulers.pipeline.listing import durations
from minidl.schedulers.pipeline.refine import refine
from minidl.schedulers.pipeline.rules import by_rules
from minidl.schedulers.pipeline.zb_auto import candidates, zb_auto

OPTIMA = json.loads((Path(__file__).parents[1] / "published.json").read_text())["exact_optima"]
PUBLISHED = [  # p, m, F, O, W, c in microseconds, then the published bubble rates of ZB-1p and ZB-2p
    (8, 24, 18522, 18086, 9337, 601, 0.1585, 0.0433),
    (8, 24, 29718, 29444, 19927, 527, 0.1323, 0.0029),
    (32, 256, 10402, 10248, 7698, 460, 0.0594, 0.0018),
]


def priced(p, m, forward, output_grad, weight_grad, latency=0.0, cap=None, kept=1.0):
    placement = contiguous(p)
    cost = costs(placement, forward, output_grad, weight_grad, latency)
    problem = Problem.of(placement, m, cost, cap)
    schedule = zb_auto(problem, kept)
    made = PipelinePlan("zb_auto", stage_graph(p, m), schedule, cost, p, placement=placement, micro_batches=m, cap=cap,
                        kept=kept)
    return price(prove(made)), problem


@pytest.mark.few(2)
@pytest.mark.parametrize("case", OPTIMA, ids=lambda case: str(case["activation_cap"]))
def test_reaches_the_proved_optima(case):
    """More of them are in test_expected."""
    found, _ = priced(case["p"], case["m"], case["F"], case["B"], case["W"], cap=case["activation_cap"])
    assert found.makespan == pytest.approx(case["min_makespan"], abs=1e-6)
    assert found.max_span == found.period == pytest.approx(case["min_max_span"], abs=1e-6)
    assert max(found.peak_activations) <= (case["activation_cap"] or case["m"])


LARGE_IS_SLOW = [pytest.param(*row, marks=pytest.mark.slow if row[0] > 8 else ()) for row in PUBLISHED]


@pytest.mark.few(1)
@pytest.mark.parametrize(("p", "m", "f", "o", "w", "c", "once", "twice"), LARGE_IS_SLOW)
@pytest.mark.parametrize(("times", "kept"), [(1, 1.0), (2, 0.5), (None, 1.0)])
def test_published_bubble_rates_of_zb_1p_and_2p(p, m, f, o, w, c, once, twice, times, kept):
    """ZB-2p as the authors count memory: half of an activation is free after its output gradient."""
    found, _ = priced(p, m, f, o, w, c, cap=times and times * p, kept=kept)
    assert round(found.bubble_rate, 4) <= (once if times == 1 else twice)
    assert max(found.peak_activations) <= (times or m) * p


@pytest.mark.few(1)
@pytest.mark.parametrize(("p", "m", "f", "o", "w", "c", "once", "twice"), LARGE_IS_SLOW)
def test_a_cap_of_2p_whole_activations_rules_the_published_rate_out(p, m, f, o, w, c, once, twice):
    """And the search reaches the bound that says so."""
    found, problem = priced(p, m, f, o, w, c, cap=2 * p)
    bound = lower_bounds(problem, 2 * p)[0]
    assert 1 - m * (f + o + w) / bound > twice
    assert found.max_span == pytest.approx(bound)
    assert max(found.peak_activations) <= 2 * p


@pytest.mark.parametrize(("w", "span"), [(1, 18), (2, 24), (4, 36)])
def test_a_bound_counts_weight_gradients_that_hold_half_an_activation(w, span):
    """Two ranks have no idle time: a rank keeps four open under a cap of three activations."""
    found, problem = priced(2, 6, 1, 1, w, cap=3, kept=0.5)
    assert (found.max_span, found.makespan) == lower_bounds(problem, 3, 0.5) == (span, span + 1)


COSTS = st.one_of(st.integers(1, 9), st.floats(0.1, 9))


@settings(max_examples=drawn(40))
@given(data=st.data(), p=st.integers(1, 5), m=st.integers(1, 9), latency=st.sampled_from([0, 0.5, 2]))
def test_every_order_is_valid_within_the_cap_and_not_below_the_bound(data, p, m, latency):
    times = [data.draw(st.lists(COSTS, min_size=p, max_size=p)) for _ in range(3)]
    cap, kept = data.draw(st.integers(1, m)), data.draw(st.sampled_from([1.0, 0.5, 0.25]))
    found, problem = priced(p, m, *times, latency=latency, cap=cap, kept=kept)
    assert max(found.peak_activations) <= cap
    span, makespan = lower_bounds(problem, cap, kept)
    assert found.max_span >= span * (1 - 1e-9)
    assert found.makespan >= makespan * (1 - 1e-9)
    serial = sum(m * (f + o + w) + 2 * latency * m for f, o, w in zip(*times, strict=True))
    assert found.makespan <= serial * (1 + 1e-9)


@pytest.mark.slow
@settings(max_examples=drawn(15))
@given(p=st.integers(2, 6), m=st.integers(2, 12), f=COSTS, o=COSTS, w=COSTS, latency=st.sampled_from([0, 0.5, 2]))
def test_is_never_slower_than_the_handmade_zero_bubble_schedules_under_their_peak(p, m, f, o, w, latency):
    cost = costs(contiguous(p), f, o, w, latency)
    for name in ("zb_h1", "zb_h2", "one_f_one_b"):
        if name == "zb_h2" and m < 2 * p - 1:
            continue
        other = price(plan(name, p, m, cost), cost)
        found = price(plan("zb_auto", p, m, cost, activation_cap=max(other.peak_activations)), cost)
        assert found.max_span <= other.max_span * (1 + 1e-9)
        assert found.period <= other.period * (1 + 1e-9)


@pytest.mark.parametrize(("name", "cap", "chunks"), [("zb_auto", 3, 1), ("zb_v", 6, 2)])
def test_an_order_by_a_rule_has_the_times_of_the_simulator(name, cap, chunks):
    place = pipelines.place(name, 3)
    cost = costs(place, [2, 1, 3] * chunks, [1, 4, 1] * chunks, [2, 2, 5] * chunks, 0.25)
    problem = Problem.of(place, 5, cost, cap / chunks)
    rules = candidates(problem, 3.0, 1.0)[::7] if chunks == 1 else [*v_shape.rules(problem, cap)][::50]
    spans, makespans, _ = by_rules(problem, cap, 1.0, rules)
    for rule, span, makespan in zip(rules, spans, makespans, strict=True):
        schedule = by_rules(problem, cap, 1.0, [rule])[2]
        made = prove(PipelinePlan(name, stage_graph(place.stages, 5), schedule, cost, 3, placement=place,
                                  micro_batches=5, cap=cap / chunks))
        assert (price(made).max_span, price(made).makespan) == pytest.approx((span, makespan))


def test_searches_time_their_orders_as_the_simulator_does_and_refining_only_helps():
    """`refine` times every move within its own loop."""
    def spans(graph, schedule, cost):
        start, end, _ = times(graph, schedule, cost)
        ids, rank = schedule.ids(graph), schedule.lane_of_each()
        return max(end[ids[rank == r]].max() - start[ids[rank == r]].min() for r in range(4)), end.max()

    each = [2, 1, 3, 2], [1, 4, 1, 3], [2, 2, 5, 1]
    cost = costs(contiguous(4), *each, 0.25)
    problem, graph = Problem.of(contiguous(4), 6, cost, 4), stage_graph(4, 6)
    for one in candidates(problem, 4.0, 1.0)[::29]:
        (before,), (whole,), order = by_rules(problem, 4.0, 1.0, [one])
        makespan, span, better = refine(graph, order, durations(problem, graph), 0.25, 4, bounds=(0.0, 0.0))
        assert spans(graph, better, cost) == pytest.approx((span, makespan))
        assert span < before * (1 - 1e-9) or (span <= before * (1 + 1e-9) and makespan <= whole * (1 + 1e-9))
        assert (np.sort(better.keys.reshape(4, -1)) == np.sort(order.keys.reshape(4, -1))).all()
    v = pipelines.place("zb_v", 4)
    cost = costs(v, *(t * 2 for t in each), 0.25)
    problem, graph = Problem.of(v, 6, cost), stage_graph(8, 6)
    makespan, span, found = refine(graph, v_shape.handcrafted(problem), durations(problem, graph), 0.25, 8)
    assert spans(graph, found, cost) == pytest.approx((span, makespan))


def test_an_order_has_as_many_forwards_ahead_as_its_candidate_says():
    problem = Problem.of(contiguous(3), 7, costs(contiguous(3), 1, 2, 1), 4)
    for one in candidates(problem, 4.0, 1.0)[::7]:
        order = unpack(by_rules(problem, 4.0, 1.0, [one])[2].keys).kind.reshape(3, -1)
        assert (np.cumsum((order == Kind.F).astype(int) - (order == Kind.O), axis=1).max(axis=1) <= one.ahead).all()


@pytest.mark.parametrize(("cap", "kept", "message"), [
    (0.5, 1.0, "smallest feasible cap is 1"), (2, 0.0, "kept is 0"), (2, 1.5, "kept is 1.5")])
def test_bad_caps_are_one_clear_line(cap, kept, message):
    problem = Problem.of(contiguous(2), 4, costs(contiguous(2), 1, 1, 1), cap)
    with pytest.raises(PipelineError, match=message):
        zb_auto(problem, kept)


RELEASED = json.loads(Path(__file__).with_name("zb_auto.json").read_text())["cases"]


def excess(p, m, f, o, w, latency, cap, longest, peak) -> float:
    """By which share our largest span is longer than the released heuristic's at its peak, or (negative) shorter."""
    cost = costs(contiguous(p), f, o, w, latency)
    found = price(plan("zb_auto", p, m, cost, activation_cap=peak), cost)
    assert max(found.peak_activations) <= peak <= cap
    return 0.0 if found.max_span == pytest.approx(longest, abs=1e-6, rel=0) else found.max_span / longest - 1


@pytest.mark.few(1)
@pytest.mark.parametrize("case", RELEASED[::70], ids=lambda case: "-".join(map(str, case[:2])))
def test_no_span_is_longer_than_the_released_heuristics(case):
    assert excess(*case) <= 0


@pytest.mark.slow
def test_the_counts_of_the_claims():
    """The first 180 settings have caps at or next to p or 2p, the others any cap between them."""
    shares = np.array([excess(*case) for case in RELEASED])
    text = (Path(__file__).parents[3] / "docs" / "claims" / "zero_bubble.md").read_text()
    assert (f"on {len(RELEASED)} settings shorter in {(shares < 0).sum()}, equal in {(shares == 0).sum()}.") in text
    assert (shares <= 0).all()
