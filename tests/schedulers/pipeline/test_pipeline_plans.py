"""Every policy's plans are valid over a wide sweep, faults are named, notations come back as they were."""

import re
from dataclasses import replace

import numpy as np
import pipelines
import pytest
from helpers import drawn
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import minidl as ml
from minidl.core.graph import Role
from minidl.core.machine import PlanError
from minidl.core.schedule import Schedule, ScheduleError
from minidl.core.tasks import Kind, pack, task_name, unpack
from minidl.passes.messages import check_rendezvous
from minidl.pricing.cost import CostError, CostModel
from minidl.pricing.simulation import simulate, times
from minidl.schedulers import pipeline
from minidl.schedulers.pipeline import PipelineError, refine, v_shape
from minidl.schedulers.pipeline.listing import durations, list_schedule
from minidl.schedulers.pipeline.problem import Problem
from minidl.schedulers.pipeline.stages import stage_graph

SEARCHES = {"optimal", "zb_auto", "joint"}  # proved elsewhere: each takes its time
SWEPT = [name for name in sorted(pipelines.POLICIES) if name not in SEARCHES and "layerpipe" not in name
         and not (pipelines.policy(name).sliced or pipelines.policy(name).parted)]


@pytest.fixture(autouse=True)
def little_effort(monkeypatch):
    """The searches of the V schedules stop early: what is asked here holds for any of their results."""
    monkeypatch.setattr(v_shape, "EFFORT", 20_000)
    monkeypatch.setattr(refine, "EFFORT", 20_000)


@st.composite
def plans(draw):
    """A valid plan of any policy on random costs, or none where preconditions forbid the numbers drawn."""
    name = draw(st.sampled_from(SWEPT))
    p = draw(st.integers(1, 6))
    m = draw(st.sampled_from([1, 2, 3, 4, 5, 6, 8, 9, 12, 14, 16]))
    chunks = None if pipelines.policy(name).chunks_fixed else draw(st.integers(1, 4))
    placement = pipelines.place(name, p, chunks)
    each = st.lists(st.floats(0.1, 5), min_size=placement.stages, max_size=placement.stages)
    cost = pipeline.costs(placement, draw(each), draw(each), draw(each), draw(st.sampled_from([0.0, 0.3, 2.0])))
    try:
        plan = pipelines.plan(name, p, m, cost, chunks)
    except PipelineError:
        assume(False)
    return plan, cost


def test_moved_tasks_keep_the_order_of_micro_batches(monkeypatch):
    """A network adds up gradients in that order; all micro-batches take the same times, so the numbers may change."""
    problem = Problem.of(pipelines.place("zb_v", 2), 4, CostModel.given(1.0, 1.0, 1.0))
    graph, schedule = stage_graph(4, 4), v_shape.handcrafted(problem)
    keys = schedule.keys.copy()
    keys[[1, 2]] = keys[[2, 1]]
    assert [task_name(key) for key in keys[:3].tolist()] == ["0F0", "0F2", "0F1"]
    monkeypatch.setattr(refine, "EFFORT", len(graph))  # one try: what it is given
    time = durations(problem, graph)
    makespan, span, found = refine.refine(graph, replace(schedule, keys=keys), time, 0.0, 4)
    assert (found.keys == schedule.keys).all()
    direct = refine.refine(graph, schedule, time, 0.0, 4)
    assert (makespan, span) >= direct[:2]


