"""Copies to the host and back, on a stand-in for a GPU."""

from __future__ import annotations

import json
import sys

import cuda_runtime
import numpy as np
from helpers import ROOT

from minidl.devices.cuda import device as cuda

sys.path.insert(0, str(ROOT / "bench"))

import host_copies


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


def test_without_a_gpu_it_is_one_line(monkeypatch, capsys):
    def missing(name: str) -> None:
        raise host_copies.devices.DeviceError("there is none")

    monkeypatch.setattr(host_copies.devices, "get", missing)
    assert host_copies.main([]) == 2
    assert capsys.readouterr().err == "host_copies: there is none\n"
