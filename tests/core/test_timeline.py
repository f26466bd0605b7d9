"""What a timeline says of a run, against brute force and against examples worked out by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from random_plans import Plan, plans

from minidl.core.graph import GraphBuilder
from minidl.core.report import compare, critical_path, kinds, longest, usage
from minidl.core.schedule import Lane, Schedule
from minidl.core.tasks import Kind, What, parse_task
from minidl.core.timeline import Timeline
from minidl.pricing.cost import CostModel, Link
from minidl.pricing.simulation import simulate

MAIN, SUB, FAR = Lane(0), Lane(0, "sub1"), Lane(1)


def made(rows: dict[Lane, list[tuple[str, float, float]]], edges: list[tuple[str, str]] = [],  # noqa: B006
         **rest: object) -> Timeline:
    """A timeline from tasks' names and times, lane by lane."""
    flat = [(name, i, start, end) for i, row in enumerate(rows.values()) for name, start, end in row]
    names = [row[0] for row in flat]
    return Timeline.of_tasks(
        tuple(rows), [parse_task(name) for name in names], [row[1] for row in flat], [row[2] for row in flat],
        [row[3] for row in flat], edges=[(names.index(a), names.index(b)) for a, b in edges], **rest)


# A run with all there is: W waits for O, 1F0 for a transfer, 0U0 and 1W0 start later than they could.
#          0    1    2    3    4    5    6    7    8    9    10
# 0/main   0F0-------  0O0-------------      0U0--
# 0/sub1   wait............................  0W0-------
# 1/main   wait......  transfer  1F0------------  gap   1W0
EXAMPLE = made({MAIN: [("0F0", 0, 2), ("0O0", 2, 5), ("0U0", 6, 7)], SUB: [("0W0", 5, 7)],
                FAR: [("1F0", 4, 7), ("1W0", 9, 10)]},
               [("0F0", "1F0"), ("0O0", "0W0")], arrived=[4.0, 5.0], labels=("first", ""), peak_bytes=3 << 20)


def test_a_long_path_is_told_by_its_first_and_last_tasks():
    names = [f"0F{i}" for i in range(100, 220)]
    rows = [f"  {' '.join(names[i:i + 16])}" for i in range(0, 120, 16)]
    for count, told in ((120, [*rows[:2], "  …", *rows[-2:]]), (64, rows[:4])):
        lines = made({MAIN: [(name, i, i + 1) for i, name in enumerate(names[:count])]}).report().splitlines()
        at = next(i for i, line in enumerate(lines) if line.startswith("critical path"))
        assert lines[at + 1 : at + 1 + len(told) + 1] == [*told, ""]


@pytest.mark.parametrize(("number", "says"), [(1, "1 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (2**19, "512.00 KiB"),
                                              (2**20 - 1, "1024.00 KiB"), (2**20, "1.00 MiB"), (2**50, "1024.00 TiB")])
def test_sizes_of_a_report(number, says):
    assert f", peak {says}\n" in replace(EXAMPLE, peak_bytes=number).report()


def test_report_of_the_example():
    text = EXAMPLE.report()
    assert "measured: makespan 10.00 us, 6 tasks, 3 lanes, peak 3.00 MiB" in text
    assert "critical path: 3 tasks, F 50.0%, W 10.0%, transfer 20.0%, gap 20.0%\n  0F0 1F0 1W0\n" in text
    assert "0O first" in text
    row = next(line.split() for line in text.splitlines() if line.startswith("1/main"))
    assert row == ["1/main", "2", "4.00", "40.0%", "2.00", "2.00", "2.00", "1", "2.000", "0.00"]
    row = next(line.split() for line in text.splitlines() if line.startswith("all"))
    assert row[:4] == ["all", "6", "12.00", "40.0%"]


@pytest.mark.parametrize("scale", [1e-9, 1e-6, 1.0, 1e6])
def test_a_report_keeps_the_digits_of_times_in_any_unit(scale):
    small = made({MAIN: [("0F0", 0, 1.25 * scale), ("0O0", 1.25 * scale, 3.5 * scale)]}, unit="")
    lane = next(line.split() for line in small.report().splitlines() if line.startswith("0/main"))
    assert float(lane[2]) == pytest.approx(3.5 * scale)


def test_long_names_go_on_in_a_line_of_their_own():
    label = "gpt/transformer/h/0/mlp/c_proj/a_name_of_a_layer/linear"
    lines = made({MAIN: [("0F0", 0, 2)]}, labels=(label,)).report().splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("0F gpt"))
    assert lines[at].split()[1] + lines[at + 1].strip() == label
    assert max(map(len, lines)) <= 100