@given(plans())
@settings(max_examples=drawn(60))
def test_every_policy_is_valid_whatever_the_costs_and_both_notations_come_back_as_they_were(found):
    plan, cost = found
    proved = pipeline.prove(plan)
    assert (proved.schedule.slots == plan.schedule.slots).all()
    price = pipeline.price(proved, cost)
    work = np.bincount(proved.schedule.lane_of_each(), cost.durations(plan.graph)[plan.schedule.ids(plan.graph)])
    assert price.makespan >= price.max_span >= work.max() - 1e-9
    for lane in range(len(plan.schedule.lanes)):  # networks add up gradients in the order of the micro-batches
        own = unpack(plan.schedule.order(lane))
        order = np.lexsort((np.arange(len(own.unit)), own.kind, own.unit))
        same = (np.diff(own.unit[order]) == 0) & (np.diff(own.kind[order]) == 0)
        assert (np.diff(own.micro_batch[order])[same] > 0).all()
    assert len(plan.schedule) == len(plan.graph)
    assert set(price.as_json()) == {"makespan", "max_span", "period", "spans", "peak_activations", "bubble_rate"}
    if plan.versions is None:
        assert work.max() - 1e-9 <= price.period <= price.makespan + 1e-9
    for schedule in (plan.schedule, proved.schedule):
        assert pipeline.read_schedule(schedule.to_csv()).to_csv() == schedule.to_csv()
        read = pipeline.read_schedule(pipeline.to_torch(schedule))  # which has no notes
        assert read.to_csv() == replace(schedule, notes={}).to_csv()
    same = pipelines.read_plan(read, plan.placement.ranks, plan.micro_batches, plan.placement.chunks)
    assert (same.placement.table == plan.placement.table).all()


@given(plans())
@settings(max_examples=drawn(25))
def test_communication_neither_deadlocks_nor_costs_time(found):
    plan, cost = found
    graph, schedule = pipeline.add_communication(plan.graph, plan.schedule)
    schedule.validate(graph)
    check_rendezvous(graph, schedule)
    talks = np.isin(graph.kind, (Kind.SF, Kind.RF, Kind.SO, Kind.RO))
    lanes = {str(lane).split("/")[1].split(">")[0].split("-")[0] for lane in schedule.lanes}
    assert talks.any() == (lanes > {"main"})
    quiet = times(plan.graph, plan.schedule, cost)[1]
    assert times(graph, schedule, cost)[1].max() == pytest.approx(quiet.max())
    crossing = schedule.lane_of_each()
    rank = np.array([lane.rank for lane in schedule.lanes])[crossing]
    of = np.empty(len(graph), int)
    of[schedule.ids(graph)] = rank
    source, target = graph.preds.ids, graph.preds.row_of_each()
    assert talks[source[of[source] != of[target]]].all()  # all that crosses is a message
    again = pipelines.read_plan(schedule, plan.placement.ranks, plan.micro_batches, plan.placement.chunks)
    assert len(again.graph) == len(graph)
    assert plan.waits == again.waits == len(schedule.waits(graph))
    assert plan.peaks == again.peaks


# ---------------------------------------------------------------------------------------------------------- bad input
@pytest.mark.parametrize(("name", "p", "m", "chunks", "says"), [
    ("interleaved", 4, 9, 2, "in 2 equal rounds cannot take 9 micro-batches; use 8 or 10$"),
    ("interleaved", 2, 5, 2, "use 4 or 6"),
    ("interleaved_zb", 4, 13, 2, "use 12 or 15"),
    ("zb_h2", 4, 6, None, "at least 2p-1 micro-batches, so 7"), ("dualpipe", 4, 6, None, "at least 2p"),
    ("dualpipe", 3, 8, None, "even"), ("dualpipe", 4, 9, None, "even"),
    ("dualpipe_v", 4, 7, None, "as many micro-batches as stages, so 8 for 4 ranks, not 7"),
    ("chimera", 3, 4, None, "even"), ("chimera", 4, 3, None, "even"), ("zb_v", 4, 8, 3, "exactly 2 chunks"),
    ("gpipe", 4, 8, 2, "exactly 1 chunk"), ("hanayo", 4, 8, 3, "even number of chunks"),
    ("gpipe", 4, 0, None, "at least 1"), ("gpipe", 0, 4, None, "ranks is 0; it must be a whole number from 1 to"),
    ("fast_forward_push", 4, 4, None, "more than p"),
    ("fast_forward_push_released", 4, 4, None, "more than p"), ("nope", 4, 4, None, "unknown"),
    ("pipedream_2bw", 4, 3, None, "at least p")])
def test_a_violated_precondition_is_one_clear_line(name, p, m, chunks, says):
    with pytest.raises((PipelineError, PlanError), match=says) as error:
        pipelines.plan(name, p, m, chunks=chunks)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("limit", [None, 100])
