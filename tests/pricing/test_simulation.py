"""The one clock against a plain reading of its model: a simulation event by event."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from helpers import drawn, planned, scheduled_graphs
from hypothesis import given, settings
from hypothesis import strategies as st

import minidl as ml
from minidl.core import columns
from minidl.core.graph import GraphBuilder
from minidl.core.schedule import Lane, Schedule, ScheduleError
from minidl.core.tasks import COMMUNICATION, Kind, What
from minidl.pricing.corun import CoRun
from minidl.pricing.cost import CostModel, Link
from minidl.pricing.memory import Memory
from minidl.pricing.simulation import Carried, Clock, Lanes, simulate, times


# ------------------------------------------------------------------------------------------------------ event by event
def event_by_event(graph, schedule, cost, carried, iterations):
    """Start and end of each task of each iteration: whenever something happens, everything is looked at anew."""
    joined = np.zeros(len(schedule), bool) if schedule.joined is None else schedule.joined
    ids, duration = schedule.ids(graph).tolist(), cost.durations(graph) + cost.launch
    lane_of = dict(zip(ids, schedule.lane_of_each().tolist(), strict=True))
    rank = [lane.rank for lane in schedule.lanes]
    queues = []  # of each lane the actions to come: (iteration, its tasks)
    for lane in range(len(schedule.lanes)):
        actions = []
        for e in range(schedule.ptr[lane], schedule.ptr[lane + 1]):
            if joined[e]:
                actions[-1].append(ids[e])
            else:
                actions.append([ids[e]])
        queues.append([(i, action) for i in range(iterations) for action in actions])
    needs = [[(int(p), 0) for p in graph.preds[t]] for t in range(len(graph))]
    for p, t, distance in zip(carried.source.tolist(), carried.target.tolist(), carried.distance.tolist(), strict=True):
        needs[t].append((p, distance))
    started, ended = {}, {}  # by (iteration, task)
    running = {}  # lane -> [iteration, action, its part that runs, what is left of it]
    # all lanes of a rank but the first one with tasks sleep
    free = [cost.doze * any(queues[j] and rank[j] == rank[i] for j in range(i)) for i in range(len(queues))]
    idle, now = [0.0] * len(queues), 0.0

    def delay(p, t):
        if rank[lane_of[p]] != rank[lane_of[t]]:
            link = cost.links.get(f"{rank[lane_of[p]]}->{rank[lane_of[t]]}", cost.link)
            shared = set(graph.writes[p].tolist()) & set(graph.reads[t].tolist())
            moves = link.bandwidth and graph[p].kind not in COMMUNICATION
            return link.latency + (sum(graph.buffer(b).bytes for b in shared) / link.bandwidth if moves else 0.0)
        return cost.sync if lane_of[p] != lane_of[t] else 0.0

    def ready(lane):
        """When the lane's next action can start; infinite while it waits for what has not ended."""
        return max(free[lane], arrival(lane))

    def arrival(lane):
        iteration, action = queues[lane][0]
        there = 0.0
        for t in action:
            for p, distance in needs[t]:
                if iteration >= distance and not (distance == 0 and p in action):
                    there = max(there, ended.get((iteration - distance, p), np.inf) + delay(p, t))
        return there

    def fair(lane):
        """How much longer a task takes with its part of the bandwidth: who needs least is served first."""
        moving, need = cost.memory.times(graph), {}
        for j, (_, action, part, _) in running.items():
            if rank[j] == rank[lane]:
                need[j] = min(1.0, moving[action[part]] / duration[action[part]])
        total = sum(need.values())
        rest = total if total <= 1 else total / (1 + cost.memory.serial * (total - 1))
        got = {}
        for j in sorted(need, key=need.get):
            got[j] = min(need[j], rest / (len(need) - len(got)))
            rest -= got[j]
        return need[lane] / got[lane] if need[lane] else 1.0

    def slowdown(lane):
        mine = graph.name(running[lane][1][running[lane][2]])
        beside = [graph.name(other[1][other[2]]) for j, other in running.items() if j != lane and rank[j] == rank[lane]]
        if cost.memory and not cost.corun:
            return max(fair(lane), (1 + len(beside)) / (cost.cores or np.inf))
        corun = cost.corun or CoRun()
        much = 1 + sum(corun.factor(corun.groups.get(mine, ""), corun.groups.get(other, "")) - 1 for other in beside)
        return max(much, (1 + len(beside)) / (cost.cores or np.inf))

    while True:
        waiting = {lane for lane, queue in enumerate(queues) if queue and lane not in running}
        for lane in sorted(waiting):
            if ready(lane) <= now:
                iteration, action = queues[lane].pop(0)
                running[lane] = [iteration, action, 0, duration[action[0]]]
                started.update({(iteration, t): now for t in action})
                waiting.remove(lane)
        slow = {lane: slowdown(lane) for lane in running}
        coming = [ready(lane) for lane in waiting] + [now + running[lane][3] * slow[lane] for lane in running]
        then = min(coming, default=np.inf)
        if then == np.inf:
            return started, ended
        asleep = {lane for lane in waiting if ready(lane) == np.inf}
        for lane in running:
            running[lane][3] -= (then - now) / slow[lane]
        now = then
        for lane in [lane for lane in sorted(running) if running[lane][3] <= 1e-12]:
            iteration, action, part, _ = running[lane]
            if part + 1 < len(action):
                running[lane][2:] = [part + 1, duration[action[part + 1]]]
                continue
            del running[lane]
            ended.update({(iteration, t): now for t in action})
            idle[lane] = now
            gone_on = {other for other in asleep if ready(other) < np.inf}
            woken = {other for other in gone_on if rank[other] == rank[lane] and now - idle[other] >= cost.spin}
            for other in woken:  # what it waited for is there `doze` later
                free[other] = max(free[other], arrival(other) + cost.doze)
            if woken:
                free[lane] = now + cost.wake
            asleep -= gone_on


