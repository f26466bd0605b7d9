"""The steady state of tasks that repeat for ever: the maximum cycle ratio, time to shift, over all circuits."""

from __future__ import annotations

import numpy as np

from ..core.columns import Floats, Ints, spread


def cycle_time(source: Ints, target: Ints, weight: Floats, shift: Ints | Floats) -> float:
    """The time between repetitions, where `target` of repetition i + `shift` starts at least `weight` after the start
    of `source` of repetition i.

    Ascends as Howard's algorithm does: starts below, finds a circuit that takes longer than its shifts allow, raises
    the time to its ratio, until there is no such circuit. Exact up to rounding. Every circuit must have a positive
    total shift.
    """
    nodes = int(max(source.max(), target.max())) + 1
    time = 0.0
    scale = float(weight.max())
    while True:
        gain = weight - time * shift
        distance, before = np.zeros(nodes), np.full(nodes, -1)
        for _ in range(nodes + 1):
            reach = distance[source] + gain
            best = spread(target, reach, nodes, -np.inf, np.maximum)
            better = best > distance + 1e-12 * scale
            if not better.any():
                return time
            through = np.flatnonzero(better[target] & (reach == best[target]))
            before[target[through]] = through
            distance = np.where(better, best, distance)
            if circuit := _circuit(source, before):
                ratio = weight[circuit].sum() / shift[circuit].sum()
                if ratio > time * (1 + 1e-12):
                    time = float(ratio)
                    break
        else:
            return time


def _circuit(source: Ints, before: Ints) -> list[int]:
    """The edges of a circuit formed by the chosen edge into each node; empty without one."""
    seen = np.zeros(len(before), np.int64)
    for start in range(len(before)):
        node, mark = start, start + 1
        while before[node] >= 0 and not seen[node]:
            seen[node] = mark
            node = int(source[before[node]])
        if before[node] >= 0 and seen[node] == mark:
            edges: list[int] = []
            at = node
            while not edges or at != node:
                edges.append(int(before[at]))
                at = int(source[before[at]])
            return edges
    return []
