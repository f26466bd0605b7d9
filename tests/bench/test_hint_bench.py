"""The report on hints: tasks that wait take about as long as simulated, and the table has a row for each arm."""


import hint
import tables
from helpers import deadline

from minidl.runtime.bound import Bound


def test_a_short_record(monkeypatch):
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
