"""The report on hidden exchanges: tasks that wait take about as long as predicted; the table has a row for each arm."""


import exchanges
import tables
from helpers import deadline

from minidl.runtime.bound import Bound
from minidl.runtime.communication import Communication


def test_a_short_record(monkeypatch):
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
