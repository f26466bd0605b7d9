"""ZB-auto: zero-bubble orders found by search, for any costs per stage, latency and activation cap.

Each rule of a grid gives an order: how many forwards each rank may be ahead, and how long it may idle before it
fills a gap with a weight gradient. The best rule's ranks are then changed one by one, and the best orders refined.
Every order is priced exactly, by the timing model. Deterministic.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ...core.placement import PipelineError
from ...core.schedule import Schedule
from .bounds import cap_of, lower_bounds
from .fast_forward import fast_forward_push
from .listing import durations
from .problem import Problem, rounded
from .refine import SAME, refine
from .rules import Rule, by_rules
from .stages import stage_graph
from .zero_bubble import zb_h1, zb_h2

#: forwards ahead, per rank between this one and the last; the most useful first: ZB-H1, ZB-H2, and values near them
SLOPES = (1.0, 2.0, 1.4, 2.4, 2.1, 1.2, 1.6, 1.8, 2.2, 3.0, 2.6, 0.75, 0.5, 0.0)
#: how long a rank may idle before it fills a gap, in weight-gradient times
IDLE = (np.inf, 0.0, 0.5, 1.0, 2.0, 4.0, 10.0, 30.0)
EFFORT = 3e9  #: about how many steps all candidates take together; large problems get fewer candidates
ROUNDS = 40  #: the most rounds of changing the best candidate rank by rank
REFINED = 4  #: how many of the best orders are refined


def zb_auto(problem: Problem, kept: float = 1.0) -> Schedule:
    """The order with the smallest max_span, then makespan, that the search finds under `problem.cap` (ZB-1p, ZB-2p;
    Qi et al., 2023).

    `kept`: the share of an activation that a weight gradient still needs after its output gradient; 1 is the count of
    all other policies here. The published ZB-2p rates need less: with 1, a cap of 2p excludes them (`lower_bounds`).
    Reconstructed from the paper's description of its heuristic; the search is our own. Raises PipelineError for a cap
    below 1, or a `kept` outside 0..1.
    """
    if not 0 < kept <= 1:
        raise PipelineError(f"kept is {kept}; it must be a share of an activation, above 0 and at most 1")
    p, m, cap = problem.ranks, problem.micro_batches, cap_of(problem)
    span, makespan = lower_bounds(problem, cap, kept)
    bounds = span * (1 + SAME), makespan * (1 + SAME)
    grid = candidates(problem, cap, kept)
    found = dict(zip(grid, _spans(problem, cap, kept, grid), strict=True))
    for _ in range(ROUNDS):
        best = min(found, key=found.__getitem__)
        near = [c for c in neighbours(best, int(cap)) if c not in found]
        if not near or len(near) > limit(problem) or (found[best][0] <= bounds[0] and found[best][1] <= bounds[1]):
            break
        found.update(zip(near, _spans(problem, cap, kept, near), strict=True))
        if min(found, key=found.__getitem__) == best:
            break
    ran = [c for c in found if found[c][0] < np.inf]
    best_of_line = {c.ahead: c for c in sorted(ran, key=found.__getitem__, reverse=True)}
    chosen = sorted(best_of_line.values(), key=found.__getitem__)[:REFINED]
    fitting = [zb_h1, fast_forward_push] if cap >= min(p, m) else []  # published orders, so that it is never worse
    fitting += [zb_h2] if cap >= 2 * p - 1 <= m else []
    orders = [*(by_rules(problem, cap, kept, [rule])[2] for rule in chosen), *(order(problem) for order in fitting)]
    graph = stage_graph(p, m)
    time = durations(problem, graph)
    tried = [refine(graph, order, time, problem.latency, cap, None, kept, bounds) for order in orders]
    return min(tried, key=lambda found: (rounded(found[1]), rounded(found[0])))[2]


def limit(problem: Problem) -> int:
    """How many candidates are affordable: each costs about tasks x ranks steps."""
    return max(16, int(EFFORT / (3 * problem.micro_batches * problem.ranks**2)))


def candidates(problem: Problem, cap: float, kept: float) -> list[Rule]:
    """The grid: linear slopes of forwards ahead, times idle times, times both ways to choose the next task."""
    to_end = np.arange(problem.ranks)[::-1]
    work = float((problem.forward + problem.output_grad + problem.weight_grad).max()) * problem.micro_batches
    slack = lower_bounds(problem, cap, kept)[0] - work
    idles = dict.fromkeys((slack, *(x * float(problem.weight_grad.max()) for x in IDLE)))
    lines = dict.fromkeys(tuple(np.minimum(int(cap), 1 + np.floor(slope * to_end + start)).astype(int).tolist())
                          for start in (0.0, 0.5, cap - 1) for slope in SLOPES)
    grid = [Rule(line, (1, 0), idle, tail, alternate) for idle in idles for line in lines
            for tail in dict.fromkeys((idle, max(idle, slack))) for alternate in (True, False)]
    return grid[: limit(problem)]


def neighbours(candidate: Rule, cap: int) -> list[Rule]:
    """One forward more or less ahead, on one rank or on all ranks up to it."""
    ahead = np.array(candidate.ahead)
    rank = np.arange(len(ahead))
    shifts = [step * where for s in rank for where in (rank == s, rank <= s) for step in (1, -1)]
    lines = dict.fromkeys(tuple(np.clip(ahead + shift, 1, cap).tolist()) for shift in shifts)
    return [replace(candidate, ahead=line) for line in lines]


def _spans(problem: Problem, cap: float, kept: float, rules: list[Rule]) -> list[tuple[float, float]]:
    """(max_span, makespan) of each rule's order, rounded so that equal times compare equal."""
    spans, makespans, _ = by_rules(problem, cap, kept, rules)
    return list(zip(map(rounded, spans), map(rounded, makespans), strict=True))
