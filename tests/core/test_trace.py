"""Trace files against the rules of their readers, slice by slice."""

from __future__ import annotations

import gzip
import json
import re
import warnings
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import SMALL, recorded
from hypothesis import given
from hypothesis import strategies as st
from random_plans import Plan, plans

import minidl as ml
from minidl.core.graph import GraphBuilder
from minidl.core.schedule import Lane, Schedule
from minidl.core.tasks import COMMUNICATION, Kind, What, parse_task, unpack
from minidl.core.timeline import Timeline
from minidl.core.trace import dumps
from minidl.passes.rewrite import unroll
from minidl.pricing.cost import CostModel
from minidl.pricing.simulation import simulate


def ns(microseconds: float) -> int:
    value = microseconds * 1e3
    assert abs(value - round(value)) < 1e-3, "times are whole nanoseconds"
    return round(value)


def checked(text: str, t: Timeline) -> list[dict[str, Any]]:
    """The events of a trace, after a strict look at all of them."""
    trace = json.loads(text)
    ranks = sorted({lane.rank for lane in t.lanes})
    # HTA takes the first `"rank": N` of the file, white space included
    assert int(re.search(r'"rank":\s+(\d+)', text)[1]) == trace["distributedInfo"]["rank"]
    found = trace["traceEvents"]
    assert {e["ph"] for e in found} <= set("MXsf")
    for e in found:
        assert isinstance(e["pid"], int)
        assert isinstance(e["tid"], int)
        assert e["ph"] == "M" or e["ts"] >= 0
    at = [e["ts"] for e in found if e["ph"] != "M"]
    assert at == sorted(at)

    # one process per rank, one thread per lane (and more where its records overlap), one host thread
    named = {(e["name"], e["pid"], e["tid"]): e["args"] for e in found if e["ph"] == "M"}
    assert [named["process_name", rank + 1, 0]["name"] for rank in ranks] == [f"rank {rank}" for rank in ranks]
    threads = {tid: (pid - 1, args["name"]) for (what, pid, tid), args in named.items() if what == "thread_name"}
    for lane in t.lanes:
        assert (lane.rank, lane.name) in threads.values()

    # slices of a thread never overlap; on the host thread steps hold launches
    slices = [e for e in found if e["ph"] == "X"]
    rows: dict[int, list[tuple[int, int]]] = {}
    for e in slices:
        assert e["dur"] >= 0
        assert threads[e["tid"]][0] == e["pid"] - 1
        if e["cat"] in ("kernel", "wait", "transfer", "user_annotation"):
            rows.setdefault(e["tid"], []).append((ns(e["ts"]), ns(e["ts"]) + ns(e["dur"])))
    for spans in rows.values():
        for (_, end), (start, _) in pairwise(sorted(spans)):
            assert end <= start

    # every record is one slice, every task has one launch, no later than its start
    records = {e["args"]["record"]: e for e in slices if "record" in e["args"]}
    assert sorted(records) == list(range(len(t)))
    launches = {e["args"]["correlation"]: e for e in slices if e["cat"] == "cuda_runtime"}
    kernels = {e["args"]["correlation"]: e for e in slices if e["cat"] == "kernel"}
    assert set(kernels) == set(launches)
    assert len(kernels) == len(t.tasks)
    assert min(kernels, default=1) > 0
    for i, e in records.items():
        lane = t.lanes[t.lane[i]]
        assert e["cat"] == {What.TASK: "kernel", What.WAIT: "wait", What.TRANSFER: "transfer"}[What(t.what[i])]
        assert threads[e["tid"]][0] == lane.rank
        assert threads[e["tid"]][1].split(" (")[0] == lane.name
        assert t.name(i) in e["name"]
        assert ("stream" in e["args"]) == ("correlation" in e["args"]) == (e["cat"] == "kernel")
        if e["cat"] == "kernel":
            launch = launches[e["args"]["correlation"]]
            assert launch["name"] == "cudaLaunchKernel"
            assert threads[launch["tid"]] == (lane.rank, "host")
            assert launch["ts"] <= e["ts"]
            assert e["args"]["stream"] > 0
            assert bool(re.match("^nccl.*Kernel", e["name"])) == (Kind(unpack(int(t.key[i])).kind) in COMMUNICATION)

    # launches lie within the steps that HTA counts by
    for launch in launches.values():
        steps = [e for e in slices if e["cat"] == "user_annotation" and e["pid"] == launch["pid"]]
        assert all(re.fullmatch(r"ProfilerStep#\d+", e["name"]) for e in steps)
        # the sum of two decimal fractions is no whole number of nanoseconds: a thousandth of one is allowed for
        assert any(e["ts"] <= launch["ts"] <= e["ts"] + e["dur"] + 1e-6 for e in steps)

    # every flow has both ends, each within its task's slice
    flows = {side: {e["id"]: e for e in found if e["ph"] == side} for side in "sf"}
    assert len(flows["s"]) == len(flows["f"]) == sum(e["ph"] in "sf" for e in found) / 2 == len(t.edges)
    for number, (producer, consumer) in enumerate(t.edges.tolist(), 1):
        for side, record in (("s", producer), ("f", consumer)):
            e, inside = flows[side][number], records[record]
            assert (e["pid"], e["tid"], e["cat"]) == (inside["pid"], inside["tid"], "dependency")
            begin, end = ns(inside["ts"]), ns(inside["ts"]) + ns(inside["dur"])
            assert begin <= ns(e["ts"]) < max(end, begin + 1)
            assert found.index(e) > found.index(inside)
        assert flows["f"][number]["bp"] == "e"
    return found


