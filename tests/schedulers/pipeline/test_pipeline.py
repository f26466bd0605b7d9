"""Pipeline schedules against published numbers, proved optima and closed forms within their stated preconditions."""

import json
from pathlib import Path

import pipelines
import pytest
from helpers import drawn
from hypothesis import given, settings
from hypothesis import strategies as st

from minidl.pricing.simulation import times
from minidl.schedulers import pipeline
from minidl.schedulers.pipeline.stale import pipedream_steady

EXPECTED = json.loads((Path(__file__).parents[1] / "published.json").read_text())
HEURISTIC = {"zb_v", "v_half", "v_min", "zb_auto"}  # as fast or faster counts, at no higher peak


def priced(name, ranks, micro_batches, f=1.0, o=1.0, w=1.0, c=0.0, chunks=None, cap=None) -> pipeline.Price:
    cost = pipeline.costs(pipelines.place(name, ranks, chunks), f, o, w, c)
    return pipeline.price(pipelines.plan(name, ranks, micro_batches, cost, chunks, cap), cost)


@pytest.mark.few(10)
@pytest.mark.parametrize("case", EXPECTED["pipeline"], ids=lambda c: "-".join(
    str(c[k]) for k in ("scheduler", "ranks", "micro_batches", "output_grad", "activation_cap", "chunks") if k in c))
def test_expected(case):
    found = priced(case["scheduler"], case["ranks"], case["micro_batches"], case["forward"], case["output_grad"],
                   case["weight_grad"], case["latency"], case.get("chunks"), case.get("activation_cap"))
    if case["scheduler"] in HEURISTIC:
        for key in ("makespan", "max_span", "period"):
            assert getattr(found, key) <= case[key] + 1e-6
        assert max(found.peak_activations) <= max(case["peak_activations"])
    else:
        for key in ("makespan", "max_span", "period", "peak_activations"):
            assert getattr(found, key) == pytest.approx(case[key], abs=1e-6), key


@pytest.mark.parametrize("case", EXPECTED["zero_bubble_published_bubble_rates"], ids=lambda c: f"{c['p']}-{c['F']}")
@pytest.mark.parametrize(("name", "published"), [("one_f_one_b", "1F1B"), ("zb_h1", "ZB-H1"), ("zb_h2", "ZB-H2")])
def test_published_bubble_rates(case, name, published):
    found = priced(name, case["p"], case["m"], case["F"], case["B"], case["W"], case["comm"])
    assert found.bubble_rate == pytest.approx(case["published"][published], abs=5.1e-5)


@pytest.mark.parametrize("case", EXPECTED["single_mini_batch_layer_level"], ids=lambda c: f"{c['L']}-{c['p']}")
def test_one_micro_batch_at_the_level_of_layers(case):
    layers, p = case["L"], case["p"]
    group = layers // p
    assert priced("gpipe", p, 1, group, group, group).makespan == case["conventional_contiguous"]
    assert priced("fast_forward", p, 1, group, group, group).makespan == case["fast_forward_contiguous"]
    assert priced("modulo_greedy", p, 1, group, group, group, chunks=group).makespan == case["modulo_plus_ff"]


times_of = st.tuples(*[st.integers(1, 9)] * 3)
ranks = st.integers(1, 6)

FEW = "f, o, min(f, o, w), 0"  # W hides behind F and O
#: policy, micro-batches, times and latency, what the form is of, the form, peaks of all ranks or the largest one;
#: `more`: any number from 0 on; `x`: the work of a rank; `v`: its chunks
FORMS = [
    ("gpipe", "1 + more", "f, o, w, c", "makespan", "x + (p - 1) * (f + o + w + 2 * c)", "m"),
    ("fast_forward_strict", "1 + more", "f, o, w, c", "makespan", "x + (p - 1) * (f + o + 2 * c)", "m"),
    ("one_f_one_b", "1 + more", "f, o, w, 0", "makespan", "x + (p - 1) * (f + o + w)",
     "[min(p - s, m) for s in range(p)]"),
    ("interleaved", "p * (2 + more % 3)", "f, o, w, 0", "makespan", "x + (p - 1) * (f + o + w) / v", "p + (p - 1) / v"),
    ("interleaved", "p + more % p", "f, o, w, 0", "makespan", "x + (p - 1) * (f + o + w) / v", None),
    ("interleaved_zb", "p * (1 + more % 4)", FEW, "makespan", "x + (p - 1) * (f + o - w) / v", "p"),
    ("interleaved_zb", "p + more % p", FEW, "makespan", "x + (p - 1) * (f + o - w) / v", "p + (v - 1) * (m - p) / v"),
    ("modulo_greedy", "1", "f, o, min(w, (p - 1) * o) or w, 0", "makespan", "p * (f + o) + w / (v if p > 1 else 1)",
     "1"),
    ("looped_bfs", "p + more", "f, o, w, 0", "makespan", "x + (p - 1) * (f + o + w) / v", "m"),
    ("modulo", "p + more", "f, o, w, 0", "makespan", "x + (p - 1) * (f + o) / v", "m"),
    ("zb_h1", "p + more", FEW, "makespan", "x + (p - 1) * (f + o - w)", "[p] * p"),
    ("zb_h2", "2 * p - 1 + more", "f, o, min(f, o, w), min(c, (f + o) // 2)", "max_span",
     "x + max(0, (p - 1) * (f + o + 2 * c - 2 * w))", "[2 * p - 1] * p"),
    ("chimera", "p", "f, max(o, 2 * f - w), w, 0", "makespan", "m * f + (2 * m - 2) * (o + w)", None),
    ("dualpipe", "2 * (p + more)", "f, f, f, 0", "makespan", "x + (p // 2 - 1) * 2 * f", "p + 1"),
    ("dualpipe_v", "2 * p + more", "f, f, f, 0", "makespan", "x + (p - 1) * f", "p + 0.5")]


