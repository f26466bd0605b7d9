"""Fewer settings that show as much: a promise about combinations needs each pair of choices, not each combination."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

import pytest


def covering(settings: list[dict[str, Any]], first: int = 0) -> list[dict[str, Any]]:
    """Some of the settings, in their order, with each pair of choices that any of all has; to leave a name out is a
    choice. The first ones are taken; the next one is always the one that has most pairs that are not yet there."""
    names = sorted({name for setting in settings for name in setting})
    missing = {i: set(combinations([(name, repr(setting.get(name))) for name in names], min(2, len(names))))
               for i, setting in enumerate(settings)}
    taken = list(range(first))
    there = set[Any]().union(*(missing[i] for i in taken))
    while missing := {i: left for i, pairs in missing.items() if (left := pairs - there)}:
        best = max(missing, key=lambda i: len(missing[i]))
        taken.append(best)
        there = missing[best]
    return [settings[i] for i in sorted(taken)]


def pairs(few: int = 0, **values: Sequence[Any]) -> tuple[str, list[Any]]:
    """Of several parameters, names and rows for `parametrize`. The default run has every value once, or `few` rows; the
    other rows, which add pairs of values that are not there yet, are `wide`."""
    count = few or max(map(len, values.values()))
    rows = [{name: own[i % len(own)] for name, own in values.items()} for i in range(count)]
    rows += [dict(zip(values, row, strict=True)) for row in product(*values.values())]
    return ",".join(values), [pytest.param(*row.values(), marks=[pytest.mark.wide] if i >= count else [])
                              for i, row in enumerate(covering(rows, count))]