@pytest.mark.parametrize("choice", [{"offload": "all"}, {"recompute": "all"}, {"split": 2}])
def test_given_times_have_nothing_to_choose_beside_the_order(choice, limit):
    with pytest.raises(PlanError, match=f"^{next(iter(choice))} needs a recorded step: tasks on given times have no "):
        ml.plan(ml.Pipeline(4), "gpipe", machine=ml.Machine(2, limit), **choice)


def test_a_link_has_a_name_of_two_ranks():
    for pair in ("0>1", (0, 1), "0->-1"):
        with pytest.raises(CostError, match="does not name a link; expected two ranks, as in 0->1"):
            ml.plan(ml.Pipeline(4, links={pair: ml.Link(5.0)}), "gpipe", machine=ml.Machine(2))
    link = ml.plan(ml.Pipeline(4, links={"0->1": ml.Link(5.0)}), "gpipe", machine=ml.Machine(2))
    assert link.timeline.makespan == 20


def test_a_placement_that_is_not_there():
    with pytest.raises(PipelineError, match="^gpipe: no placement 'v'; take contiguous or .* or bidirectional$"):
        pipelines.plan(replace(pipelines.policy("gpipe"), placement="v"), 4, 8)


@pytest.mark.parametrize("name", ["gpipe", "zb_h1", "zb_v", "modulo_greedy"])
@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_times_must_be_positive_numbers(name, bad, which):
    given_times = [1.0, 1.0, 1.0]
    given_times[which] = bad
    with pytest.raises(ValueError, match="must be"):
        pipelines.plan(name, 2, 4, pipeline.costs(pipelines.place(name, 2), *given_times))


def test_a_cap_that_is_too_small_says_the_smallest():
    with pytest.raises(PipelineError, match="smallest feasible one is 1"):
        pipelines.plan("zb_v", 4, 8, activation_cap=0.5)
    with pytest.raises(ScheduleError, match=r"the cap is 3 \(this plan needs 4\)"):
        pipeline.prove(replace(pipelines.plan("one_f_one_b", 4, 8), cap=3))


def broken(edit, name="zb_h1", p=3, m=4, **numbers):
    """Reads and proves a plan after `edit` changed its list of rows."""
    rows = pipelines.plan(name, p, m).schedule.to_csv().splitlines()
    edit(rows)
    schedule = pipeline.read_schedule("\n".join(rows))
    numbers = {"ranks": p, "micro_batches": m} | numbers
    return pipelines.read_plan(schedule, **numbers)


def swap(rows, a, b):
    i, j = (next(i for i, row in enumerate(rows) if row.endswith(f",{name}")) for name in (a, b))
    rows[i], rows[j] = rows[i].rsplit(",", 1)[0] + "," + b, rows[j].rsplit(",", 1)[0] + "," + a


@pytest.mark.parametrize(("edit", "says", "marked"), [
    (lambda rows: rows.append("1,main,1W2"), "1W2 appears twice.*count twice", "[1W2]"),
    (lambda rows: rows.append("1,main,1B2"), "both 1B2 and 1O2 and 1W2.*count twice", "[1B2]"),
    (lambda rows: rows.remove("1,main,1W2"), r"1W2 \(or 1B2\) is missing", "[1F2]"),
    (lambda rows: rows.remove("1,main,1F2"), "1F2 is missing", "[1O2]"),
    (lambda rows: rows.append("1,main,1F4"),
     "1F4 is out of range: micro-batches are 0..3 .*; slices or mini-batches: check with the plan's --scheduler",
     "[1F4]"),
    (lambda rows: rows.append("1,main,3F0"), "3F0 is out of range: stages are 0..2", "[3F0]"),
    (lambda rows: rows.append("7,main,1F0"), "rank that does not exist", "[1F0]"),
    (lambda rows: rows.append("1,main,1U0"),
     "1U0 does not belong here: the tasks of one iteration are F, O, W, B", "[1U0]"),
    (lambda rows: rows.__setitem__(rows.index("1,main,1W2"), "0,main,1W2"), "on rank 0, but stage 1 lives on rank 1",
     "[1W2]"),
    (lambda rows: swap(rows, "1F0", "1O0"), "1O0 comes before 1F0", "[1O0]"),
    (lambda rows: swap(rows, "1W0", "1W1"), "1W1 runs before 1W0, but a stage adds up the weight gradients", "[1W1]"),
    (lambda rows: (swap(rows, "0F1", "0O0"), swap(rows, "0F1", "0W0")), "deadlock|before", "[0")])
