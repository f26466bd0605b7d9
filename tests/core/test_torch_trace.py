"""Traces of PyTorch, JAX, VizTracer and py-spy as timelines, in every form of the format; and `minidl report`."""

from __future__ import annotations

import gzip
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from helpers import need

import minidl as ml
from minidl.cli import main
from minidl.core.draw import timeline_svg
from minidl.core.report import critical_path, usage
from minidl.core.tasks import What
from minidl.core.torch_trace import load_torch


def call(name: str, ts: Any, dur: Any, correlation: int | None = None, cat: str = "cpu_op") -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": 5, "ts": ts, "dur": dur,
            "args": {} if correlation is None else {"correlation": correlation}}


def kernel(name: str, ts: Any, dur: Any, correlation: int, stream: int = 7, cat: str = "kernel") -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "pid": 0, "tid": stream, "ts": ts, "dur": dur,
            "args": {"correlation": correlation, "stream": stream, "device": 0}}


STEP = [
    call("aten::linear", 0, 10), call("aten::addmm", 1, 8), call("cudaLaunchKernel", 4, 2, 1, "cuda_runtime"),
    kernel("gemm", 8, 20, 1),
    call("cudaGraphLaunch", 12, 3, 2, "cuda_runtime"), kernel("in_graph", 30, 10, 2), kernel("in_graph", 41, 5, 2, 8),
    call("cudaStreamSynchronize", 20, 30, 3, "cuda_runtime"), call("aten::item", 52, 3),
    {"ph": "X", "cat": "python_function", "name": "f", "pid": 1, "tid": 5, "ts": 0, "dur": 60},
    {"ph": "M", "name": "process_name"}]


def written(path: Path, events: Any, **more: Any) -> str:
    path.write_text(json.dumps({"traceEvents": events, **more}))
    return str(path)


def of_ranks(folder: Path, *every: Any, **more: Any) -> list[str]:
    """A file of each rank's events."""
    return [written(folder / f"{rank}.json", events, distributedInfo={"rank": rank}, **more)
            for rank, events in enumerate(every)]


def test_kernels_depend_on_their_launches_also_of_graphs(tmp_path):
    t = load_torch([written(tmp_path / "a.json", STEP)])
    assert [str(lane) for lane in t.lanes] == ["0/device 0 stream 7", "0/device 0 stream 8", "0/thread 5"]
    names = {t.labels[int(i)] for i in range(len(t.labels))}
    assert names == {"aten::linear", "gemm", "cudaGraphLaunch", "in_graph", "aten::item"}  # the outermost calls
    assert t.makespan == 55
    path = [t.label(r).split()[1] for r in critical_path(t).records.tolist()]
    assert path == ["aten::linear", "cudaGraphLaunch", "in_graph", "aten::item"]
    busy = {u.lane.name: u.busy for u in usage(t)}
    assert busy == {"device 0 stream 7": 30.0, "device 0 stream 8": 5.0, "thread 5": 16.0}


def test_a_collective_begins_when_the_last_rank_has_come(tmp_path):
    every = [[kernel("gemm", rank, work - rank, 1), kernel("ncclDevKernel_AllReduce", work, 60 - work, 2, 9)]
             for rank, work in enumerate((10.0, 50.0))]
    t = load_torch(of_ranks(tmp_path, *every, baseTimeNanoseconds=1000))
    sums = [r for r in t.tasks.tolist() if "nccl" in t.label(r)]
    assert [(t.lanes[t.lane[r]].rank, float(t.start[r]), float(t.end[r])) for r in sums] == [(0, 50, 60), (1, 50, 60)]
    products = [r for r in t.tasks.tolist() if t.label(r).endswith("gemm")]
    assert [(float(t.start[r]), float(t.end[r])) for r in products] == [(0, 10), (1, 50)], "no rank waits for another"
    waits = [r for r in range(len(t)) if t.what[r] != What.TASK and t.lanes[t.lane[r]].rank == 0]
    assert sum(float(t.end[r] - t.start[r]) for r in waits) == 50


