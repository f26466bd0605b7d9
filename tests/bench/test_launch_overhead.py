"""The microbenchmark of launches: every row is measured or says why not, on the CPU and on a runtime without a GPU."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
from time import perf_counter

import cuda_machine
import cuda_runtime
import launch_overhead
import launches
import launches_cpu
import launches_cuda
import numpy as np
import pytest
from helpers import BENCH, PATIENCE, need

LIBRARIES = ("CuPy", "cuBLAS", "numba", "torch", "JAX", "Triton", "cuda.core", "connections")


def run(*arguments):
    return subprocess.run([sys.executable, str(BENCH / "launch_overhead.py"), *arguments], capture_output=True,
                          text=True, timeout=PATIENCE)


def row(how, name="a row"):
    return launches.Row("a group", name, "", how)


def one(how, seconds=60.0):
    """The record's entry of a row."""
    (entry,) = launches.measured([row(how)], launches.Bench(), perf_counter() + seconds)
    return entry


@pytest.fixture
def device(monkeypatch):
    """A CUDA runtime that runs on the CPU, and rows that take the least time."""
    device = cuda_runtime.device()
    device.driver.machine.pinned = device.driver.machine.device  # kernels may write to pinned memory

    def ran(source, kernel, blocks, threads, shared, values, *more):
        if kernel.startswith("fill"):  # the flag: all else that is launched does not matter here
            ctypes.c_float.from_address(int.from_bytes(values[0], "little")).value = 1.0

    monkeypatch.setattr(cuda_machine, "run_packed", ran)
    monkeypatch.setattr(launches_cuda, "HELD", 4096)
    monkeypatch.setattr(launches, "MOST", 0.0)
    monkeypatch.setattr(launches_cuda, "SIZES", {4: "4 B"})
    monkeypatch.setattr(launch_overhead, "gpu", lambda name: device)
    return device


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_every_row_is_measured_or_says_why_not(name, device):
    """The rows of libraries that are not installed, or that need a GPU."""
    record = launch_overhead.measure(name, 600.0)
    rows, text = record["rows"], launch_overhead.table(record)
    assert record["complete"]
    assert len({row["name"] for row in rows}) == len(rows)
    two_cores = len(os.sched_getaffinity(0)) > 1 and not launches_cpu.devices.no_native_lanes()
    for entry in rows:
        if "missing" in entry:
            assert any(words in entry["name"] for words in LIBRARIES) or (name == "cpu" and not two_cores), entry
        for times in (*entry.get("us", {}).values(), *(p for f in entry.get("fit", {}).values()
                                                       for p in f["points"].values())):
            assert times["p10"] <= times["median"] <= times["p90"]
            assert times["n"] > 0
        assert f"  {entry['name']:46} {launches.said(entry)}" in text
        assert entry["command"].endswith(f'--device {name} --row "{entry["name"]}"')


def test_a_row_alone_by_its_command(tmp_path):
    done = run("--quick", "--json", "--out", str(tmp_path / "record.json"), "--row", "Python function")
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert record == json.loads((tmp_path / "record.json").read_text())
    assert (record["name"], record["device"], record["unit"]) == ("launch_overhead_cpu", "cpu", "us")
    assert [(entry["name"], [*entry["us"]]) for entry in record["rows"]] == [("Python function", ["host"])]


@pytest.mark.parametrize(("arguments", "message"), [
    (["--device", "tpu"], "unknown device 'tpu'; known: cpu, cuda, cuda:N\n"),
    (["--device", "cuda:x", "--list"], "unknown device 'cuda:x'; known: cpu, cuda, cuda:N\n"),
    (["--row", "no row"], "there is no row 'no row' for cpu; --list names them all\n"),
    (["--device", "cuda", "--row", "no row"], "there is no row 'no row' for cuda; --list names them all\n")])
def test_bad_input_is_one_clear_line(arguments, message, call, capsys):
    with pytest.raises(SystemExit) as ended:
        call(launch_overhead, *arguments)
    assert (ended.value.code, capsys.readouterr().err) == (2, message)


@pytest.mark.parametrize(("name", "rows"), [("cpu", launches_cpu.ROWS), ("cuda:1", launches_cuda.ROWS)])
def test_rows_are_listed_for_a_device_that_is_not_there(name, rows, monkeypatch, capsys):
    monkeypatch.setattr(launch_overhead, "gpu", None)
    monkeypatch.setattr(sys, "argv", ["launch_overhead.py", "--device", name, "--list"])
    launch_overhead.main()
    assert capsys.readouterr().out.splitlines() == [row.name for row in rows]