def test_a_wrong_plan_shows_its_culprit(edit, says, marked):
    with pytest.raises(ScheduleError, match=says) as error:
        broken(edit)
    assert marked in error.value.grid


@pytest.mark.parametrize(("text", "says"), [
    ("0F0,0B0,(0F1;0B1)\n1F0,1B0,1F1,1B1", "0B1 needs 0F1, but they run as one action"),
    ("0F0,(0F1;0B0),0B1\n1F0,1F1,1B0,1B1", "deadlock: 1B0 waits for 1F1 waits for 0B0 waits for 1B0"),
    ("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1", "deadlock: .* waits for "),
    ("0F0,0SEND_F0,(0F1;0SEND_F1),0RECV_B0,0B0,0RECV_B1,0B1\n1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1",
     "part of a pair"),
    ("0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1,1SEND_B1\n1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1",
     "1SO1>0 is on rank 0, but stage 1 lives on rank 1")])
def test_a_pair_is_one_action_and_a_message_has_its_rank(text, says):
    with pytest.raises(ScheduleError, match=says):
        pipelines.read_plan(pipeline.read_schedule(text), 2, 2)


def test_a_second_lane_that_computes_is_refused():
    text = "rank,lane,task\n0,main,0F0\n0,main,0O0\n0,side,0W0\n"
    with pytest.raises(ScheduleError, match="rank 0 computes on the lanes main and side") as error:
        pipelines.read_plan(Schedule.from_csv(text), 1, 1)
    assert "[0W0]" in error.value.grid


@pytest.mark.parametrize("name", ["petra", "pipedream"])
def test_an_order_that_is_read_again_reads_the_same_versions(name):
    """With petra, backwards read newer ones than their forwards."""
    made = pipelines.plan(name, 3, 6)
    own, read = unpack(made.schedule.keys), made.versions.read.tolist()
    forward = {(m, u): v for k, m, u, v in zip(own.kind, own.micro_batch, own.unit, read, strict=True) if k == Kind.F}
    newer = [v != forward[m, u] for k, m, u, v in zip(own.kind, own.micro_batch, own.unit, read, strict=True)
             if k in (Kind.O, Kind.W)]
    assert any(newer) == (name == "petra")
    assert pipelines.read_plan(made.schedule, 3, 6, like=made).versions.read.tolist() == read


def test_a_pair_of_a_stale_plan_reads_what_was_there_when_it_began():
    """A forward that is paired with the backward that makes its weights."""
    made = pipelines.plan("pipedream", 1, 2)
    text = "rank,lane,task\n0,main,0F0\n0,main,{}\n0,main,0B1\n"
    pipelines.read_plan(Schedule.from_csv(text.format("0B0\n0,main,0F1")), 1, 2, like=made)
    with pytest.raises(ScheduleError, match="0F1 reads weight version 1, but then the newest one of stage 0 is 0"):
        pipelines.read_plan(Schedule.from_csv(text.format("(0B0;0F1)")), 1, 2, like=made)


def test_two_ranks_that_both_send_first_deadlock_only_under_rendezvous():
    text = ("0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n"
            "1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1")
    schedule = replace(pipeline.read_schedule(text), notes={})  # an order of one's own
    with pytest.raises(ScheduleError, match="rendezvous.*posted: 1SO0>0 waits for 0SF1>1 waits for 1SO0>0"):
        pipelines.read_plan(schedule, 2, 2)
    cured = pipelines.read_plan(pipelines.swapped(schedule, "1SO0>0", "0RF1>1"), 2, 2)
    schedule.validate(cured.graph)  # buffered sends get through


def test_receives_that_disagree_with_sends_deadlock():
    plan = pipelines.plan("one_f_one_b", 2, 4)
    graph, schedule = pipeline.add_communication(plan.graph, plan.schedule)
    wrong = pipelines.swapped(schedule, "0RF0>1", "0RF3>1")
    with pytest.raises(ScheduleError, match="rendezvous"):
        check_rendezvous(graph, wrong)


