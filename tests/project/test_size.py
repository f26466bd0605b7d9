"""The engine may shrink, and grows only if somebody raises a number here, with a reason."""

from __future__ import annotations

import inspect
from pathlib import Path

from minidl.passes.sweeps import BACKWARD, newton
from minidl.runtime import clocks, gossip, race, replica
from minidl.schedulers.registry import SCHEDULERS, OnAllRanks, Policy

ROOT = Path(__file__).parents[2]
ENGINE = [path for room in ("minidl", "schedulers") for path in (ROOT / room).rglob("*.py")]
LINES = 52_404
LONGEST = 650  #: of one file
#: lower these when files shrink


def test_the_engine_stays_in_its_budget():
    lengths = {path.relative_to(ROOT): len(path.read_text().splitlines()) for path in ENGINE}
    assert sum(lengths.values()) <= LINES
    assert {path: n for path, n in lengths.items() if n > LONGEST} == {}


OF_A_METHOD = 150  #: lines of a file


def test_each_approximate_or_asynchronous_method_is_in_short_files():
    """Its policy, the pass that makes its step, its runtime: each file has one idea."""
    parts = [*BACKWARD.values(), newton, clocks, gossip, race, replica]
    for scheduler in SCHEDULERS.values():
        if not scheduler.exact:
            own = scheduler.function
            parts += [own.order if isinstance(own, OnAllRanks | Policy) else own]
            parts += [scheduler.rewrite] if scheduler.rewrite else []
    files = {Path(inspect.getsourcefile(part)) for part in parts}
    assert len(files) > 12
    assert {path.name: n for path in files if (n := len(path.read_text().splitlines())) > OF_A_METHOD} == {}
