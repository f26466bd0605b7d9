"""Lower bounds hold for every order, and are met where an optimum is known."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pipelines
import pytest
from helpers import need
from hypothesis import given
from hypothesis import strategies as st

import minidl as ml
from minidl import schedulers
from minidl.core.placement import PipelineError
from minidl.schedulers.pipeline import Problem, bounds, price

TIME = st.sampled_from([0.5, 1.0, 1.5, 3.0])
POLICIES = [name for name in schedulers.names("pipeline")
            if not schedulers.find(name).staged.stale and name not in ("optimal", "joint", "seq1f1b")]


@pytest.fixture(scope="module", autouse=True)
def _little_effort():
    with pytest.MonkeyPatch.context() as patch:
        pipelines.little_effort(patch)
        yield


@given(st.sampled_from(POLICIES), st.integers(1, 4), st.integers(1, 9), TIME, TIME, TIME,
       st.sampled_from([0.0, 0.25, 2.0]))
def test_no_order_is_below_the_bounds(name, ranks, micro_batches, forward, output_grad, weight_grad, latency):
    given = ml.Pipeline(micro_batches, forward, output_grad, weight_grad, latency)
    try:
        plan = ml.plan(given, name, machine=ml.Machine(ranks))
    except PipelineError:
        return  # it does not accept these numbers
    made = price(plan)
    makespan, period = bounds(Problem.of(plan.placement, micro_batches, plan.cost, max(plan.peaks)))
    assert made.makespan >= makespan - 1e-9
    assert made.period >= period - 1e-9


@pytest.mark.parametrize(("ranks", "times"), [(4, (1.0, 1.0, 1.0)), (3, (2.0, 1.0, 1.0))])
def test_the_bounds_are_met(ranks, times):
    need("ortools")
    plan = ml.plan(ml.Pipeline(8, *times), "optimal", machine=ml.Machine(ranks))
    problem = Problem.of(plan.placement, 8, plan.cost)
    assert bounds(problem) == (plan.timeline.makespan, 8 * sum(times))
    # with a cheap backward in one task, only the work counts
    assert bounds(replace(problem, backward=np.full(ranks, 0.5)))[1] == 8 * (times[0] + 0.5)