@pytest.mark.parametrize(("text", "says"), [
    ("", "header|empty"), ("0F0,0Z0", "row 1, cell 2: '0Z0' is not an action"), ("0F0\n(1F0;", "row 2, cell 1"),
    *((header + "\n0,main,0F0", "line 1: expected the header rank,lane,task") for header in (
        "Rank,Lane,Task", "rank;lane;task", "rank\tlane\ttask", ",rank,lane,task", "rank,lane,task,note",
        "task,rank,lane", "0,main,0B0")),
    ("rank,lane,task\n0,main", "line 2"), ("rank,lane,task\n0,main,F0", "line 2.*task name")])
def test_text_that_is_no_plan(text, says):
    with pytest.raises(ScheduleError, match=says):
        pipeline.read_schedule(text)


def test_a_grid_may_begin_with_bubbles():
    order = pipeline.read_schedule(",,,,,0F0,,0B0\n1F0,1B0\n")
    assert [order.names(0), order.names(1)] == [["0F0", "0B0"], ["1F0", "1B0"]]


# ------------------------------------------------------------------------------------------------------ weight versions
@pytest.mark.parametrize("name", ["pipedream", "pipedream_2bw"])
@pytest.mark.parametrize("p", [1, 2, 4])
def test_stale_plans_read_versions_that_exist(name, p):
    options = {"mini_batches": 3} if name == "pipedream_2bw" else {}
    plan = pipelines.plan(name, p, 8, **options)
    own = unpack(plan.schedule.keys)
    stage, kind, micro_batch = own.unit, own.kind, own.micro_batch
    late = micro_batch // plan.versions.every - plan.versions.read  # updates between reading weights and changing them
    steady = micro_batch >= plan.versions.every + p
    if name == "pipedream":
        assert (late[steady] == p - stage[steady] - 1).all()
    else:
        assert (late[steady] == 1).all()
    forward = np.flatnonzero(kind == Kind.F)
    for wrong, says in ((plan.versions.read[forward[-1]] + 5, "the newest one"), (-1, "the newest one")):
        of = plan.versions.read.copy()
        of[forward[-1]] = wrong
        with pytest.raises(ScheduleError, match=says):
            pipeline.prove(replace(plan, versions=replace(plan.versions, read=of)))
    of = plan.versions.read.copy()
    of[np.flatnonzero(kind == Kind.B)[-1]] -= 1
    if of.min() >= 0:
        with pytest.raises(ScheduleError, match="read version"):
            pipeline.prove(replace(plan, versions=replace(plan.versions, read=of)))


def test_versions_stand_in_the_grid():
    plan = pipelines.plan("pipedream", 2, 4)
    cost = pipeline.costs(plan.placement, 1, 1, 1)
    text = pipeline.grid(plan, simulate(plan.graph, plan.schedule, cost))
    assert "0F2v1" in text
    assert "·" in text


def test_a_long_step_is_compressed_in_its_grid():
    long = pipelines.plan("one_f_one_b", 3, 200)
    text = pipeline.grid(long, simulate(long.graph, long.schedule, pipeline.costs(long.placement, 1, 2, 1)))
    assert max(map(len, text.splitlines())) <= 110
    assert len(text.splitlines()) <= 13 * 5


# -------------------------------------------------------------------------------------------------------------- links
def test_transfers_queue_on_a_link_of_finite_bandwidth():
    plan = pipelines.plan("gpipe", 2, 4, message_bytes=100)
    fast = pipeline.costs(plan.placement, 1, 1, 1, latency=0.5, bandwidth=100)
    graph, schedule = pipeline.add_communication(plan.graph, plan.schedule)
    assert times(graph, schedule, fast)[1].max() == times(plan.graph, plan.schedule, fast)[1].max()
    slow = pipeline.costs(plan.placement, 1, 1, 1, latency=0.5, bandwidth=25)  # 4 per message: slower than any task
    _, end, _ = times(graph, schedule, slow)
    received = [end[graph.index(f"0RF{i}>1")] for i in range(4)]
    assert received == pytest.approx([1 + 4 * (i + 1) + 0.5 for i in range(4)])


