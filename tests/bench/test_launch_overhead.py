"""The microbenchmark of launches: every row is measured or says why not, on the CPU and on a runtime without a GPU."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys

import cuda_machine
import cuda_runtime
import pytest
from helpers import PATIENCE, ROOT, need

BENCH = ROOT / "bench"
NEED_TWO_CORES = ("by lock", "by futex", "by spin", "a native step without calls")
RUNNABLE = {"minidl, prebuilt launch", "minidl, small product",
            "fill of 4 KiB"}  # of the groups whose other rows are those of libraries


def check_rows(rows, measured):
    """The shape of a record's rows; `measured(row)` tells which ones must have times."""
    assert len({(row["group"], row["name"]) for row in rows}) == len(rows)
    for row in rows:
        assert row["words"]
        assert ("us" in row) != ("missing" in row)
        assert "us" in row or not measured(row), row
        for times in row.get("us", {}).values():
            assert times["p10"] <= times["median"] <= times["p90"]
            assert times["n"] > 0
    chains = [row for row in rows if "kernels" in row]
    assert {row["branches"] for row in chains} == {0, 1, 2, 4, 8}
    assert all({"host", "device", "whole"} <= set(row["us"]) for row in chains)


def run(*arguments):
    return subprocess.run([sys.executable, str(BENCH / "launch_overhead.py"), *arguments], capture_output=True,
                          text=True, timeout=PATIENCE)


@pytest.mark.slow
def test_the_cpu(tmp_path):
    done = run("--quick", "--json", "--out", str(tmp_path / "record.json"))
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert record == json.loads((tmp_path / "record.json").read_text())
    assert (record["name"], record["device"], record["unit"]) == ("launch_overhead_cpu", "cpu", "us")
    check_rows(record["rows"], lambda row: row["name"] not in ("torch op", *NEED_TWO_CORES))
    by_name = {row["name"]: row for row in record["rows"]}
    assert set(by_name["minidl stream"]["us"]) == {"host", "device"}
    assert {"NumPy ufunc", "numba loop, 16 arrays", "SimpleQueue", "ThreadPoolExecutor", "copy of 4 B"} <= set(by_name)


def test_what_takes_two_cores_is_not_measured_on_one(bench, monkeypatch):
    """There the system hands over, and not the lanes. Where there are two, each lane has its own, until they close."""
    import launches_cpu

    rows = {row.name: row for row in launches_cpu.rows(True)}
    cores = os.sched_getaffinity(0)
    if len(cores) > 1 and not launches_cpu.devices.no_native_lanes():
        for name in NEED_TWO_CORES:
            assert rows[name].measure()["host"]
            assert os.sched_getaffinity(0) == cores
    monkeypatch.setattr(os, "sched_getaffinity", lambda thread: {0})
    for name in NEED_TWO_CORES:
        with pytest.raises(launches_cpu.Missing, match="need two cores"):
            rows[name].measure()


def test_what_was_measured_is_kept_when_it_is_stopped(bench, tmp_path, monkeypatch):
    """By whatever: the machine may be taken away."""
    import launches_cuda

    out, whole = tmp_path / "record.json", launches_cuda.rows

    def stopped(device, quick):
        yield from itertools.islice(whole(device, quick), 3)
        raise KeyboardInterrupt

    monkeypatch.setattr(launches_cuda, "rows", stopped)
    monkeypatch.setattr(sys, "argv", ["launch_overhead.py", "--device", "cuda", "--quick", "--out", str(out)])
    with pytest.raises(KeyboardInterrupt):
        bench.main()
    record = json.loads(out.read_text())
    assert (len(record["rows"]), record["complete"]) == (3, False)
    monkeypatch.setattr(launches_cuda, "rows", lambda device, quick: itertools.islice(whole(device, quick), 4))
    bench.main()
    record = json.loads(out.read_text())
    assert (len(record["rows"]), record["complete"]) == (4, True)


def test_an_unknown_device_is_one_clear_line():
    done = run("--device", "tpu")
    assert (done.returncode, done.stderr) == (2, "unknown device 'tpu'; known: cpu, cuda, cuda:N\n")


@pytest.fixture
def bench(monkeypatch):
    """The benchmark as a module, with a CUDA runtime that runs on the CPU."""
    monkeypatch.syspath_prepend(BENCH)
    import launch_overhead
    import launches_cuda

    device = cuda_runtime.device()
    device.driver.describe = lambda: {"name": "none"}
    monkeypatch.setattr(launches_cuda, "HELD", 4096)
    monkeypatch.setattr(cuda_machine, "run_packed", lambda *launch: None)  # what is launched does not matter here
    monkeypatch.setattr(launch_overhead, "gpu", lambda name: device)
    return launch_overhead


@pytest.mark.slow
def test_what_cuda_does_without_libraries(bench, tmp_path):
    """Launches, events, copies, chains and graphs run on the stand-in for CUDA's runtime; libraries that
    need a GPU say so."""
    record = bench.measure("cuda", quick=True)
    libraries = ("a kernel", "a library's kernel")
    check_rows(record["rows"], lambda row: row["group"] not in libraries or row["name"] in RUNNABLE)
    by_graph = [row for row in record["rows"] if row.get("by") == "graph"]
    assert all({"launch", "capture"} <= set(row["us"]) for row in by_graph)
    assert len(by_graph) == len([row for row in record["rows"] if row.get("by") == "stream"])
    text = bench.table(record)
    for row in record["rows"]:
        (line,) = [line for line in text.splitlines() if line.startswith(f"  {row['name']:42} ")
                   and row.get("missing", row["words"]) in line]
        assert line
    need("matplotlib")
    bench.plot(record, str(tmp_path / "plot.png"))
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.few(2)
@pytest.mark.parametrize("branches", [0, 1, 2, 4, 8])
def test_chains_are_what_they_are_called(bench, branches):
    """A graph of n kernels: a path, or equal branches side by side. On two streams that take turns each kernel comes
    after the last, and after the last but one too, which is the last of its own stream."""
    import launches_cuda

    gpu = launches_cuda.Gpu(bench.gpu("cuda"), True)
    program = launches_cuda._program(gpu, 24, branches)
    for call in program:
        call()
    gpu.driver.synchronize_device()
    gpu.driver.begin_capture(gpu.main)
    for call in program:
        call()
    graph = gpu.driver.end_capture(gpu.main)
    apart = max(branches, 1)
    wanted = {(i, i + apart) for i in range(24 - apart)}
    if not branches:
        wanted |= {(i, i + 2) for i in range(22)}
    nodes, edges = gpu.driver.dependencies(graph)
    assert len(nodes) == 24
    assert set(edges) == wanted
    assert sorted(i for piece in launches_cuda.pieces(24, apart) for i in piece) == list(range(24))