def test_errors_that_round_to_nothing_have_no_sign():
    near = made({MAIN: [("0F0", 0, 2.0001)]})
    assert "error 0.0%" in compare(made({MAIN: [("0F0", 0, 2)]}), near)


def test_summary_is_the_report_as_json():
    data = json.loads(json.dumps(EXAMPLE.summary()))
    assert data["makespan"] == 10
    names = ("rank", "lane", "tasks", "busy", "wait", "transfer", "gap", "gaps", "longest_gap", "idle")
    assert data["lanes"] == [dict(zip(names, row, strict=True)) for row in (
        (0, "main", 3, 6, 0, 0, 1, 1, 1, 3), (0, "sub1", 1, 2, 5, 0, 0, 0, 0, 3), (1, "main", 2, 4, 2, 2, 2, 1, 2, 0))]
    assert data["critical_path"] == {"tasks": ["0F0", "1F0", "1W0"], "time": {"F": 5, "W": 1, "transfer": 2, "gap": 2}}
    assert data["kinds"] == {"F": 5, "O": 3, "W": 3, "U": 1}


def brute_force(t: Timeline) -> list[dict[str, float]]:
    """Lane by lane, moment by moment, from the tasks and edges alone; all times must be whole numbers."""
    tasks = [r for r in range(len(t)) if t.what[r] == What.TASK]
    begin, stop = min(t.start[r] for r in tasks), max(t.end[r] for r in tasks)
    found = []
    for i, lane in enumerate(t.lanes):
        mine = [r for r in tasks if t.lane[r] == i]
        count = dict.fromkeys(("busy", "wait", "transfer", "gap", "idle"), 0.0)
        for moment in np.arange(begin, stop):
            later = [r for r in mine if t.start[r] > moment]
            if any(t.start[r] <= moment < t.end[r] for r in mine):
                count["busy"] += 1
            elif not later:
                count["idle"] += 1
            else:
                after = min(t.start[r] for r in later)
                # a task that starts then and takes no time is a task of its own, ahead of the longer ones
                first = min((r for r in later if t.start[r] == after), key=lambda r: t.end[r])
                heads = [r for r in later if t.start[r] == after and t.end[r] == t.end[first]]
                into = [(t.arrived[e], a) for e, (a, b) in enumerate(t.edges.tolist()) if b in heads]
                arrived, last = max(into, default=(-1, -1))
                far = last >= 0 and t.lanes[t.lane[last]].rank != lane.rank
                sent = t.end[last] if far else arrived
                count["wait" if moment < sent else "transfer" if moment < arrived else "gap"] += 1
        found.append(count)
    return found


@given(plans(most=20, latency=True, pairs=True))
def test_usage_agrees_with_brute_force(plan: Plan):
    whole = CostModel(plan.cost.tasks, link=Link(3.0), sync=2.0)
    timeline = simulate(plan.graph, plan.schedule, whole)
    for used, expected in zip(usage(timeline), brute_force(timeline), strict=True):
        assert used.busy == expected["busy"]
        assert used.idle == expected["idle"]
        assert used.wait + used.transfer == expected["wait"] + expected["transfer"]
        assert used.gap == expected["gap"] == 0


