"""Nodes of a step's graph: the record has as many as are counted, and a change may only make them fewer."""

from __future__ import annotations

from collections import Counter

import nodes
import pytest
from helpers import results

RECORD = results("nodes")["networks"]


@pytest.mark.few(2)
@pytest.mark.parametrize("label", nodes.NETWORKS)
def test_there_are_no_more_than_recorded(label: str) -> None:
    found, recorded = nodes.counted(label), RECORD[label]["now"]
    for name in ("plain", "fused"):
        assert found[name]["nodes"] <= recorded[name]["nodes"]
        assert found[name]["floor_ms"] <= recorded[name]["floor_ms"]
    assert recorded["fused"]["nodes"] <= RECORD[label]["before"]["fused"]["nodes"]


def test_what_is_counted() -> None:
    """An MLP of three layers: its products are counted by hand."""
    plain, _ = nodes.steps("MLP")
    found = nodes.count(plain)
    assert found["product"] == 3 + 2 + 3
    assert found["nodes"] == sum(found[name] for name in nodes.FLOORS)
    assert found["floor_ms"] == pytest.approx((8 * 4.1 + found["own"] * 1.22) / 1e3, abs=1e-4)
    assert Counter(kernel for kernel, _ in nodes.calls(plain.launches))["sgd"] == 6


def test_least_times() -> None:
    _, fused = nodes.steps("MLP")
    one, beside = nodes.count(fused)["floor_ms"], nodes.beside(fused)
    assert beside < one
    found = nodes.in_launches(16)
    assert found["device"] < found["expected"] < found["seen"]
    assert nodes.in_launches(1)["expected"] == found["host"]