@pytest.mark.few(1)
@pytest.mark.parametrize("flag", ["--out", "--plot"])
def test_a_file_that_cannot_be_written_is_one_clear_line(flag, tmp_path, monkeypatch, capsys):
    need("matplotlib")
    monkeypatch.setattr(sys, "argv", ["launch_overhead.py", "--row", "Python function", flag, str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        launch_overhead.main()
    assert ended.value.code == 2
    assert str(tmp_path) in capsys.readouterr().err.splitlines()[-1]


def test_the_time_is_a_limit():
    """A row that does not end is ended, and the ones behind it say that they were not reached."""
    before, left = signal.getsignal(signal.SIGALRM), []

    def endless(bench):
        left.append(signal.getitimer(signal.ITIMER_REAL)[0])
        bench.end = 0.0
        while True:  # the time comes
            signal.raise_signal(signal.SIGALRM)

    rows = [row(endless, "endless"), row(endless, "behind")]
    found = [entry["missing"] for entry in launches.measured(rows, launches.Bench(), perf_counter() + 600)]
    assert found == ["not finished: the time was over", "not reached: the time was over"]
    assert [0 < seconds <= 600 for seconds in left] == [True]
    assert (signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)[0]) == (before, 0)


def test_a_missing_back_end_names_its_cause():
    assert one(lambda bench: __import__("no_such_package"))["missing"] == "no_such_package is not installed"
    assert one(lambda bench: np.row_stacked)["missing"] == (
        f"a package asks for np.row_stacked, which NumPy {np.__version__} does not have: take an older NumPy, or a "
        f"newer version of the package")
    assert one(lambda bench: {"host": []})["missing"] == "no sample of host"
    assert one(lambda bench: 1 / 0)["missing"] == "failed: ZeroDivisionError: division by zero"


def test_a_line_has_its_largest_error():
    exact = launches.line({n: [3 + 0.5 * n] * 3 for n in launches.LENGTHS})
    assert (exact["fixed"], exact["each"], exact["off"]) == (3, 0.5, 0)
    bent = launches.line({1: [2.0], 10: [20.0], 100: [100.0]})
    errors = [abs(bent["fixed"] + bent["each"] * n - t) / t for n, t in ((1, 2), (10, 20), (100, 100))]
    assert bent["off"] == pytest.approx(max(errors), abs=1e-3)
    assert bent["off"] > 0.1


def test_percentiles_need_samples():
    few, many = launches.percentiles([1.0] * 499), launches.percentiles([*range(1000)])
    assert few.keys() == {"median", "p10", "p90", "n"}
    assert (many["p99"], many["p99.9"], many["max"]) == (989.01, 998.001, 999)


def test_lanes_that_take_turns_need_two_cores(monkeypatch):
    """On one, the system hands over, and not the lanes. If there are two, each lane has its own, until they close."""
    cores = os.sched_getaffinity(0)
    rows = [row for row in launches_cpu.ROWS if row.name.startswith(("record to wait", "native step"))]
    assert len(rows) == 4
    if len(cores) > 1 and not launches_cpu.devices.no_native_lanes():
        bench = launches.Bench()
        bench.until = 0.0
        for found in rows[2:]:  # the others take turns by the system's leave
            assert found.how(bench)["host"]
            assert os.sched_getaffinity(0) == cores
    monkeypatch.setattr(os, "sched_getaffinity", lambda thread: {0})
    for found in rows:
        assert one(found.how)["missing"] == "two lanes that take turns need two cores"


def test_a_record_is_kept_when_it_is_stopped(device, call, tmp_path, monkeypatch):
    """By whatever: the machine may be taken away."""
    def stop(gpu):
        raise KeyboardInterrupt

    out, rows = tmp_path / "record.json", launches_cuda.ROWS[:3]
    monkeypatch.setattr(launches_cuda, "ROWS", (*rows, row(stop)))
    flags = ("--device", "cuda", "--quick", "--out", out)
    with pytest.raises(KeyboardInterrupt):
        call(launch_overhead, *flags)
    record = json.loads(out.read_text())
    assert (len(record["rows"]), record["complete"]) == (3, False)
    monkeypatch.setattr(launches_cuda, "ROWS", rows)
    call(launch_overhead, *flags)
    record = json.loads(out.read_text())
    assert (len(record["rows"]), record["complete"]) == (3, True)
    assert all("first" in entry["us"] for entry in record["rows"] if "writes" in entry["name"])


def test_the_gpu_has_the_connections_of_every_device_of_minidl(monkeypatch):
    """Also where it cannot be opened; what the user has set stays."""
    from minidl.devices.cuda.device import CONNECTIONS

    for given, wanted in ((None, CONNECTIONS), ("8", "8")):
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "")
        monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS")
        if given:
            monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", given)
        monkeypatch.setattr("minidl.devices.cuda.driver.libraries", lambda: 1 / 0)
        with pytest.raises(launch_overhead.devices.DeviceError, match="there is no GPU"):
            launch_overhead.gpu("cuda")
        assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == wanted


@pytest.mark.few(2)
@pytest.mark.parametrize("branches", [0, 1, 2, 4, 8])
def test_chains_are_what_they_are_called(device, branches):
    """A graph of n kernels: a path, or equal branches side by side. On two streams that take turns each kernel comes
    after the last, and after the last but one too, which is the last of its own stream."""
    gpu = launches_cuda.Gpu(device)
    nodes, edges = gpu.driver.dependencies(gpu.graph(launches_cuda._program(gpu, 24, branches)))
    apart = max(branches, 1)
    wanted = {(i, i + apart) for i in range(24 - apart)}
    if not branches:
        wanted |= {(i, i + 2) for i in range(22)}
    assert len(nodes) == 24
    assert set(edges) == wanted
    assert sorted(i for piece in launches.pieces(24, apart) for i in piece) == list(range(24))


def test_nodes_of_each_kind_are_in_a_row(device):
    gpu = launches_cuda.Gpu(device)
    for kind in launches_cuda.KINDS:
        launch = launches_cuda._nodes(gpu, 5, kind)
        nodes, edges = gpu.driver.dependencies(launch.owners[0])
        assert (len(nodes), sorted(edges)) == (5, [(i, i + 1) for i in range(4)]), kind
        launch()
    device.driver.synchronize_device()