@given(plans(pairs=True))
def test_critical_path_fills_the_makespan(plan: Plan):
    """Without latency its tasks follow each other without a gap, along lanes and edges only."""
    timeline = plan.timeline
    path = critical_path(timeline)
    assert sum(path.time.values()) == pytest.approx(timeline.makespan)
    assert not {"gap", "transfer"} & set(path.time)
    assert timeline.durations[path.records].sum() == pytest.approx(timeline.makespan)
    edges = set(map(tuple, timeline.edges.tolist()))
    actions: list[list[int]] = []
    for r in path.records.tolist():
        same = actions and all(column[actions[-1][0]] == column[r]
                               for column in (timeline.lane, timeline.start, timeline.end))
        if same and timeline.end[r] > timeline.start[r]:
            actions[-1].append(r)
        else:
            actions.append([r])
    for one, other in pairwise(actions):
        assert timeline.end[one[0]] == timeline.start[other[0]]
        assert timeline.lane[one[0]] == timeline.lane[other[0]] or any((a, b) in edges for a in one for b in other)


@given(plans(latency=True, pairs=True))
def test_critical_path_accounts_for_latency(plan: Plan):
    timeline = plan.timeline
    path = critical_path(timeline)
    assert sum(path.time.values()) == pytest.approx(timeline.makespan)
    if len(timeline.lanes) == 1:
        assert not {"gap", "transfer"} & set(path.time)


@given(plans(latency=True, pairs=True))
def test_records_of_a_lane_overlap_only_as_one_action(plan: Plan):
    t = plan.timeline
    for lane in range(len(t.lanes)):
        here = np.flatnonzero(t.lane == lane)
        spans = sorted({(t.start[r], t.end[r], t.what[r] if t.start[r] == t.end[r] else 0) for r in here})
        for (_, end, _), (start, _, _) in pairwise(spans):
            assert end <= start


@given(plans(pairs=True))
def test_totals(plan: Plan):
    """A pair's time counts once, so kinds and lanes sum to the same."""
    t = plan.timeline
    busy = sum(u.busy for u in usage(t))
    assert sum(kinds(t).values()) == pytest.approx(busy)
    rows = longest(t, count=1000)
    assert sum(x["total"] for x in rows) == pytest.approx(busy)
    assert sum(x["tasks"] for x in rows) == len(plan.graph)
    assert [x["total"] for x in rows] == sorted((x["total"] for x in rows), reverse=True)


@given(plans(latency=True, pairs=True))
def test_reports_fit_a_hundred_columns(plan: Plan):
    t = replace(plan.timeline, labels=("a.very.long.name" * 9,) * 99, peak_bytes=1 << 41,
                lanes=tuple(Lane(lane.rank, lane.name * 9) for lane in plan.timeline.lanes))
    slower = replace(t, start=t.start * 12345, end=t.end * 12345, arrived=t.arrived * 12345, predicted=False)
    for text in (t.report(), slower.report(), compare(t, slower)):
        assert max(map(len, text.splitlines())) <= 100


def test_many_tasks_and_lanes_make_a_short_report():
    rows = {Lane(rank): [(f"{rank}F{i}", float(i), i + 1.0) for i in range(50)] for rank in range(60)}
    text = made(rows).report()
    assert "and 20 lanes more" in text
    assert len(text.splitlines()) < 70


def test_nothing_ran():
    empty = made({MAIN: []})
    assert empty.makespan == 0
    assert "0 tasks, 1 lane" in empty.report()
    assert empty.summary()["critical_path"] == {"tasks": [], "time": {}}
    assert compare(empty, empty)


def test_kinds_share_a_pair():
    pair = made({MAIN: [("0F1", 0, 4), ("1B0", 0, 4), ("1B1", 4, 7)]})
    assert kinds(pair) == {"F": 2, "B": 5}
    assert usage(pair)[0].busy == 7
    path = critical_path(pair)
    assert [pair.name(r) for r in path.records] == ["0F1", "1B0", "1B1"]
    assert path.time == {"F": 2, "B": 5}


