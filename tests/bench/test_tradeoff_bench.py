"""The report on accuracy against predicted time: its commands are understood, and lateness is counted."""

import json
import sys
from typing import Any

import pytest
from helpers import ROOT

sys.path.insert(0, str(ROOT / "bench"))

import tradeoff

from minidl.core.tasks import parse_task
from minidl.runtime.version_log import VersionRead

RECORD = json.loads((ROOT / "bench" / "results" / "tradeoff.json").read_text())


def test_lateness_of_a_log_by_hand():
    """The second gradient of a step with two updates changes the version after the one that it read; the first rank
    mixes in a layer in between."""
    def entry(task, version, **told):
        return VersionRead(0, parse_task(task), version, 1, **told)

    log = [entry("1F0", 0), entry("1F1", 0), entry("1U0", 1), entry("1U1", 2)]
    assert tradeoff.lateness(log) == 0.5
    mixed = [*log[:3], entry("1U0", 2, source=1), entry("1U1", 3)]
    assert tradeoff.lateness(mixed) == 1.0
    assert tradeoff.lateness([entry("1F0", 0), entry("1F1", 0), entry("1U1", 1)]) == 0, "one update of two batches"


def test_the_record_has_every_point_and_replays_were_equal():
    assert {name: [*network["points"]] for name, network in RECORD["networks"].items()} == {
        name: [point.name for point in network.points] for name, network in tradeoff.NETWORKS.items()}
    for name, network in tradeoff.NETWORKS.items():
        for point in network.points:
            found = RECORD["networks"][name]["points"][point.name]
            assert found["train"] == f"minidl {point.train(network)}"
            assert (found["replayed"] is True) == any(each in point.flags for each in tradeoff.REPLAYED)


def test_a_predicted_time_is_that_of_the_record():
    network = tradeoff.NETWORKS["digits"]
    for point in network.points[:2]:
        step = tradeoff.command(point.plan(network))["predicted_step_ms"]
        assert step == pytest.approx(RECORD["networks"]["digits"]["points"][point.name]["step_ms"], rel=1e-6)


def small(*points: tuple[str, str]) -> tradeoff.Network:
    """Two steps of these methods, (name, flags)."""
    return tradeoff.Network("--data digits --model mlp --lr 0.1", 128, "accuracy", 1,
                            tuple(tradeoff.Point(name, flags, 64) for name, flags in points))


def test_a_run_that_diverges_has_no_accuracy():
    """Its loss may still be a number in its last step, and be none on test data."""
    with pytest.raises(RuntimeError, match="the loss on test data is nan"):
        tradeoff.command("train --data digits --model mlp --lr 1e20 --batch-size 64 --costs analytic --steps 1")
    network = small(("far", "--lr 1e20"))
    found = tradeoff.measured(network, network.points[0])
    assert found["accuracy"] == [None]
    record = {"networks": {"it": {"metric": "accuracy", "points": {"far": found}}}}
    assert [seen for _, _, seen, *_ in tradeoff.rows(record)] == ["diverges"]


def test_add_measures_only_points_whose_commands_are_new(monkeypatch, tmp_path):
    """It keeps other points and networks, and says which points are of which commit."""
    ran: list[str] = []
    file = tmp_path / "tradeoff.json"
    monkeypatch.setattr(tradeoff, "RESULTS", tmp_path)
    monkeypatch.setattr(tradeoff, "measured", lambda network, point: ran.append(point.name) or {
        "train": f"minidl {point.train(network)}", "accuracy": [0.5], "ms": float(len(ran)), "late": 0.0})

    def record(*flags: str, **networks: tradeoff.Network) -> dict[str, Any]:
        monkeypatch.setattr(tradeoff, "NETWORKS", networks)
        monkeypatch.setattr(sys, "argv", ["tradeoff.py", "--out", str(file), *flags])
        tradeoff.main()
        return json.loads(file.read_text())

    one, other = small(("a", ""), ("b", "--dither 1")), small(("c", ""))
    first = record(one=one, other=other)
    assert ran == ["a", "b", "c"]
    assert "added" not in first
    later = record("--add", "--only", "one", one=small(("a", ""), ("b", "--dither 2")), other=other)
    assert ran == ["a", "b", "c", "b"]
    assert later["networks"]["other"] == first["networks"]["other"]
    assert later["networks"]["one"]["points"]["a"] == first["networks"]["one"]["points"]["a"]
    assert [more["points"] for more in later["added"]] == [["one, b"]]
    assert later["machine"] == first["machine"]


def test_a_command_that_fails_says_why():
    with pytest.raises(RuntimeError, match="minidl plan --model nothing: "):
        tradeoff.command("plan --model nothing")


@pytest.mark.slow
def test_points_are_those_of_the_record():
    network = tradeoff.NETWORKS["digits"]
    for name in ("in_order", "PD-ASGD"):
        point = next(point for point in network.points if point.name == name)
        assert tradeoff.measured(network, point) == RECORD["networks"]["digits"]["points"][name]
