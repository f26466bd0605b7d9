"""Within a memory limit alone: the fastest plan over kept activations, offloaded memory and shards."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from helpers import recorded_classifier

import minidl as ml
from minidl import nn, optim
from minidl.core.graph import TaskGraph
from minidl.core.machine import PlanError
from minidl.core.tasks import Kind
from minidl.plans.memory import MemoryLimitError
from minidl.pricing.cost import Link

AUTO = {"recompute": "auto", "offload": "auto"}


def chain(layers: int = 5) -> TaskGraph:
    ml.seed(0)
    model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(layers)])
    opt = optim.Adam(model.parameters(), 0.01)
    return recorded_classifier(model, opt, 256, 16)


def cost(bandwidth: float) -> ml.CostModel:
    """Layers of some microseconds, and copies of so many bytes in one."""
    return ml.CostModel(kinds={"F": 10.0, "O": 10.0, "W": 10.0, "U": 1.0}, far=Link(1.0, bandwidth))


@pytest.mark.few(1)
@pytest.mark.parametrize(("bandwidth", "chosen"), [
    (1e5, {Kind.D}), (50.0, {Kind.R}), pytest.param(1500.0, {Kind.D}, marks=pytest.mark.slow)])
def test_the_fastest_of_what_fits_is_chosen(bandwidth: float, chosen: set[Kind]):
    graph, costs = chain(), cost(bandwidth)
    whole = ml.plan(graph, "in_order", costs)
    limit = whole.peak_bytes[0] * 8 // 10
    machine = ml.Machine(memory_limit=limit)
    found = ml.plan(graph, "in_order", costs, machine, **AUTO)
    assert found.peak_bytes[0] <= limit
    assert {t.kind for t in found.graph} & {Kind.R, Kind.D} == chosen
    others = [ml.plan(graph, "in_order", costs, machine, recompute=again, offload=away) for again, away in (
        ("auto", "none"), ("none", "all"))]
    assert found.step <= min(plan.step for plan in others) * (1 + 1e-9)
    name = "recompute" if chosen == {Kind.R} else "offload"
    assert re.search(rf"of what fits {limit:,} bytes in place of {whole.peak_bytes[0]:,}, {name} is the fastest "
                     rf"predicted: {name} \+", found.remarks[-1])
    roomy = ml.Machine(memory_limit=whole.peak_bytes[0])
    assert ml.plan(graph, "in_order", costs, roomy, **AUTO).remarks == ()


def test_below_the_least_nothing_fits_and_the_least_can_be_had():
    graph, costs = chain(), cost(1e3)
    with pytest.raises(MemoryLimitError, match=r"the least that can be had is [\d,]+$") as error:
        ml.plan(graph, "in_order", costs, ml.Machine(memory_limit=1000), **AUTO)
    least = error.value.least
    assert least is not None
    found = ml.plan(graph, "in_order", costs, ml.Machine(memory_limit=least), **AUTO)
    assert found.peak_bytes[0] <= least
    alone = (ml.plan(graph, "in_order", costs, recompute=again, offload=away).peak_bytes[0]
             for again, away in (("all", "none"), ("none", "all"), ("sqrt", "all")))
    assert least <= min(alone)


@pytest.mark.parametrize(("policy", "machine"), [
    ("barrier", ml.Machine(4, collective=lambda sizes: 5.0)),
    pytest.param("gpipe", ml.Machine(2, collective=lambda sizes: 5.0, replicas=4), marks=pytest.mark.slow)])
def test_ranks_that_are_alike_share_out_if_nothing_else_fits_and_nobody_has_said_a_level(policy: str,
                                                                                          machine: ml.Machine):
    graph, costs = chain(4), cost(1e3)
    least = min(max(ml.plan(graph, policy, costs, machine, recompute=again, offload="all").peak_bytes)
                for again in ("none", "sqrt", "all"))
    limit = replace(machine, memory_limit=least - 1)
    found = ml.plan(graph, policy, costs, limit, **AUTO)
    assert "shards" in found.schedule.notes
    assert max(found.peak_bytes) < least
    assert ", shard " in found.remarks[-1]
    with pytest.raises(MemoryLimitError):
        ml.plan(graph, "fifo", costs, ml.Machine(2, 1000), **AUTO)


@pytest.mark.slow
def test_no_plan_that_can_be_asked_for_needs_less_than_the_least():
    """Of two ranks that offload everything, those without shards need less: they have no places for others' parts."""
    graph, costs, machine = chain(3), cost(1e3), ml.Machine(2, collective=lambda sizes: 5.0)
    with pytest.raises(MemoryLimitError) as error:
        ml.plan(graph, "barrier", costs, replace(machine, memory_limit=1), **AUTO)
    plans = [ml.plan(graph, "barrier", costs, machine, recompute=again, offload="all", shard=shard)
             for again in ("none", "all", "sqrt") for shard in range(4)]
    assert error.value.least == min(max(plan.peak_bytes) for plan in plans)
    assert "shards" not in min(plans, key=lambda plan: max(plan.peak_bytes)).schedule.notes


@pytest.mark.parametrize(("policy", "machine"), [
    ("barrier", ml.Machine(2, collective=lambda sizes: 5.0)),
    pytest.param("gpipe", ml.Machine(2, collective=lambda sizes: 5.0, replicas=4), marks=pytest.mark.slow)])
def test_ranks_share_out_as_told_whatever_the_limit(policy: str, machine: ml.Machine):
    """The level that is said was left out once a limit was said too, and no plan had shards."""
    graph, costs = chain(2), cost(1e3)
    for shard in (1, "3,prefetch=0,keep=none"):
        free = ml.plan(graph, policy, costs, machine, shard=shard)
        for limit in (peak := max(free.peak_bytes), peak - 1):
            found = ml.plan(graph, policy, costs, replace(machine, memory_limit=limit), shard=shard, **AUTO)
            assert found.schedule.notes["shards"] == str(shard)
            assert max(found.peak_bytes) <= limit
        with pytest.raises(MemoryLimitError) as error:
            ml.plan(graph, policy, costs, replace(machine, memory_limit=1), shard=shard, **AUTO)
        least = replace(machine, memory_limit=error.value.least)
        assert ml.plan(graph, policy, costs, least, shard=shard, **AUTO).limit


def test_the_choice_is_refused_without_a_limit():
    with pytest.raises(PlanError, match="within a memory limit"):
        ml.plan(chain(2), "in_order", **AUTO)
    with pytest.raises(PlanError, match="offload auto goes with recompute auto"):
        ml.plan(chain(2), "in_order", machine=ml.Machine(memory_limit=1000), offload="auto")
