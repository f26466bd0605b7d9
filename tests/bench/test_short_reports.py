"""Reports on what a rank or a lane waits for: short records have what their tables show."""

from __future__ import annotations

import subprocess
import sys

import exchanges
import group
import hint
import messages
import patience
import pytest
import tables
from helpers import BENCH, PATIENCE, ROOT, deadline, results
from launcher import under_mpi

from minidl.runtime.bound import Bound
from minidl.runtime.communication import Communication


# ---------------------------------------------------------------------------------------------------------------- hints
def test_tasks_that_wait_take_about_as_long_as_simulated(monkeypatch):
    monkeypatch.setattr(Bound, "thunks", Bound.thunks)  # which it replaces
    monkeypatch.setattr(hint, "FORWARD", 1e-4)
    with deadline():
        arms = hint.summary(hint.measured(2, 4, 2, hint.Times()))
    assert list(arms) == ["own", "fixed", "hint", "hint, own cap"]
    assert all(a["measured_ms"]["median"] > 0 for a in arms.values())
    assert arms["own"]["simulated_ratio"]["median"] == 1
    assert arms["hint"]["simulated_ms"]["median"] <= arms["own"]["simulated_ms"]["median"]
    rows = [*tables.hint({"settings": [{"ranks": 2, "micro_batches": 4, "arms": arms}]})]
    assert [row[0] for row in rows] == [f"2 ranks, 4 micro-batches: {words} / 1F1B's order" for words in (
        "the order at the cap 2p - s", "a hint at the cap 2p - s", "a hint at 1F1B's own cap")]


# ------------------------------------------------------------------------------------------------------------ exchanges
def test_exchanges_are_hidden_as_predicted(monkeypatch):
    monkeypatch.setattr(Bound, "thunks", Bound.thunks)  # which it replaces
    monkeypatch.setattr(Communication, "exchanged", Communication.exchanged)
    monkeypatch.setattr(exchanges, "EXPERTS", 1e-4)
    with deadline():
        found = exchanges.measured(2, 1.0, 2, exchanges.Times())
    assert found["bits"]
    arms = exchanges.summary(found)
    assert list(arms) == ["in order", "weights", "two_batches"]
    assert all(a["measured_ms"]["median"] > 0 for a in arms.values())
    assert arms["weights"]["predicted_ratio"] <= 0.8
    assert arms["two_batches"]["predicted_ratio"] < arms["weights"]["predicted_ratio"]
    rows = [*tables.exchanges({"settings": [{"ranks": 4, "exchange": 1.0, "arms": arms}]})]
    assert [row[0] for row in rows] == [f"4 ranks, an exchange of 1 experts: {words} / in order" for words in (
        "weight gradients hide exchanges", "two halves in turn")]
    assert [row[2] for row in rows] == ["<= 0.80x, within 5 %", "-"]


# --------------------------------------------------------------------------------------------------------------- groups
@pytest.mark.slow
def test_arms_of_groups_run_in_turn(monkeypatch):
    monkeypatch.setattr(group, "GROUP", 1e-4)
    here = str(ROOT)
    with deadline():
        found = group.measured(group.NETWORKS[0], {"none": (here, "none"), "groups of 4": (here, "4")}, 0.1)
    assert [arm["groups"] for arm in found.values()] == [0, 4]
    assert all(arm["ms"]["median"] > 0 for arm in found.values())
    assert found["none"]["faster"]["median"] == 1
    rows = [*tables.group({"networks": {"a network": found}})]
    assert [row[0] for row in rows] == ["a network: none / groups of 4, 4 groups"]


# ------------------------------------------------------------------------------------------------------------- messages
RECORD = results("messages")


def test_the_record_has_every_row_and_nothing_got_worse():
    assert {row["network"] for row in RECORD["only_new"]} == {*messages.JOINING}
    for row in RECORD["only_new"]:
        assert all(row["after"][way] <= row["before"][way] for way in ("forward", "backward"))
    for what, (_, policies) in messages.CHOICES.items():
        assert [(row["scheduler"], row["ranks"]) for row in RECORD[what]] == [(p, n) for p in policies for n in (2, 4)]
    for row in RECORD["fill"]:
        first, *others = row["arms"].values()
        assert all(arm["predicted_waits"] <= first["predicted_waits"] for arm in others)


def test_steps_are_predicted_again_as_in_the_record():
    again = messages.arms("fill", "one_f_one_b", 2, 0)
    wanted = next(row for row in RECORD["fill"] if (row["scheduler"], row["ranks"]) == ("one_f_one_b", 2))["arms"]
    assert {name: arm["predicted_ms"] for name, arm in again.items()} == {
        name: arm["predicted_ms"] for name, arm in wanted.items()}


# -------------------------------------------------------------------------------------------------------------- watches
def test_each_kind_of_lanes_has_a_row_with_its_own_error() -> None:
    rows = patience.measure(2)
    assert [row["lanes"] for row in rows] == ["native", "python"]
    for row in rows:
        assert row["step_us"] > 0
        assert all(len(row[name]) == 3 and min(row[name]) > 0 for name in ("watched", "again"))


# ------------------------------------------------------------------------------------------------------------- start-up
@pytest.mark.slow
@under_mpi
def test_start_up_of_ranks_is_timed_beside_one_process() -> None:
    done = subprocess.run([sys.executable, str(BENCH / "start_up.py"), "--ranks", "2", "--runs", "1"],
                          capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    one, two = done.stdout.splitlines()
    assert one.startswith("one process   seconds ")
    assert two.startswith("2 ranks       seconds ")
    assert "  ratio " in two
