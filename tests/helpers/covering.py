"""Fewer settings that show as much: a promise about combinations needs each pair of choices, not each combination."""

from __future__ import annotations

from itertools import combinations
from typing import Any


def covering(settings: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Some of the settings, in their order, with each pair of choices that any of all has; to leave a name out is a
    choice. The next one taken is always the one that has most pairs that are not yet there."""
    names = sorted({name for setting in settings for name in setting})
    missing = {i: set(combinations([(name, repr(setting.get(name))) for name in names], min(2, len(names))))
               for i, setting in enumerate(settings)}
    taken = []
    while missing:
        best = max(missing, key=lambda i: len(missing[i]))
        taken.append(best)
        there = missing[best]
        missing = {i: left for i, pairs in missing.items() if (left := pairs - there)}
    return [settings[i] for i in sorted(taken)]