@given(st.integers(1, 5), st.integers(1, 12), st.integers(0, 2**31))
@settings(max_examples=drawn(60))
def test_list_scheduling_never_idles_while_a_task_is_ready(p, m, seed):
    """Against a plain simulation of the rule, step by step."""
    rng = np.random.default_rng(seed)
    graph = pipeline.stage_graph(p, m)
    duration = rng.integers(1, 6, len(graph)).astype(float)
    priority, latency = rng.permutation(len(graph)), float(rng.integers(0, 3))
    schedule = list_schedule(graph, graph.unit, duration, priority, p, latency)
    end, free, orders = {}, [0.0] * p, [[] for _ in range(p)]
    while len(end) < len(graph):
        ready = {t: max([0.0] + [end[q] + (latency if graph.unit[q] != graph.unit[t] else 0) for q in graph.preds[t]])
                 for t in range(len(graph)) if t not in end and all(q in end for q in graph.preds[t])}
        start = min(max(free[graph.unit[t]], at) for t, at in ready.items())
        t = min((t for t, at in ready.items() if max(free[graph.unit[t]], at) <= start), key=lambda t: priority[t])
        rank = graph.unit[t]
        end[t] = free[rank] = start + duration[t]
        orders[rank].append(t)
    assert schedule.ids(graph).tolist() == [t for order in orders for t in order]


@given(st.integers(1, 4), st.integers(1, 5), st.integers(0, 2**31), st.integers(1, 2))
@settings(max_examples=drawn(40))
def test_the_graph_of_stages_has_the_edges_of_backpropagation(stages, m, seed, directions):
    m = m * directions
    fused = np.random.default_rng(seed).random((stages, m)) < 0.5
    graph = pipeline.stage_graph(stages, m, fused, directions)
    edges = {(graph.name(int(q)), graph.name(t)) for t in range(len(graph)) for q in graph.preds[t]}
    expected = set()
    for i in range(m):
        for s in range(stages):
            o, w = (f"{s}B{i}", f"{s}B{i}") if fused[s, i] else (f"{s}O{i}", f"{s}W{i}")
            expected |= {(f"{s}F{i}", o), (f"{s}F{i}", w), (o, w)}
            if s:
                expected.add((f"{s - 1}F{i}", f"{s}F{i}"))
                expected.add((o, f"{s - 1}B{i}" if fused[s - 1, i] else f"{s - 1}O{i}"))
            if i % (m // directions):
                expected.add((f"{s}B{i - 1}" if fused[s, i - 1] else f"{s}W{i - 1}", w))
    assert edges == {(a, b) for a, b in expected if a != b}
    assert len(graph) == 3 * stages * m - fused.sum()
    made = {b for t in np.flatnonzero(graph.kind == Kind.F).tolist() for b in graph.writes[t].tolist()}
    assert made == {*np.flatnonzero(graph.role_is(Role.ACTIVATION)).tolist()}
    assert (graph.find(graph.keys) == np.arange(len(graph))).all()
    assert (graph.find(pack([stages, 0, 0], [0, 0, 5], [0, m, 0])) == -1).all()


@pytest.mark.parametrize("name", ["zb_h1", "dualpipe", "pipedream"])
@pytest.mark.parametrize("width", [60, 75, 110])
def test_a_grid_never_cuts_a_name_and_keeps_to_its_width(name, width):
    plan = pipelines.plan(name, 4, 12)
    cost = pipeline.costs(plan.placement, 1, 1, 1)
    text = pipeline.grid(plan, simulate(plan.graph, plan.schedule, cost), width=width)
    rows = [line for line in text.splitlines() if re.match(r"\d/main", line)]
    shown = [part.split("v")[0] for row in rows for part in re.split(r"[ ·&]+", row[8:]) if part]
    assert sorted(shown) == sorted(map(task_name, plan.schedule.keys.tolist()))
    assert max(map(len, text.splitlines())) <= width


def test_the_ruler_of_a_long_step_is_in_milliseconds():
    plan = pipelines.plan("gpipe", 2, 2)
    cost = CostModel.given(forward=8000.0, output_grad=8000.0, weight_grad=8000.0)
    text = pipeline.grid(plan, simulate(plan.graph, plan.schedule, replace(cost, unit="us")), width=60)
    assert text.startswith("ms      0 ")
    assert "e+" not in text
