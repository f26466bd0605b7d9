"""Reports on a GPU, on stand-ins for it and for NCCL: copies to the host, shares of a step, NCCL with one rank."""

from __future__ import annotations

import json
from types import SimpleNamespace

import cuda_runtime
import host_copies
import nccl_alone
import numpy as np
import pytest
import shares
from cuda_ranks import Nccl, made
from ladder_cases import Case

from minidl.devices.cuda import device as cuda
from minidl.runtime.comm import nccl


# --------------------------------------------------------------------------------------------------------------- copies
def test_copies_and_steps_have_equal_bits(monkeypatch, tmp_path):
    device, out = cuda_runtime.device(1), tmp_path / "copies.json"
    monkeypatch.setitem(cuda._devices, 0, device)
    for name, value in {"COUNTS": (1, 100), "HELD": 4096, "TURNS": 1, "STEPS": 1}.items():
        monkeypatch.setattr(host_copies, name, value)
    monkeypatch.setattr(host_copies, "NETWORKS", {"mlp": {"model": "mlp", "model_args": {"hidden": 16},
                                                          "batch_size": 16}})
    assert host_copies.main(["--out", str(out)]) == 0
    record = json.loads(out.read_text())
    assert record["complete"]
    assert [(row["way"], row["bytes"]) for row in record["copies"]] == [
        (way, size) for size in (4, 400) for way in ("out", "in")]
    none, activations, states = record["steps"]
    assert (none["copied_bytes"], none["hidden"]) == (0, None)
    for row in (activations, states):
        assert row["copied_bytes"] > 0
        assert row["equal_bits"]
    assert states["peak_bytes"] < none["peak_bytes"]
    read = device.read
    monkeypatch.setattr(device, "read", lambda array: read(array) + np.float32(1))
    assert host_copies.main(["--out", str(out)]) == 1


# --------------------------------------------------------------------------------------------------------------- shares
TINY = {"mlp": Case("mlp", {"hidden": 16}, 8)}


@pytest.fixture
def run(call, monkeypatch, tmp_path):
    monkeypatch.setattr(shares, "OTHERS", TINY)
    monkeypatch.setattr(shares, "CASES", {})
    monkeypatch.setattr(shares, "of_device", lambda device: lambda flops, nbytes: flops / 1e3 + nbytes / 1e3)

    def measured(*arguments: str):
        code = call(shares, "--quick", "--out", tmp_path / "shares.json", *arguments)
        return code, json.loads((tmp_path / "shares.json").read_text())

    return measured


@pytest.mark.parametrize("name", ["cpu", "cuda"])
@pytest.mark.parametrize("scheduler", ["in_order", "multi_stream"])
def test_families_and_waits_fill_the_time_of_all_lanes(run, monkeypatch, name, scheduler):
    if name == "cuda":
        monkeypatch.setitem(cuda._devices, 0, cuda_runtime.device())
    code, record = run("--device", name, "--scheduler", scheduler)
    entry = record["networks"]["mlp"]
    assert (code, record["left_out"]) == (0, {})
    assert {"linear", "loss", "sgd"} <= {row["family"] for row in entry["families"]}
    assert sum(row["tasks"] for row in entry["families"]) >= entry["tasks"]
    shared = [row["share"] for row in [*entry["families"], *entry["waits"].values()]]
    assert sum(shared) == pytest.approx(1, abs=0.02)
    assert entry["floor_ms"] == pytest.approx(sum(row["floor_ms"] for row in entry["families"]), abs=1e-3)


def test_a_network_that_fails_stops_no_other_and_earlier_ones_stay(run, monkeypatch, capsys):
    monkeypatch.setattr(shares, "OTHERS", {"wrong": Case("mlp", {"hidden": -1}), **TINY})
    code, record = run("--device", "cpu", "--only", "wrong", "mlp")
    assert (code, [*record["networks"]]) == (1, ["mlp"])
    assert record["left_out"]["wrong"] in capsys.readouterr().err
    code, record = run("--device", "cpu", "--only", "mlp", "--within", "0")
    assert (code, [*record["networks"]], record["left_out"]) == (0, ["mlp"], {"mlp": "no time was left"})
    with pytest.raises(SystemExit):
        run("--device", "cpu", "--only", "no such network")


# ----------------------------------------------------------------------------------------------------------------- NCCL
@pytest.fixture
def gpu(monkeypatch):
    found = made(0)
    monkeypatch.setattr(nccl_alone.devices, "get", lambda name: found)
    monkeypatch.setattr(nccl_alone, "COUNTS", (1, 100))
    monkeypatch.setattr(nccl_alone, "HELD", 4096)
    return found


def test_bits_of_one_rank(gpu, monkeypatch, tmp_path):
    library, out = Nccl(), tmp_path / "nccl.json"
    monkeypatch.setattr(nccl, "library", lambda: library)
    assert nccl_alone.main(["--out", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [(row["transfer"], row["bytes"]) for row in rows] == [
        (name, size) for size in (4, 400) for name in ("all-reduce", "send and receive")]
    assert all(row["equal_bits"] for row in rows)
    read = gpu.read
    monkeypatch.setattr(gpu, "read", lambda array: read(array) + np.float32(1))
    assert nccl_alone.main(["--out", str(out)]) == 1
    assert not json.loads(out.read_text())["passed"]


def test_missing_nccl_is_one_line(gpu, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(nccl, "library", lambda: SimpleNamespace(available=False))
    out = tmp_path / "nccl.json"
    assert nccl_alone.main(["--out", str(out)]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("NCCL is missing: rank 0 has no NCCL")
    assert "missing" in json.loads(out.read_text())


@pytest.mark.parametrize("text", ["", "[1]", "{}", '{"networks": [1]}'])
def test_a_file_that_is_no_record_is_left_alone(call, tmp_path, capsys, text):
    """The command would go on with it, and write over it."""
    path = tmp_path / "other.json"
    path.write_text(text)
    assert call(shares, "--device", "cpu", "--out", path) == 2
    said = f"shares: {path} is no record of this program, which would go on; give another --out\n"
    assert capsys.readouterr().err == said
    assert path.read_text() == text


@pytest.mark.parametrize(("name", "message"), [
    ("nothing", "unknown scheduler 'nothing' for one device; similar names: multi_region"),
    ("a.py:f", "a.py: no such file")])
def test_an_unknown_scheduler_is_one_line_before_any_network(call, monkeypatch, capsys, name, message):
    monkeypatch.setattr(shares, "traced", None)
    assert call(shares, "--device", "cpu", "--scheduler", name, "--out", "no/file.json") == 2
    assert capsys.readouterr().err == f"shares: {message}\n"
