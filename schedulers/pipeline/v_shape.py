"""Zero bubble on a V: every rank holds stage r and stage 2p-1-r, so the last stage's gradient starts on rank 0.

ZB-V, V-Half and V-Min (Qi et al., 2024) differ in how many activations a rank may hold. Ours come from a search, for
any times and any cap: the fastest orders by many rules and the order of the published heuristic are refined, and the
best is kept that is no slower than the published order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice, permutations, product

import numpy as np

from ...core.placement import PipelineError
from ...core.schedule import Schedule
from .listing import durations
from .problem import Problem, schedule_of, spelled
from .refine import SAME, refine
from .rules import Rule, by_rules
from .stages import stage_graph
from .v_published import greedy, half_block, min_block, repeated

EFFORT = 6_000_000  #: the most steps of all orders by rules together
FEWEST = 24  #: how many rules are always tried
REFINED = 3  #: how many of the best orders are refined

Published = Callable[[Problem, int], Schedule | None]


def zb_v(problem: Problem) -> Schedule:
    """Peak p (ZB-V; Qi et al., 2024), as the first rank of 1F1B; no bubble in the spans where F = O = W and
    micro-batches suffice."""
    return v_schedule(problem, problem.ranks, greedy)


def v_half(problem: Problem) -> Schedule:
    """Peak (p+2)//2 (Qi et al., 2024): about half of 1F1B's activations."""
    return v_schedule(problem, (problem.ranks + 2) // 2, lambda p, cap: repeated(p, half_block(p.ranks), cap))


def v_min(problem: Problem) -> Schedule:
    """Peak (p+4)//3 (Qi et al., 2024): about a third of 1F1B's activations."""
    return v_schedule(problem, (problem.ranks + 4) // 3, lambda p, cap: repeated(p, min_block(p.ranks), cap))


def v_schedule(problem: Problem, peak: float, published: Published) -> Schedule:
    """The fastest schedule found on the V with at most `peak` live activations per rank (or the problem's cap), in
    units of a full stage. Neither makespan nor largest span is longer than in `published(problem, cap in chunks)` if
    that gives an order. Raises PipelineError for a cap below 1, which is both chunks of one micro-batch."""
    cap = int(min(2 * (peak if problem.cap is None else problem.cap), 1 << 31))
    if cap < 2:
        raise PipelineError(f"an activation cap of {problem.cap:.15g} is too small; the smallest feasible one is 1")
    p, m = problem.ranks, problem.micro_batches
    reference = published(problem, cap)
    cap = min(cap, 2 * m)
    graph = stage_graph(2 * p, m)
    time = durations(problem, graph)
    some = list(islice(rules(problem, cap), max(FEWEST, EFFORT // (6 * p * m))))
    spans, makespans, _ = by_rules(problem, cap, 1.0, some)
    starts: list[Schedule] = []
    for i in np.argsort(spans + makespans, kind="stable"):
        schedule = by_rules(problem, cap, 1.0, [some[i]])[2]
        if not any((schedule.keys == other.keys).all() for other in starts):
            starts.append(schedule)
        if len(starts) == REFINED:
            break
    if cap >= min(2 * p, 2 * m):
        starts.append(handcrafted(problem))
    tried = [refine(graph, schedule, time, problem.latency, cap) for schedule in starts]
    if reference is not None:
        limit = np.array(refine(graph, reference, time, problem.latency, cap, 1)[:2]) * (1 + SAME)
        tried = [found for found in tried if (np.array(found[:2]) <= limit).all()]
        tried.append(refine(graph, reference, time, problem.latency, cap))
    return min(tried, key=lambda found: (found[0] + found[1], found[0]))[2]


def handcrafted(problem: Problem) -> Schedule:
    """ZB-V's order for equal times, given by hand in the paper: no bubble in the spans for m >= 2p - 1."""
    p, m = problem.ranks, problem.micro_batches
    enough, orders = max(m, 2 * p - 1), []
    for rank in range(p):
        left = enough - (2 * (p - rank) - 1) - rank
        text = ("f" * (2 * (p - rank) - 1) + "Ff" * rank + "FOW" * (p - rank) + "fowFOW" * left
                + "owFOW" * (enough - p - left) + "oO" * rank + "ow" * (p - rank) + "W" * rank + "w" * rank)
        orders.append(spelled(text, [(rank, 0), (2 * p - 1 - rank, 0)], m))
    return schedule_of(orders)


def rules(problem: Problem, cap: int) -> Iterator[Rule]:
    """The rules to try, the most promising first; only first chunks have a limit. `cap`: in chunks."""
    p = problem.ranks
    rank = np.arange(p)
    period = float((problem.forward + problem.output_grad + problem.weight_grad).max() * 2)
    weight = float(problem.weight_grad.max())
    limits = [*dict.fromkeys(
        tuple(np.clip(np.round(top - tilt * rank * cap / (2 * p)), 1, max(1, cap - 1)).astype(int).tolist())
        for tilt in (1.0, 0.0, 0.8, 1.25, 0.6, 1.5, 0.4, 0.2, 1.75, 2.0)
        for top in (cap, cap - 1, *range(cap - 2, 0, -1)))]
    # of O, F of chunk 1, F of chunk 0
    rankings = sorted(permutations((0, 1, 2)), key=lambda r: (r[2] < r[1], r[2] < 2, r))
    for some, patience in ((limits[:4], (0.0,)), (limits, (0.0,)), (limits, (0.5, 1, 2, 4, 1e9))):
        for wait, limit, ranking, pace in product(patience, some, rankings, (0.0, 1.0, 1.25)):
            output, second, first = ranking
            yield Rule(tuple(n for each in limit for n in (each, problem.micro_batches)),
                       (2 * first, 2 * second, 2 * output + 1, 2 * output), wait * weight, wait * weight,
                       pace=pace * period)
