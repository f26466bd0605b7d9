"""Regions: pieces of the chain of a step, cut where its kernels change; forward and backward are cut separately.

A region is a dense block or a stage, if the units' names show them; else a piece of about equal time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from ..core.graph import TaskGraph
from ..core.tasks import Kind

MOST = 24  #: the most regions of one pass
FEWEST = 4  #: with fewer regions by names, pieces of equal time are used


@dataclass(frozen=True, slots=True)
class Region:
    """Tasks number `begin` to `end` of the chain, and their total time."""

    name: str
    begin: int
    end: int
    time: float


def regions(graph: TaskGraph, chain: Sequence[int], duration: Sequence[float]) -> list[Region]:
    """The regions of a chain (task ids) in order; together they cover it."""
    found: list[Region] = []
    for forward, part in groupby(range(len(chain)), lambda i: bool(graph.kind[chain[i]] == Kind.F)):
        for name, first, last in _cut(graph, chain, list(part), duration):
            time = sum(duration[chain[i]] for i in range(first, last))
            found.append(Region(f"{name} {'F' if forward else 'O'}".strip(), first, last, time))
    return found


def _cut(graph: TaskGraph, chain: Sequence[int], part: Sequence[int],
         duration: Sequence[float]) -> list[tuple[str, int, int]]:
    """(name, begin, end) of the regions of one pass: cut by the longest prefix of the names that gives at most MOST."""
    paths = [graph.unit_names[graph.unit[chain[i]]].split("/") if graph.unit_names else [""] for i in part]
    best: list[tuple[str, int, int]] = []
    for depth in range(1, max(map(len, paths)) + 1):
        cut, at = [], part[0]
        for name, some in groupby("/".join(path[:depth]) for path in paths):
            length = len(list(some))
            cut.append((name, at, at + length))
            at += length
        if len(cut) > MOST:
            break
        best = cut
    if len(best) >= min(FEWEST, len(part)):
        return best
    total = np.cumsum([duration[chain[i]] for i in part])
    piece = np.minimum((total - total[0]) * MOST // max(total[-1] * (1 + 1e-9), 1e-300), MOST - 1).astype(int).tolist()
    starts = [0] + [i for i in range(1, len(part)) if piece[i] != piece[i - 1]]
    return [(f"part {n}", part[0] + a, part[0] + b)
            for n, (a, b) in enumerate(zip(starts, [*starts[1:], len(part)], strict=True))]
