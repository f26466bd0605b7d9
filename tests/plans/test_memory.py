"""The memory plan against a checker that knows nothing but the order of tasks, and of the launches within each."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from helpers import (
    cases,
    classified,
    closure,
    drawn,
    edge_pairs,
    lane_pairs,
    may_share,
    planned,
    recorded,
    recorded_classifier,
    scheduled_graphs,
)
from hypothesis import given, settings
from hypothesis import strategies as st

import minidl as ml
from minidl import models, ops, optim
from minidl.core import columns
from minidl.core.graph import Launch, Role, View
from minidl.core.schedule import Lane, Schedule
from minidl.plans.memory import ALIGNMENT, MemoryLimitError, lifetimes, plan_memory, rounded
from minidl.plans.program import lower
from minidl.runtime.checking import random_schedule


def uses_of(graph):
    """For each storage the launches that touch it, as (task, launch); a task without launches counts as one."""
    uses = [set() for _ in graph.storages]
    for t in range(len(graph)):
        own = {graph.buffer(b).storage for b in (*graph.reads[t].tolist(), *graph.writes[t].tolist())}
        launches = [{v.storage for v in launch.views} for launch in (graph.launches[t] if graph.launches else ())]
        for s in own:
            named = [i for i, storages in enumerate(launches) if s in storages]
            uses[s].update((t, i) for i in named or range(max(1, len(launches))))
    return uses


def ends_before(order, first, second):
    """Whether all launches of `first` have ended before any of `second` starts."""
    return all(order[p, q] or (p == q and i < j) for p, i in first for q, j in second)


def check(graph, schedule, plan):
    """Every two storages that share a byte are used one after the other on any run."""
    order = closure(len(graph), [*edge_pairs(graph), *lane_pairs(graph, schedule)])
    users = uses_of(graph)
    inputs, outputs = {v.storage for v in graph.inputs}, {v.storage for v in graph.outputs}
    size = [s.bytes for s in graph.storages]
    for s, spec in enumerate(graph.storages):
        if spec.role.persistent:
            assert plan.offset[s] == -1
            continue
        if not users[s] and s not in inputs | outputs:
            continue
        assert plan.offset[s] >= 0
        assert plan.offset[s] % ALIGNMENT == 0
        assert plan.offset[s] + size[s] <= plan.arena_bytes
    placed = [s for s in range(len(size)) if plan.offset[s] >= 0 and size[s] and (users[s] or s in inputs | outputs)]
    for i, a in enumerate(placed):
        for b in placed[i + 1 :]:
            if plan.offset[a] + size[a] <= plan.offset[b] or plan.offset[b] + size[b] <= plan.offset[a]:
                continue

            def gone(x, y):  # inputs are all loaded before the first task, outputs all read after the last
                return ends_before(order, users[x], users[y]) and y not in inputs and x not in outputs

            assert gone(a, b) or gone(b, a), (
                f"{graph.storages[a].name} and {graph.storages[b].name} share memory")


@st.composite
def launched_graphs(draw, **sizes):
    """A graph and a schedule of it; most tasks have launches, each of which touches some of the task's buffers."""
    graph, schedule = draw(scheduled_graphs(**sizes))
    launches = []
    for t in range(len(graph)):
        own = [View(graph.buffer(b).storage, (graph.buffer(b).bytes,), (1,), 0, "uint8")
               for b in sorted({*graph.reads[t].tolist(), *graph.writes[t].tolist()})]
        some = st.lists(st.sampled_from(own), unique=True) if own else st.just([])
        launches.append(tuple(Launch("none", tuple(draw(some)), tuple(draw(some)), tuple(draw(some)))
                              for _ in range(draw(st.integers(0, 3)))))
    return replace(graph, launches=tuple(launches)), schedule


@given(launched_graphs(tasks=12, buffers=7, lanes=4))
def test_plans_of_random_graphs_are_free_of_clashes(pair):
    graph, schedule = pair
    plan = plan_memory(graph, schedule)
    check(graph, schedule, plan)
    size = rounded(np.array([s.bytes for s in graph.storages]))
    assert plan.peak_bytes <= size.sum()
    assert plan.peak_bytes == plan.arena_bytes + plan.persistent_bytes
    # nothing packs tighter than what is in use at once somewhere
    uses = uses_of(graph)
    assert plan.arena_bytes >= max((sum(int(size[s]) for s in range(len(size)) if use in uses[s])
                                    for use in set().union(*uses)), default=0)


@given(case=cases(), lanes=st.integers(1, 4), seed=st.integers(0, 2**31))
@settings(max_examples=drawn(30))
def test_plans_of_random_networks_are_free_of_clashes(case, lanes, seed):
    graph = recorded(case)
    schedule = random_schedule(graph, lanes, np.random.default_rng(seed))
    check(graph, schedule, plan_memory(graph, schedule))


@given(launched_graphs(tasks=10, buffers=6, lanes=3))
def test_storages_may_share_exactly_when_one_is_dead_before_the_other_is_born(pair):
    graph, schedule = pair
    order = closure(len(graph), [*edge_pairs(graph), *lane_pairs(graph, schedule)])
    uses = uses_of(graph)
    share = may_share(graph, schedule)
    for a in range(len(uses)):
        for b in range(len(uses)):
            first, second = ends_before(order, uses[a], uses[b]), ends_before(order, uses[b], uses[a])
            assert share[a, b] == (a != b and (first or second)), (a, b)