def test_time_counts_once_where_measured_tasks_overlap():
    overlapping = made({MAIN: [("0F0", 0, 4), ("1F0", 3, 6), ("2F0", 3.5, 5)]})
    assert usage(overlapping)[0].busy == 6


def test_clocks_of_ranks_that_disagree_do_no_harm():
    """The producer seems to end after its consumer started; all still adds up."""
    t = made({MAIN: [("0F0", 0, 5), ("0O0", 5.5, 8)], FAR: [("1F0", 4, 6)]}, [("0F0", "1F0"), ("1F0", "0O0")])
    assert sum(critical_path(t).time.values()) == pytest.approx(8)
    for u in usage(t):
        assert u.busy + u.wait + u.transfer + u.gap + u.idle == pytest.approx(8)


def test_compare():
    predicted = replace(made({MAIN: [("0F0", 0, 2), ("0W0", 2, 4)], SUB: [("1F0", 0, 1)]}), predicted=True)
    measured = made({MAIN: [("0F0", 0, 2e-3), ("0W0", 3e-3, 8e-3)], FAR: [("2F0", 0, 1e-3)]}, unit="ms",
                    labels=("first",))
    lines = compare(predicted, measured).splitlines()
    assert lines[0] == "makespan: predicted 4.000, measured 8.000 us, error -50.0%"
    cells = {line.split()[0]: line.split()[1:] for line in lines if line}
    assert cells["0/main"] == ["4.000", "7.000", "-42.9%", "0.000", "0.000", "0.000", "1.000"]
    assert cells["0/sub1"][:3] == ["1.000", "-", "-"]
    assert cells["1/main"][:3] == ["-", "1.000", "-"]
    assert cells["W"] == ["2.000", "5.000", "-60.0%"]
    worst = lines.index(next(line for line in lines if line.startswith("largest errors")))
    assert lines[worst + 1].split() == ["0W0", "first", "2.000", "5.000", "-60.0%"]
    assert "only predicted: 1 task, the first 1F0" in lines
    assert "only measured: 1 task, the first 2F0" in lines


def test_units_that_cannot_be_compared():
    own = replace(EXAMPLE, unit="")
    with pytest.raises(ValueError, match="cannot compare times in an unknown unit with times in us"):
        compare(own, EXAMPLE)
    assert EXAMPLE.in_unit("s").makespan == pytest.approx(1e-5)
    assert "makespan 10.00," in own.report()
    long = replace(EXAMPLE, start=EXAMPLE.start * 2e6, end=EXAMPLE.end * 2e6, arrived=EXAMPLE.arrived * 2e6)
    assert "makespan 20.00 s" in long.report()


@given(plans(latency=True))
def test_one_rank_of_many(plan: Plan):
    t = plan.timeline
    parts = [t.of_rank(rank) for rank in (0, 1)]
    assert sum(map(len, parts)) == len(t)
    for rank, part in enumerate(parts):
        assert {part.lanes[i].rank for i in part.lane} <= {rank}
        named = {(t.name(a), t.name(b)) for a, b in t.edges if {t.lanes[t.lane[x]].rank for x in (a, b)} == {rank}}
        assert {(part.name(a), part.name(b)) for a, b in part.edges} == named


def test_simulated_transfer_and_wait_are_separate():
    builder = GraphBuilder()
    x, y = builder.buffer("x", 100), builder.buffer("y", 8)
    builder.task(0, Kind.F, writes=[x])
    builder.task(1, Kind.F, reads=[x], writes=[y])
    graph = builder.build()
    schedule = Schedule.from_names({Lane(0): ["0F0"], Lane(1): ["1F0"]})
    t = simulate(graph, schedule, CostModel(kinds={"F": 10.0}, link=Link(1.0, 50.0)))
    got = {What(t.what[r]): (t.start[r], t.end[r]) for r in np.flatnonzero(t.lane == 1)}
    assert got == {What.WAIT: (0, 10), What.TRANSFER: (10, 13), What.TASK: (13, 23)}