def test_report_shows_and_compares_traces(tmp_path, capsys):
    torchs = written(tmp_path / "a.json", STEP)
    plan = ml.plan(ml.Pipeline(4), "zb_h1", machine=ml.Machine(2))
    ours = str(tmp_path / "ours.json")
    plan.timeline.save(ours)
    assert main(["report", ours, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["makespan"] == pytest.approx(plan.timeline.makespan)
    faster = written(tmp_path / "b.json", [call("aten::zeros", -3, 1), {**STEP[0], "dur": 9}, *STEP[1:-3],
                                           {**call("bad", 1, 1), "dur": -1}, call("aten::item", 51, 3)])
    assert main(["report", torchs, "--against", faster, "--html", str(tmp_path / "r.html")]) == 0
    out = capsys.readouterr().out
    assert "critical path" in out
    assert "makespan 55" in out
    worst, _, only = out.split("largest errors")[1].partition("only second: 1 task")
    assert only
    assert "aten::linear" in worst, "units are compared by their names"
    assert "+11.1%" in worst
    page = (tmp_path / "r.html").read_text()
    assert page.count("<svg") == 1
    assert "aten::linear" in page
    assert "1 event without a valid time" in page
    assert "all tasks are F" in page


def test_what_a_call_or_kernel_takes_is_exact_to_the_nanosecond(tmp_path):
    base = {"baseTimeNanoseconds": 1790857026000000000}
    five = [kernel("k", f"50017340821{37 + 2 * i}.599", "1.031", i) for i in range(5)]
    nested = [call("aten::outer", 5001734082137.599, 1.031), call("aten::inner", 5001734082138.125, 0.505)]
    t = load_torch([written(tmp_path / "a.json", [*five, *nested], **base)])
    assert {u.lane.name: round(u.busy, 6) for u in usage(t)} == {"device 0 stream 7": 5.155, "thread 5": 1.031}
    assert "aten::inner" not in t.labels, "it ends with the call that made it"
    # a far base, of which the smallest is taken from all
    late = written(tmp_path / "b.json", five, baseTimeNanoseconds="1790857026000000001", distributedInfo={"rank": 1})
    first = written(tmp_path / "c.json", five, **base, distributedInfo={"rank": 0})
    t = load_torch([late, first])
    assert [round(float(t.start[t.rank_of_each == rank].min()), 6) for rank in (0, 1)] == [0, 0.001]


def in_pairs(events: Any) -> list[Any]:
    """The same events as B and E, in the order of their times."""
    found = []
    for e in events:
        if e["ph"] == "X":
            end = {"ph": "E", "pid": e["pid"], "tid": e["tid"], "ts": e["ts"] + e["dur"]}
            dur = -e["dur"]
            found += [((e["ts"], 1, dur), {**e, "ph": "B"}), ((end["ts"], 0, -dur), end)]
    return [e for _, e in sorted(found, key=lambda pair: pair[0])]


LIST = json.dumps(STEP)
FORMS = {
    "array": LIST, "no bracket": LIST[:-1], "no bracket but a comma": LIST[:-1] + ",\n", "comma": LIST[:-1] + " , ]\n",
    "texts": json.dumps([{**e, **{name: f" {e[name]}" for name in ("ts", "dur") if name in e}} for e in STEP]),
    "pairs": json.dumps(in_pairs(STEP)), "pairs backwards": json.dumps(in_pairs(STEP[:-2])[::-1]),
    "others": json.dumps({"traceEvents": [{}, 7, None, {"ph": 3}, *STEP, *(
        {"ph": ph, "cat": "kernel", "name": "n", "ts": 7, "id": 1, "pid": 0, "tid": 7} for ph in "bensftCiIMPNODvRc"
    )]})}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("packed", [False, True])
def test_every_form_of_the_format_is_the_same_trace(tmp_path, form, packed):
    path = tmp_path / "form.json"
    raw = b"\xef\xbb\xbf" * (form == "array") + FORMS[form].encode()
    path.write_bytes(gzip.compress(raw) if packed else raw)
    assert load_torch([path]).summary() == load_torch([written(tmp_path / "a.json", STEP)]).summary()


@pytest.mark.parametrize("array", [False, True])
def test_names_may_have_control_characters(tmp_path, array):
    """torch 2.4 wrote such names of Python's functions as they are, and TensorBoard reads its traces none the less."""
    events = [*STEP, call("config.py(0): ?", 90, 3)]
    text = json.dumps(events)[:-1] if array else json.dumps({"traceEvents": events})
    (tmp_path / "a.json").write_text(text.replace("(0): ?", "(0): \x01"))
    assert load_torch([tmp_path / "a.json"]).summary() == load_torch([written(tmp_path / "b.json", events)]).summary()


def test_categories_of_older_versions_of_torch(tmp_path):
    """Until 1.12 its profiler wrote Kernel, Memcpy, Memset, Runtime and, at first, Operator."""
    events = [*STEP, kernel("copy", 60, 2, 1, cat="gpu_memcpy"), kernel("set", 62, 2, 1, cat="gpu_memset")]
    old = {"kernel": "Kernel", "gpu_memcpy": "Memcpy", "gpu_memset": "Memset", "cuda_runtime": "Runtime"}
    right = load_torch([written(tmp_path / "now.json", events)]).summary()
    for more in ({}, {"cpu_op": "Operator"}):
        then = [{**e, "cat": (old | more).get(e.get("cat"), e.get("cat"))} for e in events]
        assert load_torch([written(tmp_path / "then.json", then)]).summary() == right


def test_kernels_of_other_profilers_stay_among_their_other_events(tmp_path):
    """ONNX Runtime's kernels have the category of older torch's, on a row of their own, and no number of a call."""
    events = [call("model_run", 0, 50, cat="Session"), call("MatMul_kernel_time", 10, 20, cat="Node"),
              {**kernel("sgemm", 15, 12, 0, cat="Kernel"), "pid": -1, "tid": -1, "args": {"stream": "0x1"}}]
    t = load_torch([written(tmp_path / "a.json", events)])
    took = {x["label"].split()[1]: x["total"] for x in t.summary()["longest"]}
    assert took == {"model_run": 30, "MatMul_kernel_time": 20, "sgemm": 12}


def test_the_time_in_which_a_profiler_was_on_is_no_task(tmp_path, capsys):
    """torch 2.13 writes it also if nothing was recorded, such as on threads that the profiler does not see."""
    on = {"ph": "X", "cat": "Trace", "pid": "Spans", "tid": "PyTorch Profiler", "name": "PyTorch Profiler (0)",
          "ts": 0, "dur": 1000}
    assert main(["report", written(tmp_path / "a.json", [on])]) == 2
    assert "no calls and no kernels" in one_line(capsys)
    mark = {**call("ProfilerStep#1", 5, 20, cat="user_annotation"), "args": {}}
    assert load_torch([written(tmp_path / "b.json", [on, mark])]).makespan == 20


LOST = {
    **{f"a duration of {d}": (1, [{**kernel("bad", 3, 0, 9), "dur": d}]) for d in (
        -2, -0.001, "-1", float("nan"), float("inf"), None, "x", "1_0", "", [1], True, 1e300, "1e999999999")},
    **{f"a time of {t}": (1, [{**kernel("bad", 3, 1, 9), "ts": t}]) for t in (
        float("nan"), None, "x", {}, "9" * 99)},
    "an end before its begin": (1, in_pairs([kernel("bad", 9, -5, 9)])[::-1]),
    "an end without a time": (1, [in_pairs([kernel("bad", 9, 5, 9)])[0], {"ph": "E", "pid": 0, "tid": 7, "ts": None}]),
    "no end, and no begin": (2, [{"ph": "E", "name": "bad", "pid": 0, "tid": 7, "ts": 3},
                                 in_pairs([kernel("b", 3, 1, 9)])[0]]),
    "an end of nothing": (1, [{"ph": "E", "pid": 0, "tid": 7, "ts": 3.5}]),
}


@pytest.mark.parametrize("what", LOST)
def test_an_event_whose_time_cannot_be_is_left_out_with_a_line(tmp_path, capsys, what):
    count, bad = LOST[what]
    path = written(tmp_path / "a.json", [*bad, *STEP])
    assert load_torch([path]).summary() == load_torch([written(tmp_path / "b.json", STEP)]).summary()
    assert main(["report", path, "--json"]) == 0
    line, *_ = json.loads(capsys.readouterr().out)["notes"]
    assert f"{count} event" in line
    assert ("'E at 3.5 on thread 7'" if what == "an end of nothing" else "'bad'") in line


def test_times_before_0_are_kept_and_said(tmp_path):
    early = [{**e, "ts": e["ts"] - 7} for e in STEP if "ts" in e]
    moved, right = (load_torch([written(tmp_path / "a.json", events)]) for events in (early, STEP))
    assert moved.report() == right.report()
    assert "a.json: 4 events with a negative time are kept, since only differences of times count" in (
        moved.meta["notes"][0])
    assert len(moved.meta["notes"]) == len(right.meta["notes"]) + 1


def test_collectives_are_matched_within_their_group(tmp_path):
    def group(name: str, ranks: str) -> dict[str, Any]:
        return {"Collective name": "allreduce", "Process Group Name": name, "Process Group Ranks": ranks}

    def sums(name: str, ranks: str, *spans: tuple[float, float]) -> list[Any]:
        made = [kernel("ncclDevKernel_AllReduce", start, end - start, 0, 9) for start, end in spans]
        return [{**e, "args": e["args"] | group(name, ranks)} for e in made]

    every = [sums("0", "[0, 1, 2]", (start, 60)) for start in (10, 20, 50)]
    own, other = ("1", "[0, 1]"), ("2", "[1, 2]")
    every[0] += [kernel("gemm", 0, 1, 1), *sums(*own, (1, 8))]
    every[1] += sums(*own, (2, 8)) + sums(*other, (9, 15))
    every[2] += sums(*other, (12, 15))
    t = load_torch(of_ranks(tmp_path, *every))
    begins = {rank: sorted(t.start[t.tasks][t.rank_of_each[t.tasks] == rank].tolist()) for rank in range(3)}
    assert begins == {0: [0, 2, 50], 1: [2, 12, 50], 2: [12, 50]}
    assert not [line for line in t.meta["notes"] if "clock" in line or "match" in line]


def test_messages_are_matched_by_their_ranks_or_not_at_all(tmp_path):
    def message(start: float, what: str, **more: Any) -> dict[str, Any]:
        made = kernel("ncclDevKernel_SendRecv", start, 40 - start, 0, 9)
        return {**made, "args": made["args"] | {"Collective name": what, "Process Group Name": "0"} | more}

    for more, begins in (({"Src Rank": 0, "Dst Rank": 1}, [30, 30]), ({}, [10, 30])):
        files = [[kernel("gemm", 0, 1, 1), message(start, what, **more)]
                 for start, what in [(10, "send"), (30, "recv")]]
        t = load_torch(of_ranks(tmp_path, *files))
        assert sorted(t.start[t.tasks].tolist()) == [0, 0, *begins]


def test_clocks_that_differ_are_aligned_at_the_ends_of_collectives(tmp_path, capsys):
    def rank(number: int, ahead: int, name: str = "ncclDevKernel_AllGather_RING") -> str:
        events = [kernel("gemm", 0, 10 + 5 * number, 1), kernel(name, 15 + 5 * number, 25 - 5 * number, 2, 9),
                  kernel("gemm", 50, 10, 3), kernel(name, 60 + number, 12 - number, 4, 9)]
        return written(tmp_path / f"{number} {name[-4:]}.json", events, distributedInfo={"rank": number},
                       baseTimeNanoseconds=1790857026000000000 + ahead)

    right = load_torch([rank(0, 0), rank(1, 0), rank(2, 0)])
    assert not [line for line in right.meta["notes"] if "clock" in line]
    moved = load_torch([rank(0, 0), rank(1, 10**12 + 7), rank(2, -3 * 10**9)])
    assert moved.makespan == pytest.approx(right.makespan) == 72
    line = next(line for line in moved.meta["notes"] if "clock" in line)
    assert "rank 1 by -1,000,000,000.007 us, rank 2 by +3,000,000.000 us" in line
    # nothing says how clocks differ: a broadcast ends early on its root, other kernels do not meet
    for name in ("ncclDevKernel_Broadcast_RING", "gemm"):
        assert main(["report", rank(0, 0, name), rank(1, 10**12, name)]) == 0
        assert "rank 1 begins 999,999,928.000 us after the ranks before it have ended" in capsys.readouterr().err


def test_groups_whose_collectives_differ_are_matched_as_far_as_they_agree(tmp_path):
    def sums(rank: int, *names: str) -> list[Any]:
        return [kernel(f"ncclDevKernel_{name}", 20 * i + rank, 9 - rank, i) for i, name in enumerate(names)]

    whole, less = sums(0, "AllReduce", "AllGather", "AllReduce"), sums(1, "AllReduce", "AllReduce")
    t = load_torch(of_ranks(tmp_path, whole, less))
    assert any("1 of 3 are matched" in line for line in t.meta["notes"])
    assert sorted(t.start[t.tasks].tolist()) == [0, 0, 19, 20, 39]
    # one is missing, such as one whose duration was negative: the others are matched by their times
    t = load_torch(of_ranks(tmp_path, sums(0, *["AllReduce"] * 3), sums(1, *["AllReduce"] * 3)[1:]))
    assert any("2 of 3 are matched" in line for line in t.meta["notes"])
    assert not any("clock" in line for line in t.meta["notes"])
    assert sorted(t.start[t.tasks].tolist()) == [0, 21, 21, 41, 41]


def test_two_files_of_one_rank(tmp_path, capsys):
    one, late = ([{**e, "ts": e["ts"] + by} for e in STEP if e["ph"] == "X"] for by in (0, 100))
    paths = [written(tmp_path / f"{i}.json", events, distributedInfo={"rank": 3}) for i, events in
             enumerate([one, late, one])]
    assert load_torch(paths[:2]).makespan == 155
    edges = load_torch(paths[:1]).edges
    assert len(load_torch(paths[:2]).edges) == 2 * len(edges), "launches stay within their file"
    assert main(["report", paths[0], paths[2]]) == 2
    assert "are both of rank 3, and overlap on" in one_line(capsys)
    unnamed = written(tmp_path / "other.json", one)
    assert len(load_torch([paths[0], unnamed]).lanes) == 6, "in the order given where one has no rank"


def test_a_file_that_was_merged_from_ranks_has_lanes_of_each_and_says_what_it_lost(tmp_path):
    """SGLang merges traces so: it writes the rank before the process. Each rank sees one GPU and counts its calls."""
    late = [{**e, "ts": e["ts"] + 7} for e in STEP if "ts" in e]
    merged = [{**e, "pid": f"[TP{rank:02}] {e.get('pid')}"} for rank, own in enumerate((STEP, late)) for e in own]
    t = load_torch([written(tmp_path / "merged.json", merged)])
    assert {u.lane.name: u.busy for u in usage(t)} == {
        f"{lane[0]} [TP{rank:02}] {lane[1]}": busy for rank in (0, 1) for lane, busy in (
            (("device", "0 stream 7"), 30), (("device", "0 stream 8"), 5), (("process", "1 thread 5"), 16))}
    assert not len(t.edges), "a call of one rank launches no kernel of another"
    assert "merged.json: several processes number their launches alike" in t.meta["notes"][0]
    apart = [{**e, "args": {**e["args"], "correlation": 100 * e["args"]["correlation"]}}
             if e.get("args", {}).get("correlation") and "TP01" in e["pid"] else e for e in merged]
    t = load_torch([written(tmp_path / "apart.json", apart)])
    assert len(t.edges) > 4
    assert not [line for line in t.meta["notes"] if "alike" in line]


def test_threads_of_several_processes_have_lanes_of_their_own(tmp_path):
    events = [{**call(f"f{pid}", 0, 10), "pid": pid} for pid in (1, 2)]
    t = load_torch([written(tmp_path / "a.json", events)])
    assert [lane.name for lane in t.lanes] == ["process 1 thread 5", "process 2 thread 5"]


def test_backward_and_update_are_told_apart_on_every_thread(tmp_path):
    evaluate = "autograd::engine::evaluate_function: AddmmBackward0"

    def marked(name: str, ts: float, dur: float) -> dict[str, Any]:
        return call(name, ts, dur, cat="user_annotation")

    events = [
        call("aten::linear", 0, 10), {**call(evaluate, 5, 20), "tid": 6}, {**call("aten::mm", 6, 5), "tid": 6},
        {**call("cudaLaunchKernel", 7, 1, 1, "cuda_runtime"), "tid": 6}, kernel("gemm", 30, 10, 1),
        marked("Optimizer.step#Adam.step", 40, 20), call("aten::add_", 40, 5), call(evaluate, 45, 5),
        call("aten::mul_", 50, 10), call("aten::item", 60, 1), marked("## backward ##", 61, 9),
        call("aten::ones_like", 62, 1), marked("forward", 64, 3), call("aten::relu", 65, 1), marked("backward", 71, 1)]
    t = load_torch([written(tmp_path / "a.json", events)])
    found: dict[str, set[str]] = {}
    for record in t.tasks.tolist():
        task, name = t.label(record).split(maxsplit=1)
        found.setdefault(task.strip("0123456789"), set()).add(name)
    assert found == {"F": {"aten::linear", "aten::item", "aten::relu"}, "U": {"aten::add_", "aten::mul_"},
                     "B": {evaluate, "gemm", "aten::ones_like"}}
    assert t.summary()["kinds"] == {"F": 12, "B": 36, "U": 15}
    assert "cannot be told apart" in t.meta["notes"][-1]
    assert "all tasks are F" in load_torch([written(tmp_path / "b.json", STEP)]).meta["notes"][-1]


def test_real_steps_of_torch_have_forward_backward_and_update(tmp_path):
    need("torch")
    import torch
    from torch.profiler import ProfilerActivity, profile

    net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(net.parameters())
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as found:
        for _ in range(2):
            optimizer.zero_grad()
            net(torch.ones(8, 64)).sum().backward()
            optimizer.step()
            found.step()
    found.export_chrome_trace(str(tmp_path / "t.json.gz"))
    events = json.loads(gzip.decompress((tmp_path / "t.json.gz").read_bytes()))["traceEvents"]
    backward = sum(e["dur"] for e in events if e["name"].startswith("autograd::engine::evaluate_function"))
    t = load_torch([tmp_path / "t.json.gz"])
    kinds = t.summary()["kinds"]
    assert set(kinds) == {"F", "B", "U"}
    assert kinds["B"] > 0.99 * backward > 0, "no more than that and the few calls between"
    names = {kind: {t.label(r).split(maxsplit=1)[1] for r in t.tasks.tolist() if kind in t.name(r)} for kind in "FBU"}
    assert {"aten::linear", "aten::relu"} <= names["F"]
    assert "aten::addmm" not in names["F"], "it is within aten::linear"
    assert all("Backward0" in name or "AccumulateGrad" in name for name in names["B"])
    assert all(name.startswith("aten::") for name in names["U"])


def test_traces_of_jax(tmp_path):
    """As JAX 0.10 writes them: no categories, frames of Python with a $, marks of steps, an empty event at the end."""
    names = {1: "/host:CPU", 2: "/device:GPU:0"}
    threads = {(1, 3): "python", (1, 4): "tf_XLAEigen/77", (2, 5): "Stream #13(Compute)", (2, 6): "XLA Ops",
               (2, 7): "XLA Modules", (2, 8): "Steps"}

    def event(pid: int, tid: int, name: str, ts: float, dur: float, **args: Any) -> dict[str, Any]:
        return {"ph": "X", "pid": pid, "tid": tid, "name": name, "ts": ts, "dur": dur, "args": args}

    def of(pid: int) -> list[Any]:
        return [{"ph": "M", "pid": pid, "name": "process_name", "args": {"name": names[pid]}},
                *({"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": name}}
                  for (of, tid), name in threads.items() if of == pid)]

    host = [event(1, 3, "$f.py:1 f", 0, 90), event(1, 3, "train", 1, 80, step_num="0"),
            event(1, 3, "PjitFunction(f)", 2, 9), event(1, 3, "ParseArguments", 3, 1),
            event(1, 4, "ThunkExecutor::Execute", 10, 60), event(1, 4, "dot", 12, 20, hlo_op="dot.1"),
            event(1, 4, "end: dot", 32, 0.1)]
    t = load_torch([written(tmp_path / "a.json", [*of(1), *host, {}], displayTimeUnit="ns")])
    assert {(u.lane.name, u.tasks, u.busy) for u in usage(t)} == {("python", 1, 9), ("tf_XLAEigen/77", 1, 20)}
    lines = [event(2, tid, "gemm", 40, 5, hlo_op="gemm") for tid in (5, 6)]
    lines += [event(2, 5, "MemcpyH2D", 30, 2), event(2, 7, "jit_f", 30, 20), event(2, 8, "0", 0, 90)]
    t = load_torch([written(tmp_path / "b.json", [*of(1), *of(2), *host, *lines, {}])])
    assert {u.lane.name: u.busy for u in usage(t)} == {
        "/host:CPU python": 9, "/host:CPU tf_XLAEigen/77": 20, "/device:GPU:0 Stream #13(Compute)": 7}


def test_traces_of_viztracer_have_the_time_of_each_function_itself(tmp_path):
    """As VizTracer 1.1 writes them: callees first; its durations have all digits, its times three."""
    def function(name: str, ts: float, dur: float, tid: int = 9) -> dict[str, Any]:
        return {"ph": "X", "cat": "FEE", "pid": 9, "tid": tid, "name": name, "ts": ts, "dur": dur}

    events = [function("g", 787574256.578, 0.25), function("g", 787574257.4, 0.60041), function("f", 787574256.5, 1.5),
              function("h", 787574258.0, 0.0), function("f", 787574250.0, 1.25, 8)]
    named = {"ph": "M", "pid": 9, "tid": 9, "name": "thread_name", "args": {"name": "MainThread"}}
    head = {"viztracer_metadata": {"version": "1.1.1", "baseTimeNanoseconds": 1795857974093628104}, "file_info": {}}
    t = load_torch([written(tmp_path / "v.json", [named, *events], **head)])
    assert {u.lane.name: round(u.busy, 3) for u in usage(t)} == {"MainThread": 1.5, "thread 8": 1.25}
    took = {x["label"].split()[1]: round(x["total"], 3) for x in t.summary()["longest"]}
    assert took == {"f": round(1.5 - 0.25 - 0.6 + 1.25, 3), "g": 0.85, "h": 0}
    assert t.makespan == pytest.approx(8.0)


def test_traces_of_py_spy_give_the_time_to_the_innermost_function(tmp_path):
    """As py-spy 0.4 writes them: B and E in an array; the frames of a sample begin together, and may end together."""
    frames, ends = [(f, 0) for f in "abc"] + [("d", 10), ("e", 10), ("d", 30)], [("e", 20), ("d", 20), ("d", 35)]
    events = [{"ph": ph, "cat": "py-spy", "name": name, "pid": 1, "tid": 5, "ts": ts} for ph, some in (
        ("B", frames[:5]), ("E", ends[:2]), ("B", frames[5:]), ("E", ends[2:]), ("E", [(f, 40) for f in "cba"]))
        for name, ts in some]
    path = tmp_path / "spy.json"
    path.write_text(json.dumps(events))
    t = load_torch([path])
    took = {x["label"].split()[1]: x["total"] for x in t.summary()["longest"]}
    assert {name: time for name, time in took.items() if time} == {"c": 25, "d": 5, "e": 10}


def test_a_profiler_that_kept_too_few_events_is_said(tmp_path, monkeypatch):
    for most, head in ((1_000_000, {"viztracer_metadata": {"overflow": True}}), (7, {})):
        monkeypatch.setattr("minidl.core.torch_trace._JAX_MOST", most)
        t = load_torch([written(tmp_path / "a.json", [call("f", i, 1) for i in range(7)], **head)])
        assert "some are missing" in t.meta["notes"][0]


def test_sums_of_gloo_meet_and_depend_on_the_calls_that_post_them(tmp_path):
    """As torch 2.13 writes them: ranges on threads of gloo's own, without a group."""
    every = [[call("aten::linear", 0, work), call("c10d::allreduce_", work, 1),
              {**call("gloo:all_reduce", work + 2, 58 - work, cat="user_annotation"), "tid": 20 + rank,
               "args": {"Input Dims": [[4160]], "Input type": ["float"]}}] for rank, work in enumerate((10.0, 50.0))]
    t = load_torch(of_ranks(tmp_path, *every))
    sums = [r for r in t.tasks.tolist() if "gloo" in t.label(r)]
    assert [(float(t.start[r]), float(t.end[r])) for r in sums] == [(52, 60), (52, 60)]
    path = [t.label(r).split()[1] for r in critical_path(t).records.tolist()]
    assert path == ["aten::linear", "c10d::allreduce_", "gloo:all_reduce"]


def test_sums_of_gloo_in_groups_of_some_ranks_are_not_matched(tmp_path):
    """Rows and columns of a mesh of 2 x 2 sum alike; gloo does not say who sums with whom."""
    ends = [(60, 260), (60, 400), (160, 260), (160, 400)]
    every = [[{**call("gloo:all_reduce", end - 50, 50, cat="user_annotation"), "tid": 20,
               "args": {"Input Dims": [[4]], "Input type": ["float"]}} for end in own] for own in ends]
    t = load_torch(of_ranks(tmp_path, *every))
    assert sorted((int(t.start[r]), int(t.end[r])) for r in t.tasks) == sorted((e - 60, e - 10) for e in sum(ends, ()))
    assert any("gloo:all_reduce (gloo does not say which ranks it has): 0 of 2" in line for line in t.meta["notes"])


def test_messages_of_gloo_last_beside_the_calls_of_their_thread(tmp_path):
    """As torch 2.13 writes them: in the row of the thread that posts them, until they have arrived, without ranks."""
    def message(what: str, ts: float, dur: float) -> list[dict[str, Any]]:
        return [call(f"c10d::{what}", ts, 1), {**call(f"gloo:{what}", ts + 0.5, dur, cat="user_annotation"),
                                               "args": {"Input Dims": [[16, 256]], "Input type": ["float"]}}]

    t = load_torch(of_ranks(
        tmp_path, [*message("send", 0, 30), call("aten::linear", 5, 10), *message("send", 20, 9)],
        [*message("recv", 1, 9), call("aten::linear", 12, 8), *message("send", 5, 20), *message("recv", 26, 9)],
        [*message("recvAnySource", 6, 20)]))
    assert {(str(u.lane), u.tasks, u.busy) for u in usage(t)} == {
        ("0/thread 5", 3, 12), ("0/thread 5 messages", 2, 30), ("1/thread 5", 4, 11), ("1/thread 5 messages", 3, 33),
        ("2/thread 5", 1, 1), ("2/thread 5 messages", 1, 20)}
    edges = {(t.label(a).split()[1], t.label(b).split()[1]) for a, b in t.edges.tolist()}
    assert edges == {(f"c10d::{what}", f"gloo:{what}") for what in ("send", "recv", "recvAnySource")}
    assert not [line for line in t.meta["notes"] if "match" in line]


def says(message: str) -> None:
    """It is one line, without words of Python."""
    assert len(message.splitlines()) == 1
    assert not re.search(r"\w+Error|Traceback|object|NoneType|Exception", message)


def one_line(capsys: Any) -> str:
    error = capsys.readouterr().err
    says(error)
    return error


SMALL = gzip.compress(LIST.encode())
NO_TRACES = {
    "empty": b"", "blank": b" \n", "text": b"ts,dur\n1,2", "cut": LIST[:-40].encode(), "an open brace": b"{",
    "xplane": b"\n\x0f\x12\x0bhost:CPU\xff\xfe", "gzip cut": SMALL[:-9],
    "gzip damaged": SMALL[:40] + b"xxxx" + SMALL[44:], "gzip of nothing": gzip.compress(b""),
    "deep": b"[" * 20_000, "deep object": b'{"a":' * 20_000,
    "many digits": b"[" + b"9" * 10_000 + b"]",
    **{f"JSON {x}"[:40]: x.encode() for x in (
        "[]", "{}", "7", "null", '"x"', "NaN", "[1, 2, 3]", "[[[1]]]", '{"traceEvents": 7}',
        '{"traceEvents": {"ph": "X"}}',
        '{"traceEvents": []}', '{"traceEvents": [{"ph": "X", "cat": "kernel", "ts": "x"}]}', '{"nodes": [{"id": 1}]}',
        '[{"ph": ["X"], "ts": 0}, {"ph": "M", "name": "thread_name", "args": 3}, {"ph": "E"}, {"ph": "B"}]',
        '{"minidl": 7, "traceEvents": []}', '{"minidl": {}, "traceEvents": [[]]}',
        '{"minidl": {"unit": []}, "traceEvents": []}', '{"traceEvents": [], "baseTimeNanoseconds": "x"}',
        json.dumps({"traceEvents": STEP, "baseTimeNanoseconds": []} | {"distributedInfo": {"rank": -1}}))}}


@pytest.mark.parametrize("what", NO_TRACES)
@pytest.mark.parametrize("several", [False, True])
def test_what_is_no_trace_is_one_line(tmp_path, capsys, what, several):
    path = tmp_path / "t.json"
    path.write_bytes(NO_TRACES[what])
    assert main(["report", str(path), *[written(tmp_path / "a.json", STEP)] * several]) == 2
    assert "t.json" in one_line(capsys)


def test_a_trace_of_minidl_is_given_alone(tmp_path, capsys):
    ml.plan(ml.Pipeline(2), "gpipe", machine=ml.Machine(2)).timeline.save(tmp_path / "ours.json")
    assert main(["report", str(tmp_path / "ours.json"), written(tmp_path / "a.json", STEP)]) == 2
    assert "give it alone" in one_line(capsys)


def test_calls_that_neither_end_nor_begin_take_no_time_to_pair(tmp_path):
    """20,000 ends that match none of 20,000 begins: were each looked up among all, this would be slow."""
    many = [{"ph": ph, "name": ph, "pid": 1, "tid": 1, "ts": i} for i, ph in enumerate("B" * 20_000 + "E" * 20_000)]
    t = load_torch([written(tmp_path / "a.json", [*STEP, *many])])
    assert "40000 events" in t.meta["notes"][0]


VALUES = (None, -1, 0, 3.5, 1e300, float("nan"), "", "x", "12", "\ud800\n", [], [[1]], {}, True, 10**30)


def spoiled(value: Any, chance: random.Random, depth: int = 0) -> Any:
    """The same JSON with a few values replaced, left out, repeated or exchanged."""
    if depth and chance.random() < 0.02:
        return chance.choice(VALUES)
    if isinstance(value, dict):
        return {name if chance.random() > 0.01 else chance.choice(list(value)): spoiled(x, chance, depth + 1)
                for name, x in value.items() if chance.random() > 0.01}
    if isinstance(value, list):
        kept = [spoiled(x, chance, depth + 1) for x in value for _ in range(chance.choice([1] * 40 + [0, 2]))]
        return kept if chance.random() > 0.1 else chance.sample(kept, len(kept))
    return value


def test_spoiled_traces_have_a_report_or_one_line(tmp_path):
    """Random values in place of others, and random bytes; two ranks of each, so that collectives meet."""
    sums = [kernel("ncclDevKernel_AllReduce", 60 + 9 * i, 5, 8 + i, 9) for i in range(3)]
    thread = [{"ph": "M", "pid": pid, "tid": 5, "name": f"{what}_name", "args": {"name": name}} for pid, what, name in
              ((1, "thread", "python"), (2, "process", "/device:TPU:0"), (2, "thread", "XLA Ops"))]
    update = call("Optimizer.step#SGD.step", 70, 20, cat="user_annotation")
    whole = {"distributedInfo": {"rank": 1, "world_size": 2}, "baseTimeNanoseconds": 10**18, "traceEvents": [
        *thread, *STEP, *sums, update, *in_pairs(STEP[:4]), {**call("dot", 3, 1), "pid": 2, "cat": None}]}
    first = written(tmp_path / "first.json", whole["traceEvents"], distributedInfo={"rank": 0})
    path, read = tmp_path / "second.json", 0
    for seed in range(150):
        chance = random.Random(seed)
        raw = json.dumps(spoiled(whole, chance) if seed % 3 else whole).encode()
        if seed % 3 == 0:
            at = chance.randrange(len(raw))
            raw = raw[:at] + chance.randbytes(chance.randrange(3)) + raw[at + chance.randrange(4):]
        path.write_bytes(raw)
        try:
            t = load_torch([first, path])
        except ValueError as error:
            says(str(error))
            continue
        text = t.report() + timeline_svg(t) + json.dumps(t.summary(), allow_nan=False) + str(t.meta)
        assert text.encode()
        assert all(u.busy >= 0 and u.idle >= 0 for u in usage(t))
        read += 1
    assert read > 50