@given(plans(latency=True, pairs=True), st.booleans())
def test_rules_hold_for_random_plans(plan: Plan, uneven: bool):
    """Also for times that are no whole nanoseconds, issued ahead, and transfers in the background."""
    t = plan.timeline
    if uneven:
        t = replace(t, start=t.start / 7, end=t.end / 7, issued=t.issued / 9, arrived=t.arrived / 7)
        far = len(t.tasks) // 2
        t = replace(t, **{name: np.append(getattr(t, name), value) for name, value in (
            ("what", What.TRANSFER), ("key", t.key[far]), ("lane", t.lane[far]), ("issued", 0.0), ("start", 0.0),
            ("end", t.makespan), ("bytes", 9))})
    for part in (t, *map(t.of_rank, {lane.rank for lane in t.lanes})):
        checked(dumps(part), part)


def two_steps() -> Timeline:
    builder = GraphBuilder()
    x, w = builder.buffer("x", 8), builder.buffer("w", 8)
    builder.task(0, Kind.F, reads=[w], writes=[x], nbytes=40)
    builder.task(0, Kind.A, reads=[x], writes=[x])
    builder.task(1, Kind.SF, destination=2, reads=[x])
    builder.task(0, Kind.U, reads=[x], writes=[w])
    builder.unit_names = {0: "first"}
    graph = unroll(builder.build(), 2)
    schedule = Schedule.from_names({Lane(0): ["0F0", "0U0", "0F0#1", "0U0#1"],
                                    Lane(0, "comm"): ["0A0", "1SF0>2", "0A0#1", "1SF0>2#1"]})
    cost = CostModel(kinds={"F": 3.5, "A": 2.0, "SF": 1.0, "U": 0.0}, unit="us")
    return replace(simulate(graph, schedule, cost), peak_bytes=77, meta={"device": "cpu"})


def test_what_a_trace_says():
    t = two_steps()
    by_name = {e["name"]: e for e in checked(dumps(t), t)}
    assert by_name["0F0 first"]["args"] == {"record": 0, "task": "0F0", "bytes": 40, "device": 0, "stream": 1,
                                            "correlation": 1, "queued": 0.0}
    reduce = by_name["ncclDevKernel_AllReduce 0A0 first"]
    assert (reduce["ts"], reduce["dur"]) == (3.5, 2)
    assert by_name["ncclDevKernel_SendRecv 1SF0>2"]["cat"] == "kernel"
    assert (by_name["wait 0A0"]["ts"], by_name["wait 0A0"]["dur"]) == (0, 3.5)
    steps = {name: e for name, e in by_name.items() if name.startswith("ProfilerStep")}
    assert set(steps) == {"ProfilerStep#0", "ProfilerStep#1"}
    assert steps["ProfilerStep#0"]["ts"] + steps["ProfilerStep#0"]["dur"] == steps["ProfilerStep#1"]["ts"] == 6.5


def test_units_of_their_own_are_shown_as_milliseconds():
    t = replace(two_steps(), unit="")
    assert next(e for e in checked(dumps(t), t) if e["name"] == "0F0 first")["dur"] == 3500


@given(plans(latency=True, pairs=True))
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, plan: Plan):
    t = replace(plan.timeline, peak_bytes=5, unit="ms", meta={"host": "here"})
    path = tmp_path_factory.mktemp("trace") / "t.json.gz"
    t.save(path)
    back = Timeline.load(path)
    for name in ("lanes", "labels", "peak_bytes", "predicted", "unit", "meta"):
        assert getattr(back, name) == getattr(t, name)
    for name in ("what", "key", "lane", "bytes", "edges"):
        np.testing.assert_array_equal(getattr(back, name), getattr(t, name))
    for name in ("start", "end", "issued"):
        np.testing.assert_allclose(getattr(back, name), getattr(t, name), atol=1e-6, rtol=0)
    if len(t.edges):
        np.testing.assert_allclose(back.arrived, t.arrived, atol=1e-6, rtol=0)
    back.save(path)
    assert gzip.decompress(path.read_bytes()).decode() == dumps(t)


