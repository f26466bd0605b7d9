"""Shares of a step by kernel family and of waiting: they fill the lanes' time, on the CPU and on the stand-in GPU."""

from __future__ import annotations

import json

import cuda_runtime
import pytest
import shares
from ladder_cases import Case

from minidl.devices.cuda import device as devices

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


@pytest.fixture
def wrong(monkeypatch):
    """Runs the command, which says what is wrong."""
    def call(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["shares.py", *arguments])
        return shares.main()

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


@pytest.mark.parametrize("text", ["", "[1]", "{}", '{"networks": [1]}'])
def test_a_file_that_is_no_record_is_left_alone(wrong, tmp_path, capsys, text):
    """The command would go on with it, and write over it."""
    path = tmp_path / "other.json"
    path.write_text(text)
    assert wrong("--device", "cpu", "--out", str(path)) == 2
    said = f"shares: {path} is no record of this program, which would go on; give another --out\n"
    assert capsys.readouterr().err == said
    assert path.read_text() == text


@pytest.mark.parametrize(("name", "message"), [
    ("nothing", "unknown scheduler 'nothing' for one device; similar names: multi_region"),
    ("a.py:f", "a.py: no such file")])
def test_an_unknown_scheduler_is_one_line_before_any_network(wrong, monkeypatch, capsys, name, message):
    monkeypatch.setattr(shares, "traced", None)
    assert wrong("--device", "cpu", "--scheduler", name, "--out", "no/file.json") == 2
    assert capsys.readouterr().err == f"shares: {message}\n"
