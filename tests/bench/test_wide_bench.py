"""The benchmark of wide tasks: gains by the number of cores, and networks beside torch."""


import numpy as np
import pytest
import wide
from helpers import torch_or_skip

from minidl import models


@pytest.mark.parametrize("cores", [(2, 4), pytest.param(wide.CORES, marks=pytest.mark.slow)])
def test_chosen_widths_are_never_predicted_slower_than_whole_tasks_or_one_core(monkeypatch, cores):
    monkeypatch.setattr(wide, "CORES", cores)
    monkeypatch.setattr(wide, "CASES", {"small": (lambda: models.mlp(16, 32, 32, 10), (32, 16), 0)})
    gains = wide.scaling("small", 0.04)["speedup"]
    assert [*gains] == [*wide.SCALED]
    assert [*gains["whole tasks"]] == ["1", *map(str, wide.CORES)]
    for count, whole in gains["whole tasks"].items():
        assert gains["widths chosen"][count] >= whole >= 0.999


@pytest.mark.slow
def test_a_network_beside_torch_has_a_ratio():
    torch_or_skip()
    entry = wide.against_torch(wide.beside_torch()["lenet, batch 64"](), 0.02)
    assert entry["minidl / torch"]["n"] >= 5
    assert entry["predicted_ms"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vgg, batch 32", "unet, batch 8", "unet, batch 1",
                                  "mlp 1024-2048-2048-10, batch 256"])
def test_both_sides_of_a_network_beside_torch_say_the_same(name: str):
    torch_or_skip()
    graph, _, step, outputs = wide.beside_torch()[name]()
    mine, theirs = outputs()
    np.testing.assert_allclose(mine, theirs, rtol=1e-3, atol=1e-3 * float(np.abs(theirs).max()))
    assert step() > 0
    assert len(graph) > 10
