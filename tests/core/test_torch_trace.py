"""PyTorch's traces as timelines: launches, graphs, waits and collectives over ranks; and `minidl report`."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from helpers import need

import minidl as ml
from minidl.cli import main
from minidl.core.report import critical_path, usage
from minidl.core.timeline import What
from minidl.core.torch_trace import load_torch


def call(name: str, ts: float, dur: float, correlation: int | None = None, cat: str = "cpu_op") -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": 5, "ts": ts, "dur": dur,
            "args": {} if correlation is None else {"correlation": correlation}}


def kernel(name: str, ts: float, dur: float, correlation: int, stream: int = 7, cat: str = "kernel") -> dict[str, Any]:
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
    def rank(number: int, work: float) -> str:
        events = [kernel("gemm", number, work - number, 1), kernel("ncclDevKernel_AllReduce", work, 60 - work, 2, 9)]
        path = tmp_path / f"{number}.json.gz"
        path.write_bytes(gzip.compress(json.dumps({"traceEvents": events, "distributedInfo": {"rank": number},
                                                   "baseTimeNanoseconds": 1000}).encode()))
        return str(path)

    t = load_torch([rank(0, 10.0), rank(1, 50.0)])
    sums = [r for r in t.tasks.tolist() if "nccl" in t.label(r)]
    assert [(t.lanes[t.lane[r]].rank, float(t.start[r]), float(t.end[r])) for r in sums] == [(0, 50, 60), (1, 50, 60)]
    products = [r for r in t.tasks.tolist() if t.label(r).endswith("gemm")]
    assert [(float(t.start[r]), float(t.end[r])) for r in products] == [(0, 10), (1, 50)], "no rank waits for another"
    waits = [r for r in range(len(t)) if t.what[r] != What.TASK and t.lanes[t.lane[r]].rank == 0]
    assert sum(float(t.end[r] - t.start[r]) for r in waits) == 50


def test_real_traces_of_torch_are_read(tmp_path):
    need("torch")
    import torch
    from torch.profiler import ProfilerActivity, profile

    x = torch.randn(64, 64)
    with profile(activities=[ProfilerActivity.CPU]) as found:
        (x @ x).relu().sum().item()
    found.export_chrome_trace(str(tmp_path / "t.json"))
    t = load_torch([tmp_path / "t.json"])
    assert {"aten::matmul", "aten::relu", "aten::sum"} <= set(t.labels)
    assert "aten::mm" not in t.labels  # within aten::matmul


def test_report_shows_and_compares_traces(tmp_path, capsys):
    torchs = written(tmp_path / "a.json", STEP)
    plan = ml.plan(ml.Pipeline(4), "zb_h1", machine=ml.Machine(2))
    ours = str(tmp_path / "ours.json")
    plan.timeline.save(ours)
    assert main(["report", ours, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["makespan"] == pytest.approx(plan.timeline.makespan)
    faster = written(tmp_path / "b.json", [*STEP[:-3], call("aten::item", 51, 3)])
    assert main(["report", torchs, "--against", faster, "--html", str(tmp_path / "r.html")]) == 0
    out = capsys.readouterr().out
    assert "critical path" in out
    assert "makespan 55" in out
    page = (tmp_path / "r.html").read_text()
    assert page.count("<svg") == 1
    assert "aten::linear" in page


@pytest.mark.parametrize(("content", "says"), [
    ("{", "is not a trace"), ("[]", "is not a trace"), ('{"traceEvents": []}', "has no calls and no kernels"),
    ('{"traceEvents": [{"ph": "X", "cat": "kernel", "ts": "x"}]}', "is not a trace"),
    ('{"traceEvents": [{"ph": "X", "cat": "kernel", "ts": 1, "dur": -2, "name": "k"}]}', "the times of 'k'")])
def test_what_is_no_trace_is_one_line(tmp_path, capsys, content, says):
    path = tmp_path / "t.json"
    path.write_text(content)
    assert main(["report", str(path)]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert len(error.splitlines()) == 1
