"""Sums between tasks cost what steps in random orders show that they do."""

from __future__ import annotations

from itertools import count
from threading import get_ident

import numpy as np
import pytest

import minidl as ml
from minidl.core.tasks import COLLECTIVE
from minidl.runtime.comm.loopback import run_ranks
from minidl.training import sums
from minidl.training.job import Job
from minidl.training.recorded import Recorded

LINK = 50.0, 1e-3
COST = ml.CostModel(kinds={"F": 10.0, "O": 10.0, "W": 10.0, "B": 20.0, "U": 5.0}, cores=1)


@pytest.mark.parametrize(("step_us", "longer"), [(5_000.0, True), (1.0, False)])
def test_sums_cost_what_a_step_in_random_order_takes_longer_but_no_less_than_alone(monkeypatch, step_us, longer):
    recorded = [Recorded(Job(model="mlp", parallel="data"), rank, 2) for rank in range(2)]
    before = [{name: p.numpy().copy() for name, p in r.model.named_parameters()} for r in recorded]
    seen = []
    made = sums.schedulers.plan
    monkeypatch.setattr(sums.schedulers, "plan", lambda *given: seen.append(made(*given)) or seen[-1])
    ticks = {}  # a rank is a thread
    monkeypatch.setattr(sums, "perf_counter",
                        lambda: next(ticks.setdefault(get_ident(), count())) * step_us * 1e-6)
    found = run_ranks(2, lambda c: sums.between_tasks(recorded[c.rank].graph, COST, LINK, c, recorded[c.rank].device))
    orders = {tuple(plan.schedule.keys.tolist()) for plan in seen}
    assert len(seen) == 2 * sums.ORDERS
    assert len(orders) == sums.ORDERS, "the ranks draw the same orders, and another one each time"
    alone = [float(p.cost.durations(p.graph)[np.isin(p.graph.kind, COLLECTIVE)].sum()) for p in seen]
    factor = float(np.median([1 + (step_us - p.step) / time for p, time in zip(seen, alone, strict=True)]))
    assert (factor > 1) == longer
    for link in found:
        assert link == pytest.approx((max(1.0, factor) * LINK[0], max(1.0, factor) * LINK[1]))
    for r, values in zip(recorded, before, strict=True):
        assert all((p.numpy() == values[name]).all() for name, p in r.model.named_parameters()), "a copy was trained"
