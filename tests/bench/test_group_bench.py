"""The benchmark of groups: its arms run in turn, and the table has a row for each but the first."""


import group
import tables
from helpers import ROOT, deadline


def test_a_short_record(monkeypatch):
    monkeypatch.setattr(group, "GROUP", 1e-4)
    here = str(ROOT)
    with deadline():
        found = group.measured(group.NETWORKS[0], {"none": (here, "none"), "groups of 4": (here, "4")}, 0.1)
    assert [arm["groups"] for arm in found.values()] == [0, 4]
    assert all(arm["ms"]["median"] > 0 for arm in found.values())
    assert found["none"]["faster"]["median"] == 1
    rows = [*tables.group({"networks": {"a network": found}})]
    assert [row[0] for row in rows] == ["a network: none / groups of 4, 4 groups"]
