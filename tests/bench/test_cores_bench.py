"""The benchmark of all cores: lanes beside processes that keep cores busy."""

import os
from pathlib import Path

import cores
import pytest
from helpers import torch_or_skip

from minidl import models


def children() -> set[str]:
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


def test_cores_are_busy_only_while_lanes_are_timed():
    before = children()
    with pytest.raises(KeyError), cores.busy_cores():
        assert len(children() - before) == len(os.sched_getaffinity(0))
        raise KeyError
    assert children() == before


@pytest.mark.slow
def test_two_lanes_on_busy_cores_have_a_ratio_to_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cores, "CASES", {"small": (lambda: models.mlp(16, 32, 32, 10), (32, 16), 0)})
    monkeypatch.setattr(cores, "QUANTUM", 0.01)
    assert cores.under_load("small", 0.05)["two lanes / one lane"]["n"] >= 5


@pytest.mark.slow
def test_a_network_has_a_ratio_to_torch_for_each_number_of_threads():
    torch_or_skip()
    entry = cores.beside_torch(cores.BESIDE["GRU, 28 x 128, batch 64"](), 0.05)
    assert min(entry["one lane / one thread"]["n"], entry["two lanes / two threads"]["n"]) >= 5
