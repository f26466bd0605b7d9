"""The benchmark of wide tasks: gains by the number of cores, and networks beside torch."""

import sys

import pytest
from helpers import ROOT, torch_or_skip

sys.path.insert(0, str(ROOT / "bench"))

import wide

from minidl import models


def test_chosen_widths_are_never_predicted_slower_than_whole_tasks_or_one_core(monkeypatch):
    monkeypatch.setattr(wide, "CASES", {"small": (lambda: models.mlp(16, 32, 32, 10), (32, 16), 0)})
    gains = wide.scaling("small", 0.04)["speedup"]
    assert [*gains["whole tasks"]] == ["1", *map(str, wide.CORES)]
    for count, whole in gains["whole tasks"].items():
        assert gains["widths chosen"][count] >= whole >= 0.999


@pytest.mark.slow
def test_a_network_beside_torch_has_a_ratio():
    torch_or_skip()
    entry = wide.against_torch(wide.beside_torch()["lenet, batch 64"](), 0.02)
    assert entry["minidl / torch"]["n"] >= 5
    assert entry["predicted_ms"] > 0