@given(launched_graphs(tasks=14, buffers=10, lanes=3))
def test_storages_go_to_the_lowest_place_that_is_free_of_clashes(pair):
    """Largest first, of equal ones those with the most clashes; by lists and by compiled loops alike."""
    graph, schedule = pair
    lives, share = lifetimes(graph, schedule), may_share(graph, schedule)
    size = rounded(np.array([s.bytes for s in graph.storages]))
    kept = [s for s in lives.used.tolist() if not graph.storages[s].role.persistent]
    expected = {}
    for s in sorted(kept, key=lambda s: (-size[s], share[s].sum(), s)):
        taken = sorted((expected[t], expected[t] + int(size[t])) for t in expected if not share[s, t])
        at = 0
        for begin, end in taken:
            if begin >= at + size[s]:
                break
            at = max(at, end)
        expected[s] = at
    for longest in (0, 10**9):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(columns, "LONG", longest)
            offset = plan_memory(graph, schedule).offset
        assert {s: offset[s] for s in kept} == expected


def test_activations_alone_are_counted_too():
    model = models.mlp(60, 400, 300, 10)
    graph = recorded_classifier(model, optim.SGD(model.parameters(), 0.1), 40, 60)
    schedule = ml.schedulers.in_order(graph)
    plan, users = plan_memory(graph, schedule), uses_of(graph)
    place = {launch: n for n, launch in enumerate(
        (t, i) for t in schedule.ids(graph).tolist() for i in range(max(1, len(graph.launches[t]))))}
    outputs = {v.storage for v in graph.outputs}
    held = np.zeros(len(place), np.int64)
    for s, spec in enumerate(graph.storages):
        if spec.role == Role.ACTIVATION and users[s]:
            at = [place[launch] for launch in users[s]]
            held[min(at) : len(held) if s in outputs else max(at) + 1] += rounded(np.array([spec.bytes]))
    assert 0 < plan.activation_bytes == held.max() < plan.arena_bytes


def test_tasks_of_one_action_share_nothing_with_each_other():
    """They may run at the same time. What is dead within one of them makes room within it."""
    def launch(*storages):
        return Launch("none", tuple(View(s, (256,), (1,), 0, "uint8") for s in storages), ())

    graph = planned(("0F0", "", "a b c"), ("1F0", "", "d e f"), ("2F0", "", "g"), nbytes=256)
    graph = replace(graph, launches=((launch(0, 1), launch(1, 2)), (launch(3, 4), launch(4, 5)), (launch(6),)))
    together, in_turn = (Schedule.from_names({Lane(0): names}) for names in (["(0F0;1F0)", "2F0"],
                                                                             ["0F0", "1F0", "2F0"]))
    share = {"together": may_share(graph, together), "in turn": may_share(graph, in_turn)}
    assert plan_memory(graph, together).arena_bytes == 4 * 256
    assert plan_memory(graph, in_turn).arena_bytes == 2 * 256
    for found in share.values():
        assert found[0, 2]
        assert found[3, 5]
        assert not found[0, 1]
        assert found[:6, 6].all()
    assert share["in turn"][:3, 3:6].all()
    assert not share["together"][:3, 3:6].any()


def test_a_rank_of_a_pipeline_needs_less_than_its_stage_at_once():
    """As its memory has been planned: with what only one launch of a task leaves to another only for these two."""
    ml.seed(0)
    model = models.create("resnet20", layers=1, width=4, image_size=8)
    opt = optim.SGD(model.parameters(), 0.1)
    x, y = np.random.default_rng(0).standard_normal((4, 8, 8, 3)).astype("f"), np.arange(4)

    graph = ml.record(classified(model, opt), x, y)
    plan = ml.plan(graph, "one_f_one_b", ml.CostModel(kinds=dict.fromkeys("FOWU", 1.0)), ml.Machine(2))
    for rank in range(2):
        part = lower(*plan.with_messages, ranks=2, rank=rank).body[0]
        check(part.graph, part.schedule, part.memory)
        coarse = replace(part.graph, launches=())
        assert part.memory.arena_bytes < 0.7 * plan_memory(coarse, part.schedule).arena_bytes


def test_an_input_that_no_task_reads_takes_no_place_of_another():
    """The caller loads it like the others."""
    w = ml.Parameter(np.arange(12, dtype=np.float32).reshape(3, 4))
    x, u = np.ones((2, 4), np.float32), np.full((2, 4), 7, np.float32)
    graph = ml.record(lambda x, unused, both: (ops.linear(x, w), both), x, u, u)
    schedule = Schedule.of(graph, {Lane(0): range(len(graph))})
    check(graph, schedule, plan_memory(graph, schedule))
    expected = ops.linear(ml.array(x), w).numpy()
    for inputs in ((x, u, u), (x, -u, 2 * u)):
        y, both = ml.CheckingExecutor(graph, schedule)(*inputs)
        np.testing.assert_array_equal(y.numpy(), expected)
        np.testing.assert_array_equal(both.numpy(), inputs[2])


def test_the_limit_tells_what_is_needed():
    graph = recorded()
    schedule = Schedule.of(graph, {Lane(0): range(len(graph))})
    peak = plan_memory(graph, schedule).peak_bytes
    assert ml.plan(graph, schedule, machine=ml.Machine(memory_limit=peak)).peak_bytes == (peak,)
    with pytest.raises(MemoryLimitError, match=f"needs {peak:,} bytes .* more than the limit of {peak - 1:,}"):
        ml.plan(graph, schedule, machine=ml.Machine(memory_limit=peak - 1))


def test_one_rank_at_a_time():
    graph = planned(("0F0", "", "a"), ("1F0", "a", ""))
    with pytest.raises(ValueError, match=r"one rank at a time"):
        plan_memory(graph, Schedule.of(graph, {Lane(0): [0], Lane(1): [1]}))
