"""The table of kernels on a CUDA runtime without a GPU: its rows, its failures and its record."""

from __future__ import annotations

import json

import cuda_runtime
import kernel_table
import numpy as np
import pytest
from kernel_table import Case

from minidl.kernels import KERNELS


@pytest.fixture
def device(monkeypatch):
    made = cuda_runtime.device()
    monkeypatch.setattr(made.driver, "describe", lambda: {"name": "none", "capability": 90, "memory_bytes": 0,
                                                          "driver": 0})
    monkeypatch.setattr(kernel_table, "COPIED", 4096)
    monkeypatch.setattr(kernel_table, "SIDES", dict.fromkeys(kernel_table.MODES, 16))
    monkeypatch.setattr(kernel_table.devices, "get", lambda asked: made if isinstance(asked, str) else asked)
    return made


def cases(monkeypatch, *found):
    monkeypatch.setattr(kernel_table, "small", lambda: [case for case in found if case.small])
    monkeypatch.setattr(kernel_table, "large", lambda: [case for case in found if not case.small])


def record(path):
    return json.loads(path.read_text())


def test_rows_of_a_few_kernels(device, monkeypatch, tmp_path, capsys):
    chosen = [case for case in kernel_table.small() if case.kernel in ("relu", "softmax", "sgd", "argmax")]
    cases(monkeypatch, *chosen, Case("matmul", "8x8", kernel_table.arrays((8, 8), (8, 8)), {}, ("float32", "tf32")),
          Case("add", "64", kernel_table.arrays((64,), (64,)), {}, ("bfloat16",)))
    out = tmp_path / "table.json"
    assert kernel_table.main(["--out", str(out)]) == 0, capsys.readouterr()
    found = record(out)
    assert (found["complete"], found["passed"], len(found["rows"])) == (True, True, 7)
    for row in found["rows"]:
        assert row["relative_error"] <= row["limit"]
        assert row["bits_repeat"]
    text = capsys.readouterr().out
    assert "7 of 7 rows passed" in text
    assert kernel_table.main(["--out", str(out), "--only", "tf32"]) == 0
    assert [row["kernel"] for row in record(out)["rows"]] == ["matmul"]


def test_there_is_a_small_example_of_every_kernel():
    ours = {n for n, k in KERNELS.items() if k._cuda is not None and k.reference.__module__.startswith("minidl.")}
    assert {case.kernel for case in kernel_table.small()} == ours  # other tests register kernels of users


def test_nan_and_bits_that_differ_do_not_pass(device, monkeypatch, tmp_path, capsys):
    case = Case("relu", "8", kernel_table.arrays((8,)))
    cases(monkeypatch, case)
    run, turn = kernel_table.Bound.run, iter(range(100))
    monkeypatch.setattr(kernel_table.Bound, "run", lambda self: [a + np.float32(next(turn) * 1e-7)
                                                                 for a in run(self)])
    assert kernel_table.main(["--out", str(tmp_path / "a.json")]) == 1
    assert "DIFFER" in capsys.readouterr().out
    monkeypatch.setattr(kernel_table.Bound, "run", lambda self: [np.full_like(a, np.nan) for a in run(self)])
    assert kernel_table.main(["--out", str(tmp_path / "a.json")]) == 1
    (row,) = record(tmp_path / "a.json")["rows"]
    assert (row["relative_error"], row["bits_repeat"], row["passed"]) == (None, True, False)


def test_a_kernel_that_fails_is_a_row_and_a_broken_gpu_ends_the_run(device, monkeypatch, tmp_path, capsys):
    good = Case("relu", "small", kernel_table.arrays((8,)))
    bad = Case("matmul", "8x8 by 7x8", kernel_table.arrays((8, 8), (8, 8)), {"unknown": 1})
    last = Case("relu", "16", kernel_table.arrays((16,)))
    cases(monkeypatch, good, bad, last)
    out = tmp_path / "table.json"
    assert kernel_table.main(["--out", str(out)]) == 1
    found = record(out)
    assert [row["passed"] for row in found["rows"]] == [True, False, True]
    assert found["complete"]
    assert "unknown" in found["rows"][1]["error"]
    monkeypatch.setattr(kernel_table, "usable", lambda device: False)
    assert kernel_table.main(["--out", str(out)]) == 1
    found = record(out)
    assert (len(found["rows"]), found["complete"], found["passed"]) == (2, False, False)
    assert "not complete" in capsys.readouterr().out