@st.composite
def scenarios(draw):
    """(graph, schedule, cost) with all that the clock knows."""
    graph, schedule = draw(scheduled_graphs(tasks=10, lanes=4, ranks=draw(st.integers(1, 2))))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    if draw(st.booleans()):
        joined = rng.random(len(schedule)) < 0.3
        joined[schedule.ptr[:-1][np.diff(schedule.ptr) > 0]] = False
        schedule = Schedule(schedule.lanes, schedule.ptr, schedule.keys, joined)
    corun, memory = None, draw(st.sampled_from([None, Memory(400.0, 500.0, 2, 0), Memory(300.0, 300.0, 3, 900)]))
    if draw(st.booleans()):
        names = [graph.name(t) for t in range(len(graph))]
        slowdown = {a: {b: 1 + 2 * rng.random() for b in "012"} for a in "012"}
        corun = CoRun({name: str(rng.integers(3)) for name in names}, slowdown)
    cost = CostModel(tasks={graph.name(t): float(rng.random() * 5) + 0.01 for t in range(len(graph))}, corun=corun,
                     memory=memory, launch=draw(st.sampled_from([0.0, 0.25])), sync=draw(st.sampled_from([0.0, 0.7])),
                     wake=draw(st.sampled_from([0.0, 0.6])), spin=draw(st.sampled_from([0.0, 2.1])),
                     doze=draw(st.sampled_from([0.0, 1.1])), cores=draw(st.sampled_from([None, 1, 2])),
                     link=Link(draw(st.sampled_from([0.0, 1.3])), draw(st.sampled_from([None, 200.0]))),
                     links=draw(st.sampled_from([{}, {"0->1": Link(0.4, 150.0)}, {"1->0": Link(2.0), "0->1": Link()}])))
    return graph, schedule, cost


@given(scenarios(), st.integers(1, 4), st.booleans())
@settings(max_examples=drawn(300))
def test_times_are_those_of_a_simulation_event_by_event(scenario, iterations, carries):
    graph, schedule, cost = scenario
    carried = Carried.of(graph) if carries else Carried()
    lanes = Lanes.of(graph, schedule)
    clock = Clock.of(graph, cost, lanes, carried)
    started, ended = event_by_event(graph, schedule, cost, carried, iterations)
    if len(ended) < iterations * len(graph):  # pairs that wait for each other
        with pytest.raises(ScheduleError, match="deadlock|run as one action"):
            clock.run(lanes)
        return
    found = list(clock.iterations(lanes, iterations))
    assert len(found) == iterations
    for i, t in enumerate(found):
        assert t.start == pytest.approx([started[i, task] for task in range(len(graph))])
        assert t.end == pytest.approx([ended[i, task] for task in range(len(graph))])
    assert clock.ends(lanes, iterations) == pytest.approx([t.end.max(initial=0) for t in found])
    timeline, (start, end, ready) = simulate(graph, schedule, cost), times(graph, schedule, cost)
    assert (ready <= start + 1e-9).all()
    assert timeline.predicted
    assert timeline.makespan == pytest.approx(end.max() - start.min())
    tasks = np.flatnonzero(timeline.what == What.TASK)
    tasks = tasks[np.argsort(graph.find(timeline.key[tasks]))]
    assert np.array_equal(timeline.start[tasks], start)
    assert np.array_equal(timeline.end[tasks], end)