@pytest.mark.few(5)
@pytest.mark.parametrize(("name", "numbers", "times", "what", "form", "peak"), FORMS, ids=[row[0] for row in FORMS])
@settings(max_examples=drawn(60))
@given(ranks, st.integers(0, 12), st.integers(1, 4), times_of, st.integers(0, 3))
def test_closed_forms(name, numbers, times, what, form, peak, p, more, v, fow, c):
    p += p % 2 if name in ("chimera", "dualpipe") else 0  # which need even numbers
    known = {"p": p, "v": v, "m": (m := eval(numbers, {"p": p, "more": more}))}
    f, o, w, c = eval(times, known | dict(zip("fowc", (*fow, c), strict=True)))
    known |= {"f": f, "o": o, "w": w, "c": c, "x": m * (f + o + w)}
    found = priced(name, p, m, f, o, w, c, None if pipelines.policy(name).chunks_fixed else v)
    assert getattr(found, what) == pytest.approx(eval(form, known))
    held = eval(peak, known) if peak else None
    assert held is None or (list(found.peak_activations) if isinstance(held, list)
                            else max(found.peak_activations)) == pytest.approx(held)
    assert name != "chimera" or max(found.peak_activations) <= m


@settings(max_examples=drawn(60))
@given(ranks, st.integers(0, 12), st.integers(1, 4), times_of)
def test_modulo_allocation_has_a_bubble_of_a_forward_at_least(p, more, v, times):
    m = p + more
    assert priced("modulo_greedy", p, m, *times, chunks=v).makespan >= m * sum(times) + (p - 1) * times[0] / v - 1e-9


@settings(max_examples=drawn(60))
@given(ranks, st.integers(0, 5), st.integers(1, 3), times_of)
def test_waves_are_never_slower_than_1f1b_up_to_p_micro_batches(p, fewer, v, times):
    m = max(1, p - fewer)
    waves, plain = priced("hanayo", p, m, *times, chunks=2 * v), priced("one_f_one_b", p, m, *times)
    assert waves.makespan <= plain.makespan + 1e-9
    assert max(waves.peak_activations) <= m + 1e-9


def test_waves_may_be_slower_than_1f1b_beyond_p_micro_batches():
    waves, plain = priced("hanayo", 4, 8, 1, 3, 3), priced("one_f_one_b", 4, 8, 1, 3, 3)
    assert waves.makespan > plain.makespan
    assert max(waves.peak_activations) > 4


@pytest.mark.few(1)
@pytest.mark.parametrize("p", [1, 2, 3, 4, 5])
def test_the_v_leaves_no_bubble_in_the_spans_at_equal_times(p):
    found = priced("zb_v", p, 2 * p + 1)
    assert found.max_span == found.period == pytest.approx(3 * (2 * p + 1))
    assert max(found.peak_activations) <= p
    assert max(priced("v_half", p, 2 * p).peak_activations) <= (p + 2) // 2
    assert max(priced("v_min", p, 2 * p).peak_activations) <= (p + 4) // 3


# ------------------------------------------------------------------------------------------------------------- stale
@given(ranks, st.integers(1, 12), times_of)
def test_pipedream_has_no_bubble_in_steady_state(p, m, times):
    found = priced("pipedream", p, m, *times)
    assert found.period == pytest.approx(sum(times))
    assert found.bubble_rate == pytest.approx(0)
    assert max(found.peak_activations) <= p
    if m >= p:
        assert priced("pipedream_2bw", p, m, *times).period == pytest.approx(m * sum(times))


@given(st.lists(st.tuples(*[st.integers(1, 9)] * 3), min_size=1, max_size=5), st.integers(0, 3))
def test_the_steady_state_is_what_a_long_run_tends_to(stages, c):
    p = len(stages)
    f, o, w = ([float(t) for t in column] for column in zip(*stages, strict=True))
    placement = pipelines.place("pipedream", p)
    cost = pipeline.costs(placement, f, o, w, float(c))
    problem = pipeline.Problem.of(placement, 400, cost)
    plan = pipelines.plan("pipedream", p, 400, cost)
    end = times(plan.graph, plan.schedule, cost)[1]
    first = end[[plan.graph.index(f"0B{i}") for i in (200, 380)]]
    assert pipedream_steady(problem) == pytest.approx((first[1] - first[0]) / 180, rel=0.02)
    assert pipedream_steady(problem) >= max(map(sum, stages)) - 1e-9
