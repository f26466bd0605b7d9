"""Every policy's plans, with every choice besides the order, say what they said before: `tests/helpers/golden_plans.py`
has the grid, and writes `plans.json` again if a plan shall change."""

from __future__ import annotations

import json
from importlib.util import find_spec

import golden_plans
import pytest

CASES = dict(golden_plans.cases())
KNOWN = json.loads(golden_plans.FILE.read_text())


def test_the_record_has_all_plans() -> None:
    assert KNOWN.keys() == CASES.keys()


@pytest.mark.parametrize("share", [240, pytest.param(24, marks=pytest.mark.slow),
                                   pytest.param(1, marks=pytest.mark.campaign)])
def test_plans_are_those_of_the_record(share: int) -> None:
    """One of `share` plans, of pipelines on given times 30 times as many."""
    names = [name for i, name in enumerate(CASES)
             if i % (max(1, share // 30) if name.startswith("times/") else share) == 0]
    if not find_spec("ortools"):  # which proves the optima
        names = [name for name in names if "/optimal/" not in name]
    changed = [name for name in names if golden_plans.fingerprint(CASES[name]) != KNOWN[name]]
    assert not changed
