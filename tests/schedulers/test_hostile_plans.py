"""Whatever `ml.plan` is asked for, it returns a plan or raises an error of this project, soon."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pipelines
import pytest
from helpers import PATIENCE, deadline
from pipelines import POLICIES

import minidl as ml
from minidl import models, nn, optim
from minidl.core.machine import PlanError
from minidl.plans.plan import Plan
from minidl.schedulers import pipeline
from minidl.schedulers.registry import SCHEDULERS

NUMBERS = [0, 1, 2, 3, 4, 8, -1, -(10**9), 10**9, 10**30, 2**63, 1.5, 0.0, -0.5, 1e308, 1e-308, float("nan"),
           float("inf"), True, False, None, "", "x", "2", (), [1, 2], {}, np.int64(2), np.float32(1.5),
           np.zeros(3), object()]


@cache
def graph(groups: int = 1) -> Any:
    """A step of four micro-batches."""
    model = models.mlp(8, 16, 16, 16, 4)
    opt = optim.SGD(model.parameters(), 0.1)

    def step(*parts: Any) -> Any:
        for i in range(4):
            with ml.micro_batch(i, 2 * i, group=i * groups // 4):
                loss = nn.cross_entropy(model(parts[2 * i]), parts[2 * i + 1])
                loss.backward()
        opt.step()
        return loss

    return ml.record(step, *(v for _ in range(4) for v in (np.ones((2, 8), np.float32), np.zeros(2, np.int64))))


def call(draw: random.Random) -> Any:
    name = draw.choice([n for n in SCHEDULERS if n not in ("joint", "optimal")])  # these search as long as they may
    scheduler = SCHEDULERS[name]
    known = sorted(scheduler.options)
    count = min(len(known), draw.choice([0, 0, 1, 2]))
    options = {option: draw.choice(NUMBERS) for option in draw.sample(known, count)}
    if draw.random() < 0.05:
        options["unheard_of"] = draw.choice(NUMBERS)
    strange = draw.choice(["", "", "", "", "ranks", "replicas", "memory_limit", "activation_cap", "collective"])
    wanted = {"ranks": draw.choice([1, 2, 2, 4])} | ({strange: draw.choice(NUMBERS)} if strange else {})
    own = [graph(draw.choice([1, 2])), name, draw.choice([None, None, ml.CostModel.given(1, 1, 1)])]
    if draw.random() < 0.1:
        own[draw.randrange(3)] = draw.choice(NUMBERS)
    machine = ml.Machine(**wanted) if draw.random() < 0.95 else draw.choice(NUMBERS)
    return ml.plan(own[0], own[1], own[2], machine, **options)


def synthetic(draw: random.Random) -> Any:
    """The same for a pipeline of given times."""
    name = draw.choice([n for n in POLICIES if n not in ("joint", "optimal")])
    known = sorted(POLICIES[name].options)
    options = {o: draw.choice(NUMBERS) for o in draw.sample(known, min(len(known), draw.choice([0, 0, 1, 2])))}
    given: dict[str, Any] = {"ranks": draw.choice([1, 2, 2, 4]), "micro_batches": draw.choice([4, 8])}
    for strange in draw.sample(["ranks", "micro_batches", "cost", "chunks", "activation_cap", "placement",
                                "message_bytes"], draw.choice([0, 1, 1, 2])):
        given[strange] = draw.choice(NUMBERS)
    return pipelines.plan(draw.choice(NUMBERS) if draw.random() < 0.03 else name, **given, **options)


@pytest.mark.parametrize("count", [30, pytest.param(60, marks=pytest.mark.slow),
                                   pytest.param(2000, marks=pytest.mark.campaign)])
@pytest.mark.parametrize("made", [call, synthetic])
def test_a_plan_or_a_named_error(made: Callable[[random.Random], Any], count: int) -> None:
    """The first seed is `MINIDL_SEED`; running out of memory or of time is no answer, even if an error names it."""
    plans, first = 0, int(os.environ.get("MINIDL_SEED", "0"))
    for seed in range(first, first + count):
        try:
            with deadline(PATIENCE):
                plans += isinstance(made(random.Random(seed)), Plan)
        except Exception as error:
            if (not type(error).__module__.startswith("minidl") or not str(error).strip()
                    or re.search("MemoryError|still running", str(error))):
                raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}") from error
    assert plans > count // 10


@pytest.mark.parametrize("count", [10**30, 0])
def test_mini_batches_that_do_not_fit_are_named(count: int) -> None:
    with pytest.raises(ValueError, match="mini_batches"):
        ml.plan(graph(), "paci", machine=ml.Machine(2), mini_batches=count)


@pytest.mark.parametrize(("given", "says"), [
    ({"ranks": 10**9}, "ranks is 1000000000; it must be a whole number from 1 to"), ({"ranks": "2"}, "ranks is '2'"),
    ({"ranks": 2**15, "replicas": 3}, "3 replicas of 32768 ranks are more than 65536"),
    ({"collective": 3}, "collective is 3"), ({"memory_limit": "1GB"}, "memory_limit is '1GB'")])
def test_a_machine_says_what_it_must_be(given: dict[str, Any], says: str) -> None:
    with pytest.raises(PlanError, match=re.escape(says)):
        ml.Machine(**given)
    assert ml.Machine(2**15, replicas=2).size == ml.Machine(2**16).size == 2**16


@pytest.mark.parametrize(("name", "given", "says"), [
    *(("modulo", given, says) for given, says in (
        ({"chunks": 10**9}, "2,000,000,000 stages"), ({"chunks": 1.5}, "1.5 chunks per rank; at least 1 is needed"),
        ({"ranks": "x"}, "ranks is 'x'; it must be a whole number from 1"),
        ({"cost": 3}, "cost is 3; it must be a CostModel"),
        ({"activation_cap": "x"}, "activation_cap is 'x'; it must be a number, or None"),
        ({"activation_cap": -1}, "the activation cap is -1; it must be positive"),
        ({"message_bytes": -1}, "message_bytes is -1; it must be a whole number >= 0"))),
    ("pipedream_2bw", {"mini_batches": 10**9}, "too many")])
def test_a_pipeline_of_given_times_says_what_is_wrong(name: str, given: dict[str, Any], says: str) -> None:
    """A billion chunks took sixteen gigabytes before they were refused."""
    with pytest.raises((pipeline.PipelineError, PlanError), match=re.escape(says)):
        pipelines.plan(name, **{"ranks": 2, "micro_batches": 4} | given)


OWN = """
from dataclasses import replace
import minidl as ml
from minidl.plans.plan import Plan
from minidl.schedulers import in_order

