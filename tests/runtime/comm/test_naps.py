"""How long a rank naps while it waits for others."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from minidl.runtime import comm
from minidl.runtime.comm import LOOKS, NAP, PROMPT_NAP, Patience
from minidl.runtime.comm.flight import Flight


def rank(own_core):
    return SimpleNamespace(own_core=own_core, check=lambda: None, publish=lambda wait: None)


@pytest.mark.parametrize(("lane", "own_core", "longest"), [
    (True, True, PROMPT_NAP), (True, False, NAP), (False, True, NAP), (False, False, NAP)])
def test_a_lane_with_a_core_of_its_own_naps_briefly(monkeypatch, lane, own_core, longest):
    """Where ranks share cores, or the thread that waits shares its core with a lane, naps leave the core to others."""
    patience, begin = Patience(rank(own_core), lane), time.monotonic()
    patience.wait()  # also after the system was asked to end naps on time
    assert time.monotonic() > begin
    naps = []
    patience.reset()
    monkeypatch.setattr(comm.time, "sleep", naps.append)
    for _ in range(500):
        patience.wait()
    assert max(naps) == longest
    assert naps == sorted(naps)
    patience.reset()
    patience.wait()
    assert naps[-1] == naps[0] < longest


@pytest.mark.parametrize(("own_core", "looks"), [(True, LOOKS), (False, 1)])
def test_a_lane_that_shares_its_core_looks_once_between_naps(monkeypatch, own_core, looks):
    """More looks would take the core from the ranks for which it waits."""
    seen = []
    flight_ = Flight(rank(own_core), lane=True)
    monkeypatch.setattr(flight_, "look", lambda: seen.append("look"))
    monkeypatch.setattr(comm.time, "sleep", lambda seconds: seen.append("nap"))
    flight_.until(lambda: seen.count("nap") == 3, (1,), "a message")
    assert seen == [*["look"] * looks, "nap"] * 3
