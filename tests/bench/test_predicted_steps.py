"""The benchmark of what a user is told about time: its commands are those of a user, and it loses no run."""

from __future__ import annotations

import json

import predicted_steps as bench
import pytest
import tables

from minidl.cli.parser import parse


@pytest.mark.parametrize("kind", bench.KINDS)
@pytest.mark.parametrize("network", bench.NETWORKS)
def test_every_command_is_one_that_minidl_takes(kind, network):
    found = dict(bench.commands(kind, network))
    assert [policy for policies in found for policy in policies] == [*bench.KINDS[kind]]
    for command in found.values():
        before, _, words = command.partition("minidl ")
        assert before in ("", "mpiexec -n 2 ")
        assert parse(words.split()).json


def record(scheduler, predicted, taken):
    return {"scheduler": scheduler, "predicted_step_ms": predicted, "remarks": [],
            "step_ms": {"median": taken, "p10": taken, "p90": taken}, "diagnosis": {"reasons": ["a reason"]}}


@pytest.fixture
def runs(call, monkeypatch, tmp_path):
    """Runs that take no time, of which the second pipeline was disturbed; a function that makes the record."""
    ran = []

    def run(command):
        ran.append(command)
        if "compare" in command:
            return [record(policy, 10.0, 10.0) for policy in bench.KINDS["one device"]], 0.0
        if command.endswith("broken"):
            raise RuntimeError(command)
        policy = command.split("--scheduler ")[1].split()[0]
        return [record(policy, 9.0, 10.0)], 0.5 * ("one_f_one_b" in command)

    monkeypatch.setattr(bench, "run", run)
    path = tmp_path / "record.json"

    def make(*flags):
        call(bench, "--network", "LeNet", "--out", path, *flags)
        return json.loads(path.read_text())

    return make, ran


def test_a_record_is_made_in_parts_and_has_median_and_worst(runs, capsys):
    make, ran = runs
    first = make("--kind", "one device")
    assert first["summary"]["one device"] == {"median": 0.0, "worst": 0.0, "n": 3}
    whole = make()
    assert len(ran) == 1 + 3 + 6, "what the record has does not run again"
    assert whole["summary"]["pipeline"] == {"median": 0.1, "worst": 0.1, "n": 6}
    assert whole["summary_undisturbed"]["pipeline"]["n"] == 5
    make("--again", "disturbed")
    assert len(ran) == 11
    assert "one_f_one_b" in ran[-1]
    assert "all: median 10.0%, worst 10.0% of 12" in capsys.readouterr().out
    rows = list(tables.predicted_steps(whole))
    assert any("one_f_one_b -10.0% *" in found for _, found, _ in rows)
    assert rows[-1][1] == "median 10.0%, worst 10.0% of 12 runs; without disturbed ones 10.0%, 10.0% of 11"


def test_a_command_that_fails_is_named():
    with pytest.raises(RuntimeError, match=r"minidl compare --model nothing: .*nothing"):
        bench.run("minidl compare --model nothing")
