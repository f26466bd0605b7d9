"""Topologies: sums against their steps played one by one; shares and links against a count over all ranks."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
from helpers import drawn, refuses
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import minidl as ml
from minidl.core.tasks import Kind
from minidl.pricing.collectives import Collective
from minidl.pricing.cost import CostError, Link
from minidl.pricing.topology import FILLS, Topology
from minidl.schedulers import pipeline

LINK = st.builds(Link, st.just(0.0) | st.floats(1e-3, 9), st.sampled_from([1.0, 7.5, 300.0]))
POWER = st.integers(0, 4).map(lambda e: 2**e)
BYTES = 1000.0


def node_of(rank: int, stage: int, ranks: int, replicas: int, of: Topology) -> int:
    """The node of a stage's rank; `rank` is the number of the replica."""
    return (rank * ranks + stage if of.fill == "pipeline" else stage * replicas + rank) // of.per_node


def exchange(pairs: list[tuple[int, int, float]], of: Topology) -> float:
    """The time of simultaneous messages (source, target, bytes); messages that leave a node share its rails."""
    leaving: Counter[int] = Counter()
    longest = 0.0
    for a, b, size in pairs:
        if a // of.per_node == b // of.per_node:
            longest = max(longest, of.inside.latency + size / of.inside.bandwidth)
        else:
            leaving[a // of.per_node] += size
    for size in leaving.values():
        longest = max(longest, of.across.latency + size / (of.across.bandwidth * of.rails))
    return longest


def played(shape: str, of: Topology) -> float:
    """The time of an all-reduce over all ranks of the topology, played step by step."""
    n, g = of.nodes * of.per_node, of.per_node
    levels = [(g, 1), (of.nodes, g)]
    steps: list[list[tuple[int, int, float]]] = []
    if shape == "ring":
        steps += [[(r, (r + 1) % n, BYTES / n) for r in range(n)]] * (2 * (n - 1))
    elif shape == "hierarchical":
        for count, stride in levels:
            share = BYTES / count / stride
            ring = [(r, r + stride if r // stride % count + 1 < count else r - stride * (count - 1), share)
                    for r in range(n)]
            steps += [ring] * (2 * (count - 1))
    else:
        for count, stride in levels:
            for e in range(round(math.log2(count))):
                size = BYTES / stride / 2 ** (e + 1)
                steps += [[(r, r ^ (stride << e), size) for r in range(n)]] * 2
    return sum(exchange(step, of) for step in steps)


@pytest.mark.parametrize("shape", ["hierarchical", "halving"])
@settings(max_examples=drawn(40))
@given(POWER, POWER, LINK, LINK, POWER)
def test_sums_take_as_long_as_their_steps(shape: str, nodes: int, size: int, inside: Link, across: Link,
                                          rails: int) -> None:
    topology = Topology(nodes, size, inside, across, rails)
    found = Collective(nodes * size, Link(), shape, topology=topology.of_sums(1, nodes * size)).time(BYTES)
    assert found == pytest.approx(played(shape, topology) if nodes * size > 1 else 0)


@settings(max_examples=drawn(40))
@given(POWER, POWER, LINK, LINK)
def test_a_ring_is_bounded_by_its_steps(nodes: int, size: int, inside: Link, across: Link) -> None:
    """The formula adds the largest latency and the lowest rate; a step meets both only if one link has both."""
    topology = Topology(nodes, size, inside, across)
    found = Collective(nodes * size, Link(), "ring", topology=topology.of_sums(1, nodes * size)).time(BYTES)
    steps = played("ring", topology)
    assert steps <= found * (1 + 1e-9)
    assert found <= 2 * steps + 1e-9
    if nodes == 1 or size == 1:
        assert found == pytest.approx(steps)


@pytest.mark.parametrize("shape", ["ring", "tree", "halving", "hierarchical"])
def test_one_level_is_the_plain_formula(shape: str) -> None:
    link, n = Link(3.0, 50.0), 16
    of = [Collective(n, link, shape), Collective(n, Link(), shape, topology=Topology(n, 1, across=link)),
          Collective(n, Link(), shape, topology=Topology(1, n, link))]
    assert len({each.time(BYTES) for each in of}) == 1
    assert Collective(1, link, shape).time(BYTES) == 0


@settings(max_examples=drawn(150))
@given(POWER, POWER, POWER, POWER, st.sampled_from(FILLS))
def test_shares_and_links_are_those_of_all_ranks_by_number(ranks: int, replicas: int, nodes: int, rails: int,
                                                           fill: str) -> None:
    assume(ranks * replicas % nodes == 0)
    of = Topology(nodes, ranks * replicas // nodes, Link(1.0, 300.0), Link(9.0, 50.0), rails, fill)
    where = {(r, s): node_of(r, s, ranks, replicas, of) for r in range(replicas) for s in range(ranks)}
    sums = of.of_sums(ranks, replicas)
    homes = [[where[r, s] for r in range(replicas)] for s in range(ranks)]
    assert {len(set(own)) for own in homes} == {sums.nodes}
    assert {count for own in homes for count in Counter(own).values()} == {sums.per_node}
    groups = Counter(node for own in homes for node in set(own))
    assert sums.across.bandwidth == pytest.approx(50.0 * rails / max(groups.values()))
    rail, inside = of.of_messages(ranks, replicas)
    for a in range(ranks):
        for b in range(ranks):
            together = {where[r, a] == where[r, b] for r in range(replicas)}
            assert together == {f"{a}->{b}" in inside or a == b}
    leaving = [Counter(where[r, s] for r in range(replicas) if s + 1 < ranks and where[r, s] != where[r, s + 1])
               for s in range(ranks)]
    most = max((count for each in leaving for count in each.values()), default=0)
    if most:
        assert rail.bandwidth == pytest.approx(50.0 * min(1, rails / most))
    elif ranks > 1:
        assert rail == of.inside


@pytest.mark.parametrize(("make", "message"), [
    (lambda: Topology(0), "nodes is 0"), (lambda: Topology(2, 0), "per_node is 0"), (lambda: Topology(2, 2, rails=0),
                                                                                     "rails is 0"),
    (lambda: Topology(2, fill="left"), "fill is 'left'; known: pipeline, replicas"),
    (lambda: Topology(2, 8).of_sums(12, 2), "nodes of 8 ranks cut a pipeline of 12 ranks in unequal pieces"),
    (lambda: Topology(2, 8, fill="replicas").of_messages(2, 12), "cut the replicas of a stage of 12 ranks"),
    (lambda: Collective(4, Link(), "parameter_server", topology=Topology(2, 2)), "take another collective")])
def test_bad_topologies_are_one_line(make: Any, message: str) -> None:
    refuses((make, message), error=CostError)


# ------------------------------------------------------------------------------------------- replicas on given times
def summed(name: str = "one_f_one_b", ranks: int = 4, **more: Any) -> pipeline.PipelinePlan:
    machine = ml.Machine(ranks, replicas=3, collective=lambda sizes: sum(sizes.values()) / 10)
    return ml.plan(pipeline.Pipeline(8, **{"gradient_bytes": 50, **more}), name, machine=machine)


def test_replicas_sum_each_stage_after_its_last_gradient() -> None:
    """On the first rank of 1F1B the last gradient ends the step, so its sum lengthens the step; others are hidden."""
    plain, plan = ml.plan(pipeline.Pipeline(8), "one_f_one_b", machine=ml.Machine(4)), summed()
    assert plan.timeline.makespan == plain.timeline.makespan + 5
    assert plan.ranks == 12
    ids = {plan.graph.name(t): t for t in range(len(plan.graph))}
    assert [plan.graph.name(t) for t in plan.graph.preds[ids["2A0"]].tolist()] == ["2B7"]
    assert [plan.graph.name(t) for t in plan.graph.preds[ids["2U0"]].tolist()] == ["2A0"]
    assert pipeline.price(plan).makespan == plan.timeline.makespan


@pytest.mark.few(3)
@pytest.mark.parametrize("name", ["gpipe", "zb_h1", "interleaved", "zb_v", "roundpipe", "looped_bfs"])
def test_sums_never_shorten_a_step_and_wait_for_a_lane(name: str) -> None:
    """The stages of a rank are summed one after the other."""
    plain = ml.plan(pipeline.Pipeline(8), name, machine=ml.Machine(4)).timeline.makespan
    plan = summed(name)
    longest = max((plan.placement.home(plan.graph.keys[plan.graph.kind == Kind.A], 8) == r).sum() for r in range(4))
    assert plain + 5 <= plan.timeline.makespan <= plain + 5 * longest
    each = summed(name, gradient_bytes=list(range(1, plan.placement.stages + 1)))
    assert {each.graph.name(t): float(each.cost.durations(each.graph)[t]) for t in range(len(each.graph))
            if each.graph.kind[t] == Kind.A} == {f"{s}A0": (s + 1) / 10 for s in range(plan.placement.stages)}


@pytest.mark.parametrize(("name", "more", "message"), [
    ("chimera", {}, "on given times replicas sum gradients of the given stages once in a step, in one direction"),
    ("pipedream", {}, "given stages once"), ("seq1f1b", {}, "given stages once"), ("joint", {}, "given stages once"),
    ("gpipe", {"gradient_bytes": 0}, "gradient_bytes must be above 0, one number or 4"),
    ("gpipe", {"gradient_bytes": [1, 2]}, "one number or 4")])
def test_what_replicas_cannot_sum_is_one_line(name: str, more: dict[str, Any], message: str) -> None:
    with pytest.raises(pipeline.PipelineError, match=message):
        summed(name, **more)
