"""Shares of a step by kernel family and of waiting: they fill the lanes' time, on the CPU and on the stand-in GPU."""

from __future__ import annotations

import json
import sys

import cuda_runtime
import pytest
from helpers import ROOT

from minidl.devices.cuda import device as devices

sys.path.append(str(ROOT / "bench"))
import shares
from ladder_cases import Case

TINY = {"mlp": Case("mlp", {"hidden": 16}, 8)}


@pytest.fixture
def run(monkeypatch, tmp_path):
    monkeypatch.setattr(shares, "OTHERS", TINY)
    monkeypatch.setattr(shares, "CASES", {})
    monkeypatch.setattr(shares, "of_device", lambda device: lambda flops, nbytes: flops / 1e3 + nbytes / 1e3)

    def call(*arguments: str):
        monkeypatch.setattr(sys, "argv", ["shares.py", "--quick", "--out", str(tmp_path / "shares.json"), *arguments])
        return shares.main(), json.loads((tmp_path / "shares.json").read_text())

    return call


@pytest.mark.parametrize("name", ["cpu", "cuda"])
@pytest.mark.parametrize("scheduler", ["in_order", "multi_stream"])
def test_families_and_waits_fill_the_time_of_all_lanes(run, monkeypatch, name, scheduler):
    if name == "cuda":
        monkeypatch.setitem(devices._devices, 0, cuda_runtime.device())
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
