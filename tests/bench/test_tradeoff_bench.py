"""The report on accuracy against predicted time: its commands are understood, and lateness is counted."""

import json
from typing import Any

import numpy as np
import pytest
import tradeoff
from helpers import results

from minidl import data
from minidl.core.tasks import parse_task
from minidl.data.text import pydoc_text
from minidl.kernels import vectors
from minidl.runtime.version_log import VersionRead

RECORD = results("tradeoff")


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
            assert found["train"] in tradeoff.known(network, point)
            assert [*found.get("tries", {})] == [f"{rate:g}" for rate in point.rates(network)]
            assert (found["replayed"] is True) == any(each in point.flags for each in tradeoff.REPLAYED)


def test_a_predicted_time_is_that_of_the_record():
    network = tradeoff.NETWORKS["digits"]
    for point in network.points[:2]:
        step = tradeoff.command(point.plan(network))["predicted_step_ms"]
        assert step == pytest.approx(RECORD["networks"]["digits"]["points"][point.name]["step_ms"], rel=1e-6)


def small(*points: tuple[str, str], tries: tuple[float, ...] = ()) -> tradeoff.Network:
    """Two steps of these methods, (name, flags)."""
    return tradeoff.Network("--data digits --model mlp --lr 0.1", 128, "accuracy", 1,
                            tuple(tradeoff.Point(name, flags, 64) for name, flags in points), tries)


def test_the_rate_that_learns_most_on_held_out_data_trains():
    network = small(("exact", "--scheduler in_order"), tries=(1e-6, 1, 1e20))
    found = tradeoff.measured(network, network.points[0])
    tries = found["tries"]
    assert tries == {"1e-07": tries["1e-07"], "0.1": tries["0.1"], "1e+19": None}, "one that diverges"
    assert tries["0.1"] > tries["1e-07"]
    assert found["train"] == tradeoff.known(network, network.points[0])[1]
    assert "--lr 0.1 " in found["train"]
    assert "held_out" not in found["train"]
    assert found["accuracy"] == [tradeoff.command(found["train"].removeprefix("minidl "))["test"]["accuracy"]]


def test_held_out_samples_are_of_the_training_part():
    train, held, test = tradeoff.held_out("train")[0], tradeoff.held_out("test")[0], data.digits(split="test").dataset
    rows = {part: {x.tobytes() for x in xs} for part, xs in (("train", train), ("held", held), (
        "test", test.rows(np.arange(test.samples))[0]))}
    assert (len(train), len(held)) == (1151, 287)
    assert not rows["held"] & rows["train"]
    assert not rows["held"] & rows["test"]


def test_held_out_text_is_of_the_training_part(tmp_path):
    network = tradeoff.NETWORKS["gpt"]
    train, test = pydoc_text()
    file = tradeoff.held_out_of(network, tmp_path)
    parts = [data.load(file, batch_size=1, split=split, sequence_length=16).dataset for split in ("train", "test")]
    learned, held = (part.rows(np.arange(part.samples))[0].astype(np.uint8).tobytes() for part in parts)
    assert train.startswith(learned)
    assert train.find(held) >= len(learned)
    assert 3.9 < len(learned) / len(held) < 4.1
    assert held not in test


def test_few_bits_are_worth_more_and_a_run_that_diverges_least():
    digits, gpt = tradeoff.NETWORKS["digits"], tradeoff.NETWORKS["gpt"]
    assert digits.worth(0.9) > digits.worth(0.1) > digits.worth(None)
    assert gpt.worth(3.9) > gpt.worth(4.0) > gpt.worth(20000.0) > gpt.worth(None)


def test_a_run_that_diverges_has_no_accuracy():
    """Its loss may still be a number in its last step, and be none on test data."""
    with pytest.raises(RuntimeError, match="the loss on test data is nan"):
        tradeoff.command("train --data digits --model mlp --lr 1e20 --batch-size 64 --costs analytic --steps 1")
    network = small(("far", "--lr 1e20"))
    found = tradeoff.measured(network, network.points[0])
    assert found["accuracy"] == [None]
    record = {"networks": {"it": {"metric": "accuracy", "points": {"far": found}}}}
    assert [seen for _, _, seen, *_ in tradeoff.rows(record)] == ["diverges"]


def test_add_measures_only_points_whose_commands_are_new(call, monkeypatch, tmp_path):
    """It keeps other points and networks, and says which points are of which commit."""
    ran: list[str] = []
    file = tmp_path / "tradeoff.json"
    monkeypatch.setattr(tradeoff, "RESULTS", tmp_path)
    monkeypatch.setattr(tradeoff, "measured", lambda network, point: ran.append(point.name) or {
        "train": tradeoff.known(network, point)[-1], "accuracy": [0.5], "ms": float(len(ran)), "late": 0.0})

    def record(*flags: str, **networks: tradeoff.Network) -> dict[str, Any]:
        monkeypatch.setattr(tradeoff, "NETWORKS", networks)
        call(tradeoff, "--out", file, *flags)
        return json.loads(file.read_text())

    one, other = small(("a", ""), ("b", "--dither 1"), tries=(1, 2)), small(("c", ""))
    first = record(one=one, other=other)
    assert ran == ["a", "b", "c"]
    assert "added" not in first
    later = record("--add", "--only", "one", one=small(("a", ""), ("b", "--dither 2"), tries=(1, 2)), other=other)
    assert ran == ["a", "b", "c", "b"], "the rate of a is one of those to try"
    assert later["networks"]["other"] == first["networks"]["other"]
    assert later["networks"]["one"]["points"]["a"] == first["networks"]["one"]["points"]["a"]
    assert [more["points"] for more in later["added"]] == [["one, b"]]
    assert later["machine"] == first["machine"]


def test_a_command_that_fails_says_why():
    with pytest.raises(RuntimeError, match="minidl plan --model nothing: "):
        tradeoff.command("plan --model nothing")


@pytest.mark.slow
@pytest.mark.may_skip
@pytest.mark.skipif(not vectors.WIDE, reason="without AVX-512 products have other bits than in the record")
def test_a_point_is_that_of_the_record():
    network = tradeoff.NETWORKS["digits"]
    point = next(point for point in network.points if point.name == "PD-ASGD")
    assert tradeoff.measured(network, point) == RECORD["networks"]["digits"]["points"]["PD-ASGD"]
