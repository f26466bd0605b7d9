"""Copies to the host and back, on a stand-in for a GPU."""

from __future__ import annotations

import json

import cuda_runtime
import host_copies
import numpy as np

from minidl.devices.cuda import device as cuda


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