def graph_changed(graph, cost, machine):
    return Plan("own", replace(graph, keys=graph.keys[:3]), in_order(graph), cost)

def cost_changed(graph, cost, machine):
    return Plan("own", graph, in_order(graph), ml.CostModel(kinds={"F": 1.0}))

def cost_emptied(graph, cost, machine):
    cost.kinds.clear()
    return in_order(graph)
"""


@pytest.mark.parametrize("name", ["graph_changed", "cost_changed"])
def test_a_plan_of_ones_own_is_refused_with_its_line(name: str, tmp_path: Path) -> None:
    """Who returns a plan could change the graph and the costs that it is proved on."""
    (tmp_path / "own.py").write_text(OWN)
    with pytest.raises(PlanError, match=rf"scheduler .*own.py:{name} returned a Plan, not a Schedule or an Ordered "
                                        rf"\(own.py, line \d+\)$"):
        ml.plan(graph(), f"{tmp_path / 'own.py'}:{name}", ml.CostModel(kinds=dict.fromkeys("FOWU", 1.0)))


def test_costs_that_a_function_empties_stay(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    cost = ml.CostModel(kinds=dict.fromkeys("FOWU", 1.0))
    made = ml.plan(graph(), f"{tmp_path / 'own.py'}:cost_emptied", cost)
    assert made.step == ml.plan(graph(), "in_order", cost).step
