"""Steps of data-parallel ranks with drawn times: against the plan's period, and against a slow simulation."""

from __future__ import annotations

import json
from collections import defaultdict

import numpy as np
import pytest
from command_line import run_json
from helpers import recorded_classifier

import minidl as ml
from minidl import models, optim
from minidl.core.graph import TaskGraph
from minidl.passes.rewrite import unroll
from minidl.plans import chosen
from minidl.plans.plan import Plan
from minidl.plans.ready import VARIES
from minidl.pricing.cost import CostModel

POLICIES = ("barrier", "buckets", "fifo", "priority", "reverse_first_k")


@pytest.fixture(scope="module")
def mlp() -> TaskGraph:
    model = models.mlp(64, 96, 32, 64, 10)
    return recorded_classifier(model, optim.SGD(model.parameters(), lr=0.1), 32, 64)


def planned(graph: TaskGraph, name: str, ranks: int = 3) -> Plan:
    machine = ml.Machine(ranks, collective=lambda sizes: sum(5.0 + size / 200.0 for size in sizes.values()))
    return ml.plan(graph, name, CostModel.analytic(), machine, order="hint")


def played(ranks: chosen.Ranks, plan: Plan, duration: np.ndarray, hint: bool) -> float:
    """A step, by asking again and again which task could start first."""
    graph, schedule = unroll(plan.graph, chosen.STEPS), plan.schedule.repeated(chosen.STEPS)
    n, sums = len(graph), ranks.sums
    lanes = [schedule.ids(graph)[a:b].tolist() for a, b in zip(schedule.ptr, schedule.ptr[1:], strict=False)]
    end, free = dict[tuple[int, int], float](), defaultdict[tuple[int, int], float](float)
    todo = {(r, i): [*tasks] for r in range(ranks.ranks) for i, tasks in enumerate(lanes)
            if r == 0 or not sums[tasks].all()}
    while any(todo.values()):
        found = []
        for (r, i), tasks in todo.items():
            waiting = [t for t in tasks if sums[t]] if hint else []
            for place, t in enumerate(waiting or tasks[:1]):
                own = range(ranks.ranks) if sums[t] else [r]
                needs = [(0 if sums[p] else q, p) for q in own for p in graph.preds[t].tolist()]
                if all(need in end for need in needs):
                    found.append((max([free[r, i], *(end[need] for need in needs)]), place, r, i, t))
        start, _, r, i, t = min(found)
        todo[r, i].remove(t)
        end[r, t] = free[r, i] = start + duration[r * n + t]
    step = ranks.own.iteration
    last = [max(e for (_, t), e in end.items() if step[t] == k) for k in range(chosen.STEPS)]
    return (last[-2] - last[0]) / (chosen.STEPS - 2)


@pytest.mark.parametrize("name", POLICIES)
def test_without_spread_a_step_takes_the_period(mlp: TaskGraph, name: str) -> None:
    plan = planned(mlp, name)
    found = chosen.draws(plan, 0.0, 1)
    assert found.own == pytest.approx(plan.period)
    assert found.fixed is None


@pytest.mark.few(2)
@pytest.mark.parametrize("name", POLICIES)
def test_drawn_steps_are_those_of_a_slow_simulation(mlp: TaskGraph, name: str) -> None:
    plan = planned(mlp, name)
    ranks = chosen.Ranks(plan)
    for seed in range(3):
        duration = ranks.drawn(0.5, seed)
        for hint in (False, True):
            assert ranks.steps(duration, hint) == pytest.approx(played(ranks, plan, duration, hint)), (seed, hint)


def test_draws_repeat_keep_the_mean_and_differ_from_rank_to_rank(mlp: TaskGraph) -> None:
    ranks = chosen.Ranks(planned(mlp, "fifo", 2))
    assert (ranks.drawn(0.3, 5) == ranks.drawn(0.3, 5)).all()
    share = np.mean([ranks.drawn(0.3, seed) / ranks.duration for seed in range(300)], axis=0).reshape(2, -1)
    assert share[:, ~ranks.sums].mean() == pytest.approx(1, abs=0.02)
    assert (share[:, ranks.sums] == 1).all()
    first, second = ranks.drawn(0.3, 0).reshape(2, -1)
    assert ((first != second) == np.isin(ranks.own.kind, VARIES)).all(), "updates do not vary"


def test_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    code, found = run_json(capsys, "simulate", "--model", "mlp", "--parallel", "data", "--ranks", "2", "--scheduler",
                           "fifo", "--costs", "analytic", "--bandwidth", "1GB", "--order", "hint", "--jitter", "0.3",
                           "--draws", "5")
    assert code == 0
    assert found["steps"]["without_spread"]["own"] == pytest.approx(found["period"], abs=1e-3)
    assert {*found["steps"]["ratio"]} == {"own", "hint"}
    assert json.dumps(found)
