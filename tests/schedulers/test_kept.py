"""Which activations are kept: the chain of a network, and choices over it against brute force."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import minidl as ml
from minidl import nn, ops, optim
from minidl.core.graph import TaskGraph
from minidl.core.machine import PlanError
from minidl.core.placement import Refused
from minidl.core.tasks import Kind
from minidl.plans.memory import MemoryLimitError
from minidl.schedulers.search import kept
from minidl.schedulers.search.kept import MOST, NOTHING, OUTPUT, WHOLE, Chain
from minidl.training.job import Job
from minidl.training.recorded import Recorded


@st.composite
def chains(draw: st.DrawFn) -> Chain:
    n = draw(st.integers(1, 6))

    def some(low: int, high: int) -> np.ndarray:
        return np.array(draw(st.lists(st.integers(low, high), min_size=n, max_size=n)), np.int64)

    output, more, cheap, again, less = some(0, 5), some(0, 9), some(0, 9), some(0, 9), some(0, 3)
    cheap = np.minimum(cheap, more)
    return Chain([[b] for b in range(n)], [[b] for b in range(n)], range(n), output + more, output + more - cheap,
                 output, some(0, 9), again + 0.0, np.maximum(again - less, 0) + 0.0, some(0, 2) + 0.0)


def played(of: Chain, choice: tuple[int, ...]) -> tuple[float, int] | None:
    """(time, most bytes) of a choice, moment by moment; None if a block's input is not there to compute it again."""
    n = len(of.whole)
    if any(a == NOTHING and b in (WHOLE, MOST) for a, b in pairwise([*choice, WHOLE])):
        return None
    bytes_of = {WHOLE: of.whole, MOST: of.most, OUTPUT: of.output, NOTHING: np.zeros(n, np.int64)}
    held = sum(int(bytes_of[how][b]) for b, how in enumerate(choice))
    time, b, moments = 0.0, n - 1, []
    while b >= 0:  # runs, from the last one
        first = b
        while choice[b] not in (WHOLE, MOST) and first and choice[first - 1] == NOTHING:
            first -= 1
        held -= int(bytes_of[choice[b]][b])
        time += {WHOLE: 0.0, MOST: of.little[b]}.get(choice[b], of.partly[b] + of.again[first:b].sum())
        moments += [held + of.whole[first : c + 1].sum() + of.backward[c] for c in range(b, first - 1, -1)]
        b = first - 1
    return time, int(max(moments))


@given(chains(), st.integers(0, 100))
def test_the_optimum_equals_brute_force(of: Chain, limit: int):
    fit = [found[0] for choice in product((WHOLE, MOST, OUTPUT, NOTHING), repeat=len(of.whole))
           if (found := played(of, choice)) is not None and found[1] <= limit]
    best = kept.optimal(of, limit)
    assert (best is None) == (not fit)
    if best is not None:
        time, peak = played(of, tuple(best))  # type: ignore[misc]
        assert peak <= limit
        assert time == pytest.approx(min(fit))


@given(chains(), st.integers(1, 10**9))
def test_a_rounded_limit_is_still_a_limit(of: Chain, limit: int):
    large = replace(of, **{each: getattr(of, each) * 10_007 for each in ("whole", "most", "output", "backward")})
    best = kept.optimal(large, limit)
    assert best is None or played(large, tuple(best))[1] <= limit  # type: ignore[index]


def small_gpt(layers: int) -> TaskGraph:
    """Blocks of width 128, a batch of 8 x 128 tokens."""
    return Recorded(Job(model="gpt", model_args={"preset": "small", "layers": layers}, batch_size=8)).graph


@pytest.fixture(scope="module")
def gpt() -> TaskGraph:
    return small_gpt(12)


def figures(plan: ml.Plan) -> tuple[int, int, float]:
    return plan.peak_bytes[0], plan.as_json()["activation_peak_bytes"], plan.step


def test_sqrt_of_a_gpt_needs_less_than_half_and_costs_less_than_a_third(gpt: TaskGraph):
    _, plain, time = figures(ml.plan(gpt, "in_order"))
    _, less, longer = figures(ml.plan(gpt, "in_order", recompute="sqrt"))
    assert less <= 0.45 * plain
    assert longer <= 1.35 * time


