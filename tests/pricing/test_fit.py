"""Contention beyond measured pairs: what groups need of a device, and one number that is fitted to a schedule."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from helpers import recorded_classifier
from hypothesis import given
from hypothesis import strategies as st

import minidl as ml
from minidl import models, optim, schedulers
from minidl.plans.program import lower
from minidl.pricing.corun import CoRun
from minidl.pricing.cost import CostError, CostModel
from minidl.pricing.fit import MOST, fitted
from minidl.schedulers.single import beside

SHARES = st.floats(0, 1)


@pytest.fixture(scope="module")
def step():
    """A graph, the costs of its tasks, and groups: the chain's and the weight gradients'."""
    model = models.mlp(64, *[24] * 7, 10)
    graph = recorded_classifier(model, optim.SGD(model.parameters(), lr=0.1), 4, 64)
    cost = CostModel(kinds={"F": 10.0, "O": 12.0, "W": 11.0, "U": 2.0})
    return graph, cost, schedulers.profile_groups(graph, cost)


@given(a=st.tuples(SHARES, SHARES), b=st.tuples(SHARES, SHARES), strength=st.floats(0, 4), known=st.floats(1, 3))
def test_a_pair_slows_by_what_both_need_unless_it_was_measured(a, b, strength, known):
    corun = CoRun({}, {"a": {"c": known}}, needs={"a": a, "b": b}, strength=strength)
    both = max(1.0, a[0] + b[0], a[1] + b[1])
    assert corun.factor("a", "b") == corun.factor("b", "a") == pytest.approx(1 + strength * (both - 1))
    assert corun.factor("a", "c") == pytest.approx(1 + strength * (known - 1))
    assert corun.factor("c", "a") == corun.factor("a", "no group") == 1
    assert replace(corun, strength=1.0).factor("a", "b") == both


@pytest.mark.parametrize("wrong", [{"needs": {"a": (0.5,)}}, {"needs": {"a": (0.5, 1.5)}}, {"needs": {"a": (0, "1")}},
                                   {"needs": {"a": 1}}, {"strength": -1.0}, {"strength": float("nan")}])
def test_needs_and_strength_are_checked(wrong):
    with pytest.raises(ValueError, match="needs|need of the device|strength"):
        CoRun(**wrong)


@pytest.mark.parametrize("machines", [3, pytest.param(6, marks=pytest.mark.slow)])
def test_one_step_of_another_order_predicts_machines_whose_pairs_are_all_off(step, machines):
    """The fit to multi_stream brings predictions of multi_region to a third of their errors on made-up machines."""
    graph, cost, (groups, pairs) = step
    rng, errors = np.random.default_rng(0), []

    def makespan(run, costs):
        return ml.simulate(run.graph, run.schedule, costs).makespan

    for _ in range(machines):
        needs = {name: tuple(rng.uniform(0.4, 1.0, 2)) for name in dict.fromkeys(groups.values())}
        known = replace(cost, corun=CoRun(groups, {}, needs=needs))
        strength, true = rng.choice([0.2, 0.5, 1.6, 2.5]), dict[str, dict[str, float]]()
        for a, b in pairs:
            for one, other in ((a, b), (b, a)):
                much = (known.corun.factor(one, other) - 1) * strength * rng.uniform(0.8, 1.2)
                true.setdefault(one, {})[other] = 1 + much
        machine = replace(cost, corun=CoRun(groups, true))
        first, wanted = (lower(graph, s) for s in (beside(graph, known), schedulers.multi_region(graph, known)))
        told = fitted(first.graph, first.schedule, known, makespan(first, machine))
        assert makespan(first, told) == pytest.approx(makespan(first, machine), rel=0.01)
        errors.append([abs(makespan(wanted, costs) / makespan(wanted, machine) - 1) for costs in (known, told)])
    before, after = np.transpose(errors)
    assert np.median(after) <= np.median(before) / 3
    assert after.max() <= 0.1 < before.max()


def test_a_schedule_without_contention_tells_nothing_about_it(step):
    """Any strength would do: a wrong one would be the prediction's of the next schedule."""
    graph, cost, (groups, _) = step
    known = replace(cost, corun=CoRun(groups, {}, needs=dict.fromkeys(groups.values(), (1.0, 1.0)), strength=1.5))
    one = schedulers.in_order(graph)
    for makespan in (0.5, 2.0):
        told = fitted(graph, one, known, makespan * ml.simulate(graph, one, known).makespan)
        assert told.corun.strength == 1.5
    for corun in (CoRun(groups), CoRun({}, {"a": {"b": 2.0}}), replace(known.corun, needs={})):
        assert fitted(graph, beside(graph, known), replace(cost, corun=corun), 1e9).corun == corun


def test_strengths_have_ends_and_costs_need_pairs(step):
    graph, cost, (groups, _) = step
    known = replace(cost, corun=CoRun(groups, {}, needs=dict.fromkeys(groups.values(), (1.0, 1.0))))
    schedule = beside(graph, known)
    assert fitted(graph, schedule, known, 1e-3).corun.strength == pytest.approx(0, abs=1e-6)
    assert fitted(graph, schedule, known, 1e9).corun.strength == pytest.approx(MOST)
    with pytest.raises(CostError, match="these costs know no pairs of tasks"):
        fitted(graph, schedule, cost, 100.0)
    for wrong in (0, -1.0, float("nan"), None):
        with pytest.raises(CostError, match="the measured time of the step is"):
            fitted(graph, schedule, known, wrong)