@given(scenarios(), st.integers(1, 5))
@settings(max_examples=drawn(100))
def test_iterations_are_those_of_the_unrolled_graph(scenario, iterations):
    graph, schedule, cost = scenario
    schedule = Schedule(schedule.lanes, schedule.ptr, schedule.keys)
    unrolled = ml.unroll(graph, iterations)
    start, end, ready = times(unrolled, schedule.repeated(iterations).validate(unrolled), cost)
    n = len(graph)
    lanes = Lanes.of(graph, schedule)
    for i, t in enumerate(Clock.of(graph, cost, lanes, Carried.of(graph)).iterations(lanes, iterations)):
        assert t.start == pytest.approx(start[i * n : (i + 1) * n])
        assert t.end == pytest.approx(end[i * n : (i + 1) * n])
        assert t.ready == pytest.approx(ready[i * n : (i + 1) * n])


@given(scenarios())
@settings(max_examples=drawn(100))
def test_the_period_is_what_many_iterations_tend_to(scenario):
    graph, schedule, cost = scenario
    lanes = Lanes.of(graph, schedule)
    clock = Clock.of(graph, cost, lanes, Carried.of(graph))
    try:
        ends = np.array([t.end.max() for t in clock.iterations(lanes, 128)])
    except ScheduleError:
        return
    period, quiet = clock.period(lanes), clock.without_contention()
    unsteady = cost.wake or cost.doze or cost.corun or cost.cores or cost.memory
    assert period == pytest.approx((ends[-1] - ends[63]) / 64, rel=0.05 if unsteady else 0.01)
    exact = quiet.exact_period(lanes)
    assert quiet.period(lanes) == pytest.approx(exact)
    assert exact <= period * 1.02  # nothing ends earlier because it is slowed down


@given(st.data())
@settings(max_examples=drawn(60))
def test_what_a_loop_carries_is_what_its_bodies_in_a_row_say(data):
    """Also where two bodies take turns, each with a copy of its own of some buffers."""
    graph, schedule = data.draw(scheduled_graphs(tasks=8, lanes=3))
    copies = np.array([[0, data.draw(st.integers(0, 1))] for _ in range(len(graph.buffer_bytes))])
    bodies = [graph.with_copies(copies, np.full(len(graph), parity))[0] for parity in (0, 1)]
    n, builder = 5, GraphBuilder()
    for b in range(len(bodies[0].buffer_bytes)):
        builder.buffer(f"b{b}", 1)
    for i in range(n):
        for t in bodies[i % 2]:
            reads, writes = (rows[t.index] for rows in (bodies[i % 2].reads, bodies[i % 2].writes))
            builder.task(t.unit, t.kind, t.micro_batch, iteration=i, reads=reads, writes=writes)
    row, cost = builder.build(), CostModel(kinds={"F": 1.0, "O": 2.5, "W": 3.0, "U": 0.5}, sync=0.25)
    _, end, _ = times(row, schedule.repeated(n).validate(row), cost)
    lanes = Lanes.of(graph, schedule)
    for i, t in enumerate(Clock.of(bodies[0], cost, lanes, Carried.of(*bodies)).iterations(lanes, n)):
        assert t.end == pytest.approx(end[i * len(graph) : (i + 1) * len(graph)])


def test_a_task_that_waits_for_the_future_is_refused():
    with pytest.raises(ValueError, match="task 1 waits for task 0 of a later iteration"):
        Clock.of_loop([1.0, 1.0], [0], [1], [-1])