def test_the_same_timeline_gives_the_same_file(tmp_path: Path):
    for name in ("a.json.gz", "b.json.gz"):
        two_steps().save(tmp_path / name)
    assert (tmp_path / "a.json.gz").read_bytes() == (tmp_path / "b.json.gz").read_bytes()
    two_steps().save(tmp_path / "a.json")
    assert (tmp_path / "a.json").read_bytes() == gzip.decompress((tmp_path / "a.json.gz").read_bytes())


def test_one_file_per_rank(tmp_path: Path):
    t = Timeline.of_tasks([Lane(0), Lane(1), Lane(1, "sub1")], [parse_task(n) for n in ("0F0", "1F0", "1W0")],
                          [0, 1, 2], [0, 1, 2], [1, 2, 3], edges=[(0, 1), (1, 2)])
    t.save(tmp_path / "t-{rank}.json")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["t-0.json", "t-1.json"]
    text = (tmp_path / "t-1.json").read_text()
    events = checked(text, t.of_rank(1))
    assert json.loads(text)["distributedInfo"] == {"rank": 1, "world_size": 2}
    assert sum(e["ph"] == "s" for e in events) == 1, "the flow between ranks has no other end here"


def test_nothing_ran(tmp_path: Path):
    empty = Timeline.of_tasks([Lane(0)], [], [], [], [])
    empty.save(tmp_path / "t.json")
    checked((tmp_path / "t.json").read_text(), empty)
    assert len(Timeline.load(tmp_path / "t.json")) == 0


def test_a_file_of_another_kind_is_not_written(tmp_path: Path):
    with pytest.raises(ValueError, match=r"\.json or \.json\.gz, not as .*t\.txt"):
        two_steps().save(tmp_path / "t.txt")
    with pytest.raises(OSError):
        two_steps().save(tmp_path / "nowhere" / "t.json")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[1]", b'{"minidl": {}, "traceEvents": []}', b"\x1f\x8bno", b"\xff\xfe"])
def test_files_that_are_no_traces(tmp_path: Path, content: bytes):
    path = tmp_path / "t.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"t\.json is not a trace that minidl wrote"):
        Timeline.load(path)


@pytest.mark.may_skip
def test_hta_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("hta", reason="Holistic Trace Analysis is not installed")
    monkeypatch.setenv("HTA_DISABLE_NS_ROUNDING", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from hta.trace_analysis import TraceAnalysis

        t = replace(two_steps(), unit="ms")
        t.save(tmp_path / "t-{rank}.json")
        analysis = TraceAnalysis(trace_files={0: str(tmp_path / "t-0.json")}, include_last_profiler_step=True)
        kernels, _ = analysis.get_gpu_kernel_breakdown(visualize=False)
        overlap = analysis.get_comm_comp_overlap(visualize=False)
        launches = analysis.get_cuda_kernel_launch_stats(visualize=False)[0]
        steps = analysis.get_profiler_steps()
    assert dict(zip(kernels["kernel_type"], kernels["sum"], strict=True)) == {
        "COMPUTATION": 7000, "COMMUNICATION": 6000, "COMPUTATION overlapping COMMUNICATION": 0}
    assert overlap["comp_comm_overlap_pctg"].tolist() == [0]
    assert len(launches) == len(t.tasks)
    assert [int(step) for step in steps] == [0, 1]


def test_measured_and_predicted_traces_draw_the_same_dependencies():
    """All between lanes, also those that need no event because another one implies them."""
    def drawn(t):
        return sorted((t.name(a), t.name(b)) for a, b in t.edges.tolist())

    graph = recorded()
    tasks = np.arange(len(graph))
    aside = (graph.kind == Kind.W) | (graph.kind == Kind.U)
    schedule = Schedule.of(graph, {Lane(0): tasks[~aside], Lane(0, "sub"): tasks[aside]})
    run = ml.StreamExecutor(graph, schedule, trace=True)
    run(*SMALL.batches(1)[0])
    predicted = ml.simulate(graph, schedule, ml.CostModel.analytic())
    assert drawn(run.timeline) == drawn(predicted)
    assert len(drawn(predicted)) > len(schedule.waits(graph))
