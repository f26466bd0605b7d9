"""NCCL with one rank, on stand-ins for a GPU and for NCCL."""

from __future__ import annotations

import json
from types import SimpleNamespace

import nccl_alone
import numpy as np
import pytest
from test_cuda_distributed import Nccl, made

from minidl.runtime.comm import nccl


@pytest.fixture
def device(monkeypatch):
    found = made(0)
    monkeypatch.setattr(nccl_alone.devices, "get", lambda name: found)
    monkeypatch.setattr(nccl_alone, "COUNTS", (1, 100))
    monkeypatch.setattr(nccl_alone, "HELD", 4096)
    return found


def test_bits_of_one_rank(device, monkeypatch, tmp_path):
    library, out = Nccl(), tmp_path / "nccl.json"
    monkeypatch.setattr(nccl, "library", lambda: library)
    assert nccl_alone.main(["--out", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [(row["transfer"], row["bytes"]) for row in rows] == [
        (name, size) for size in (4, 400) for name in ("all-reduce", "send and receive")]
    assert all(row["equal_bits"] for row in rows)
    read = device.read
    monkeypatch.setattr(device, "read", lambda array: read(array) + np.float32(1))
    assert nccl_alone.main(["--out", str(out)]) == 1
    assert not json.loads(out.read_text())["passed"]


def test_missing_nccl_is_one_line(device, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(nccl, "library", lambda: SimpleNamespace(available=False))
    out = tmp_path / "nccl.json"
    assert nccl_alone.main(["--out", str(out)]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("NCCL is missing: rank 0 has no NCCL")
    assert "missing" in json.loads(out.read_text())