@pytest.mark.parametrize("layers", [6, pytest.param(12, marks=pytest.mark.wide)])
def test_auto_is_never_worse_than_sqrt_and_keeps_its_limit(layers: int):
    gpt = small_gpt(layers)
    whole = figures(ml.plan(gpt, "in_order"))
    peak, _, time = figures(ml.plan(gpt, "in_order", recompute="sqrt"))
    for limit in (peak, (peak + whole[0]) // 2):
        found = ml.plan(gpt, "in_order", machine=ml.Machine(memory_limit=limit), recompute="auto")
        assert found.peak_bytes[0] <= limit
        assert whole[2] <= found.step <= time
        assert f"to fit {limit:,} bytes" in found.remarks[-1]
    assert figures(ml.plan(gpt, "in_order", machine=ml.Machine(memory_limit=whole[0]), recompute="auto")) == whole


def test_cheap_activations_of_a_gpt_are_computed_again_first(gpt: TaskGraph):
    """Norms and GELU among them, products not."""
    of = kept.chain(gpt, ml.CostModel.analytic())
    names = {gpt.unit_names[u].split("/")[-1] for own in of.cheap for u in own}
    assert names >= {"layer_norm", "gelu_tanh"}
    assert not names & {"linear", "add", "embedding"}
    plain = ml.plan(gpt, "in_order")
    limit = int(plain.peak_bytes[0] - (of.whole - of.most).sum() // 2)
    found = ml.plan(gpt, "in_order", machine=ml.Machine(memory_limit=limit), recompute="auto")
    again = {t.unit for t in found.graph if t.kind == Kind.R}
    assert again <= {u for own in of.cheap for u in own}
    assert found.peak_bytes[0] <= limit


def test_the_least_that_can_be_had_is_said_and_can_be_had():
    gpt = Recorded(Job(model="gpt", model_args={"preset": "tiny", "layers": 2}, batch_size=8)).graph
    with pytest.raises(MemoryLimitError, match="the limit of 1,000 bytes: .* the least that can be had is") as told:
        ml.plan(gpt, "in_order", machine=ml.Machine(memory_limit=1000), recompute="auto")
    least = int(str(told.value).split()[-1].replace(",", ""))
    assert ml.plan(gpt, "in_order", machine=ml.Machine(memory_limit=least), recompute="auto").peak_bytes[0] <= least


@pytest.mark.parametrize(("recompute", "why"), [
    ("9999", "there is no layer '9999' to keep"), ([-1], "no layer '-1'"), ("1,", "no layer ''"), ("some", "no layer"),
    ("auto", "give one, or all or sqrt")])
def test_what_cannot_be_kept_is_refused(gpt: TaskGraph, recompute: object, why: str):
    with pytest.raises(PlanError, match=why):
        ml.plan(gpt, "in_order", recompute=recompute)  # type: ignore[arg-type]


def test_a_kept_set_by_hand_and_its_order_as_a_plan(gpt: TaskGraph):
    layers = np.unique(gpt.unit[gpt.kind == Kind.F]).tolist()
    made = ml.plan(gpt, "multi_stream", recompute=layers[10:])
    again = {t.unit for t in made.graph if t.kind == Kind.R}
    assert again
    assert again <= {*layers[:10]}
    assert figures(ml.plan(gpt, made.schedule))[:2] == figures(made)[:2]


@pytest.mark.few(2)
@pytest.mark.parametrize("model", ["resnet20", "densenet121", "rnn", "mobilenet_v3_large"])
def test_networks_of_other_shapes_are_chains_too(model: str):
    """Also one whose layers join their results in one storage, and one that loops over time."""
    small = {"preset": "tiny"} if model != "resnet20" else {}
    graph = Recorded(Job(model=model, model_args=small, batch_size=4)).graph
    of = kept.chain(graph, ml.CostModel.analytic())
    assert sum(map(len, of.units)) == len(np.unique(graph.unit[graph.kind == Kind.F]))
    plain = ml.plan(graph, "in_order").as_json()["activation_peak_bytes"]
    if len(of.units) > 8:
        assert ml.plan(graph, "in_order", recompute="sqrt").as_json()["activation_peak_bytes"] < plain


def test_a_pipeline_keeps_what_stages_send_and_its_bits_need_no_r():
    """A stage's O holds its R."""
    graph = Recorded(Job(model="gpt", model_args={"preset": "tiny", "layers": 2}, batch_size=8, micro_batches=4)).graph
    machine = ml.Machine(2)
    plain, again = (ml.plan(graph, "one_f_one_b", machine=machine, recompute=how) for how in ("none", "all"))
    assert [t.name for t in again.graph] == [t.name for t in plain.graph]
    assert max(again.peak_bytes) < max(plain.peak_bytes)
    assert again.step > plain.step
    limit = (max(again.peak_bytes) + max(plain.peak_bytes)) // 2
    auto = ml.plan(graph, "one_f_one_b", machine=ml.Machine(2, memory_limit=limit), recompute="auto")
    assert max(auto.peak_bytes) <= limit


def test_a_pipeline_that_never_drains_computes_again_with_the_exact_weights_that_it_keeps():
    graph = Recorded(Job(model="gpt", model_args={"preset": "tiny", "layers": 2}, batch_size=8, micro_batches=4)).graph
    machine = ml.Machine(2)
    plain, again = (ml.plan(graph, "pipedream_2bw", machine=machine, recompute=how) for how in ("none", "all"))
    assert all(less < more for less, more in zip(again.peak_bytes, plain.peak_bytes, strict=True))
    assert again.period > plain.period
    assert ml.plan(graph, again.schedule, machine=machine).peak_bytes == again.peak_bytes
    with pytest.raises(Refused, match="paci: stages do not keep the exact weights"):
        ml.plan(graph, "paci", machine=machine, recompute="all")


@pytest.mark.parametrize("returned", [False, True])
def test_a_statistic_between_layers_ends_no_block(returned: bool):
    """One storage crossed two boundaries, so that a block's output was larger than all that it makes."""
    ml.seed(0)
    layers = [nn.Linear(16, 16) for _ in range(6)]
    opt = optim.SGD([p for layer in layers for p in layer.parameters()], 0.1)

    def step(x: Any, y: Any) -> Any:
        found = []
        for layer in layers:
            x = nn.relu(layer(x))
            found.append(ops.mean(x.detach()))
        loss = nn.cross_entropy(x, y)
        loss.backward()
        opt.step()
        return (loss, *found) if returned else loss

    graph = ml.record(step, np.ones((64, 16), np.float32), np.zeros(64, np.int64))
    of = kept.chain(graph, ml.CostModel.analytic())
    assert (of.output <= of.whole).all()
    peak = ml.plan(graph, "in_order").peak_bytes[0]
    with pytest.raises(MemoryLimitError) as told:
        ml.plan(graph, "in_order", machine=ml.Machine(memory_limit=1), recompute="auto")
    least = told.value.least
    assert least is not None
    assert least < 0.8 * peak
    for limit in (least, (least + peak) // 2):
        found = ml.plan(graph, "in_order", machine=ml.Machine(memory_limit=limit), recompute="auto")
        assert found.peak_bytes[0] <= limit