def test_schedules_that_cannot_run_are_refused():
    graph = planned(("0F0", "", "a"), ("1F0", "a", "b"), ("2F0", "b", "c"))
    cost = CostModel(kinds={"F": 1.0})
    with pytest.raises(ScheduleError, match=r"comes before|deadlock"):
        simulate(graph, Schedule.from_names({Lane(0): ["2F0", "0F0"], Lane(0, "b"): ["1F0"]}), cost)
    with pytest.raises(ScheduleError, match=r"unknown task 9F0"):
        simulate(graph, Schedule.from_names({Lane(0): ["0F0", "1F0", "2F0", "9F0"]}), cost)
    for names in (["0F0", "1F0"], ["0F0", "1F0", "2F0", "2F0"], ["0F0", "1F0", "1F0"]):
        with pytest.raises(ScheduleError, match=r"is missing|appears twice"):
            simulate(graph, Schedule.from_names({Lane(0): names}), cost)


def test_every_link_has_its_own_figures():
    """A message of 100 bytes within a machine and to another one, as a task and as a mere edge."""
    builder = GraphBuilder()
    a, b, c = (builder.buffer(name, 100) for name in "abc")
    builder.task(0, Kind.F, writes=[a])
    builder.task(0, Kind.SF, reads=[a], writes=[b], nbytes=100)
    builder.task(1, Kind.RF, reads=[b], writes=[c], nbytes=100)
    builder.task(2, Kind.F, reads=[a])
    graph = builder.build()
    schedule = Schedule.of(graph, {Lane(0): [0], Lane(0, "send->1"): [1], Lane(1, "recv<-0"): [2], Lane(2): [3]})
    cost = CostModel(kinds={"F": 1.0}, link=Link(10, 5), links={"0->1": Link(1, 50)})
    assert times(graph, schedule, cost)[0].tolist() == [0, 1, 1 + 2 + 1, 1 + 10 + 20]
    named = CostModel(kinds={"F": 1.0, "SF": 7.0}, link=Link(10, 5), links={"0->1": Link(1, 50)})
    assert times(graph, schedule, named)[0].tolist() == [0, 1, 1 + 7 + 1, 1 + 10 + 20]


def test_nothing_takes_no_time():
    graph = planned()
    timeline = simulate(graph, Schedule.of(graph, {Lane(0): []}), CostModel())
    assert timeline.makespan == 0


def test_the_compiled_way_gives_the_same(monkeypatch):
    graph = planned(("0F0", "w", "x"), ("0W0", "x", "g"), ("0U0", "g w", "w"), ("0O0", "x", "d"))
    schedule = Schedule.of(graph, {Lane(0): [0, 3], Lane(0, "sub"): [1, 2]})
    apart = Schedule((Lane(0), Lane(1)), schedule.ptr, schedule.keys)
    plain = CostModel.given(1, 2, 3, latency=0.25, bandwidth=64.0, update=0.5)
    corun = CoRun({"0O0": "a", "0W0": "b"}, {"a": {"b": 1.5}, "b": {"a": 1.25}})
    contended = CostModel(kinds=plain.kinds, sync=0.125, wake=0.5, corun=corun)
    shared = replace(contended, corun=None, memory=Memory(4.0, 5.0, cache=0))

    def played():
        return [np.stack(t) for order, cost in ((schedule, plain), (apart, plain), (schedule, contended),
                                                                  (schedule, shared))
                for lanes in [Lanes.of(graph, order)]
                for t in Clock.of(graph, cost, lanes, Carried.of(graph)).iterations(lanes, 6)]

    short = played()
    monkeypatch.setattr(columns, "LONG", 1)
    for a, b in zip(short, played(), strict=True):
        assert a.tolist() == b.tolist()


@pytest.mark.parametrize(("main", "sub", "added"), [
    (50.0, 4.0, 3.0),  # main ends last: it only wakes the other, which sleeps by then
    (50.0, 42.0, 9.0 + 0.5 - 8.0),  # main looks out for the other, which began later
    (50.0, 43.0, 9.0 + 0.5 + 9.0 - 7.0)])  # main sleeps
def test_a_step_wakes_its_lanes_and_waits_for_them(main, sub, added):
    graph = planned(("0F0", "", "a"), ("1F0", "", "b"))
    cost = CostModel(tasks={"0F0": main, "1F0": sub}, sync=0.5, spin=2.0, doze=9.0, wake=3.0, step=1.0)
    two = Schedule.of(graph, {Lane(0, "main"): [0], Lane(0, "sub"): [1]})
    assert ml.plan(graph, two, cost).step == main + added + 1.0
    one = Schedule.of(graph, {Lane(0, "main"): [0, 1], Lane(0, "sub"): []})
    assert ml.plan(graph, one, cost).step == main + sub + 1.0
