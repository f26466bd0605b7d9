"""The ladder of rungs on a runtime without a GPU: the whole path from networks to the record, and what is checked on it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import cuda_runtime
import pytest
from helpers import torch_or_skip

import minidl as ml
from minidl.cuda import device as cuda_devices

BENCH = Path(__file__).parent.parent / "bench"
sys.path.insert(0, str(BENCH))

import ladder  # noqa: E402

SHORT = ladder.Effort(seconds=0, warm_up=0, group=2, groups=2, steps=3, single=2)
TINY = {"tiny": ladder.Case("densenet121", {"preset": "tiny"}, 2)}
OPTIONS: dict[str, Any] = {"effort": SHORT, "costs": lambda graph, device: ml.CostModel.analytic(), "torch_on": None}


@pytest.fixture
def device(monkeypatch):
    made = cuda_runtime.device(3)
    monkeypatch.setitem(cuda_devices._devices, 0, made)
    return made


def entry_with(**correct: Any) -> dict[str, Any]:
    return {"correct": {"equal_bits": True, "finite": True, **correct}, "left_out": {}, "finished": True}


def test_all_rungs_are_trained_compared_and_timed_in_turn(device, tmp_path):
    path = tmp_path / "record.json"
    ladder.climb(TINY, device, {"commit": "c"}, str(path), **OPTIONS)
    record = json.loads(path.read_text())
    assert record["name"] == "ladder"
    assert record["failed"] == {}
    entry = record["networks"]["tiny"]
    assert entry["correct"]["rungs"] == list(ladder.PLAIN)
    assert entry["correct"]["equal_bits"]
    assert entry["finished"]
    assert record["passed"]
    rungs = [*ladder.PLAIN, *ladder.FUSED]
    for key in ("step_ms", "host_us", "ready_s", "peak_bytes", "about"):
        assert list(entry[key]) == rungs
    assert all(s["n"] == SHORT.groups for s in entry["step_ms"].values())
    assert {"E0a in_order / E0b multi_stream", "E0a in_order / E0b multi_region", "E1 in_order / E2 multi_stream",
            "E1 in_order / E2 multi_region", "E0a in_order / E1 in_order"} <= entry["ratios"].keys()
    assert entry["minidl"] == "E3 multi_region"
    assert record["summary"]["E1 in_order / E2 multi_region"]["networks"] == 1
    assert "left out: torch: not asked for" in ladder.shown("tiny", entry)


def test_a_rung_with_other_bits_is_noticed(device, monkeypatch):
    rung = ladder.Ours.rung

    def other(self: Any, schedule: Any, lanes: Any, change: Any) -> Any:
        made, model = rung(self, schedule, lanes, change)
        if lanes is ladder.GraphExecutor:
            next(iter(model.parameters())).assign(0.5)
        return made, model

    monkeypatch.setattr(ladder.Ours, "rung", other)
    monkeypatch.setattr(ladder, "PLAIN", ("E0a in_order", "E1 in_order"))
    monkeypatch.setattr(ladder, "FUSED", ())
    entry = ladder.climbed(TINY["tiny"], device, **OPTIONS)
    assert not entry["correct"]["equal_bits"]
    assert not ladder.passed(entry)


def test_a_rung_that_fails_is_left_out_and_the_others_are_measured(device, monkeypatch):
    def broken(self: Any, *arguments: Any) -> Any:
        raise RuntimeError("no graphs\ntoday")

    monkeypatch.setattr(cuda_devices.Cuda, "captured", broken)
    entry = ladder.climbed(TINY["tiny"], device, **OPTIONS)
    assert list(entry["step_ms"]) == [name for name in ladder.PLAIN if name.startswith("E0")]
    assert entry["left_out"]["E1 in_order"] == "RuntimeError: no graphs today"
    assert entry["correct"]["equal_bits"]
    assert not ladder.passed(entry)


def test_torch_is_held_against_float64_and_timed_beside(device, monkeypatch):
    torch = torch_or_skip()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr(ladder, "PLAIN", ("E0a in_order",))
    monkeypatch.setattr(ladder, "FUSED", ())
    try:
        case = ladder.Case("mobilenet_v3_large", {"preset": "tiny"}, 2)  # it has a dropout, which the comparison leaves out
        entry = ladder.climbed(case, device, **{**OPTIONS, "torch_on": "cpu"}, compile_too=False, tf32=False)
    finally:
        torch.set_num_threads(threads)
    found = entry["correct"]["losses"]
    assert found["agrees"]
    assert len(found["float64"]) == found["steps"] == 3
    assert list(entry["step_ms"]) == ["E0a in_order", "B0 eager", "B1 tuned"]
    assert entry["about"]["B1 tuned"]["memory_format"] in ("contiguous", "channels_last")
    assert "B2 graph" in entry["left_out"]
    assert entry["fastest_torch"] == "B1 tuned"
    assert entry["fair"] == entry["ratios"]["B1 tuned / E0a in_order"]
    assert ladder.passed(entry)


@pytest.mark.parametrize("wrong", [{"equal_bits": False}, {"finite": False}, {"fused_agrees": False}, {"losses": {"agrees": False}}])
def test_each_check_counts(wrong):
    assert ladder.passed(entry_with())
    assert not ladder.passed(entry_with(**wrong))


def test_a_record_is_gone_on_with_and_a_failure_is_one_networks_own(device, tmp_path, monkeypatch):
    path, climbed = str(tmp_path / "record.json"), []
    cases = dict.fromkeys(("one", "two", "three"), TINY["tiny"])

    def part(case: Any, device: Any, *, keep: Any, left: Any, **options: Any) -> dict[str, Any]:
        climbed.append(len(climbed))
        if len(climbed) == 2:
            raise RuntimeError("out of\nmemory")
        entry = {**entry_with(), "finished": len(climbed) != 1, "ratios": {"a / b": {"median": 2.0 ** len(climbed)}}}
        keep(entry)
        return entry

    monkeypatch.setattr(ladder, "climbed", part)
    monkeypatch.setattr(ladder, "shown", lambda label, entry: label)
    record = ladder.climb(cases, device, {"commit": "c"}, path)
    assert record["failed"] == {"two": "RuntimeError: out of memory"}
    assert not record["passed"]
    assert list(record["networks"]) == ["one", "three"]
    assert record["summary"]["a / b"] == {"geometric_mean": 4.0, "worst": 2.0, "networks": 2}
    again = ladder.climb(cases, device, {"commit": "c"}, path, resume=True)
    assert list(again["networks"]) == ["one", "three", "two"]
    assert len(climbed) == 5, "two, which failed, and one, which was not finished"
    assert again["passed"]
    ladder.climb(cases, device, {"commit": "another"}, path, resume=True, budget=0)
    assert len(climbed) == 5, "no time"
    ladder.climb(cases, device, {"commit": "another"}, path, resume=True)
    assert len(climbed) == 8, "nothing of another commit is kept"


def test_without_a_gpu_it_says_so_in_one_line():
    try:
        ml.device.get("cuda")
    except ml.DeviceError:
        done = subprocess.run([sys.executable, str(BENCH / "ladder.py")], capture_output=True, text=True, timeout=60)
        assert done.returncode == 2
        assert done.stderr.startswith("ladder: ")
        assert len(done.stderr.splitlines()) == 1
    else:
        pytest.skip("there is a GPU here")
