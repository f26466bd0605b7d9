"""Zero bubble on a V: every rank holds stage r and stage 2p-1-r, so the last stage's gradient starts on rank 0.

ZB-V, V-Half and V-Min (Qi et al., 2024) differ in how many activations a rank may hold. Ours come from a search, for
any times and any cap: one rule with a few parameters builds an order (a walk) for each setting; the fastest walks and
the order of the published heuristic are refined, and the best is kept that is no slower than the published order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice, permutations, product

import numpy as np

from ...core.columns import Floats, Ints, run_loop
from ...core.placement import PipelineError
from ...core.schedule import Schedule
from ...core.tasks import Kind
from .listing import durations
from .problem import Problem, RankOrder, schedule_of
from .refine import SAME, refine
from .stages import stage_graph
from .v_published import greedy, half_block, min_block, repeated

EFFORT = 6_000_000  #: the most steps of all walks together
FEWEST = 24  #: how many settings are always tried
REFINED = 3  #: how many of the best walks are refined

Setting = tuple[Ints, tuple[int, ...], float, float]


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
    cap = int(2 * (peak if problem.cap is None else problem.cap))
    if cap < 2:
        raise PipelineError(f"an activation cap of {problem.cap:g} is too small; the smallest feasible one is 1")
    p, m = problem.ranks, problem.micro_batches
    reference = published(problem, cap)
    cap = min(cap, 2 * m)
    graph = stage_graph(2 * p, m)
    time = durations(problem, graph)
    settings = list(islice(_settings(problem, cap), max(FEWEST, EFFORT // (6 * p * m))))
    cost, _ = _walk_all(problem, cap, settings)
    starts: list[Schedule] = []
    for i in np.argsort(cost, kind="stable"):
        schedule = _walk_all(problem, cap, [settings[i]])[1]
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
    enough = max(m, 2 * p - 1)
    orders = []
    for rank in range(p):
        ahead = 2 * (p - rank) - 1
        steps = ["F0"] * ahead + ["F1", "F0"] * rank + ["F1", "O1", "W1"] * (p - rank)
        left = enough - ahead - rank
        steps += ["F0", "O0", "W0", "F1", "O1", "W1"] * left + ["O0", "W0", "F1", "O1", "W1"] * (enough - p - left)
        steps += ["O0", "O1"] * rank + ["O0", "W0"] * (p - rank) + ["W1"] * rank + ["W0"] * rank
        seen: dict[str, int] = {}
        entries = []
        for step in steps:
            seen[step] = seen.get(step, -1) + 1
            if seen[step] < m:
                entries.append((Kind[step[0]], rank if step[1] == "0" else 2 * p - 1 - rank, seen[step]))
        orders.append(RankOrder(*zip(*entries, strict=True)))
    return schedule_of(orders)


def _walk_all(problem: Problem, cap: int, settings: list[Setting]) -> tuple[Floats, Schedule]:
    """(makespan plus largest span of each setting, the schedule of the last)."""
    p, m = problem.ranks, problem.micro_batches
    limits, ranking, pace, patience = (np.array(column) for column in zip(*settings, strict=True))
    times = np.concatenate([problem.forward, problem.output_grad, problem.weight_grad])
    _, after = run_loop(_search, 6 * p * m * len(settings), p, m, times, float(problem.latency), cap, limits.ravel(),
                        ranking.ravel(), pace.astype(float), patience.astype(float), 1e-9 * float(times.max()),
                        np.zeros(len(settings)), np.zeros(6 * p * m, np.int64))
    kinds = np.array([Kind.F, Kind.O, Kind.W])
    return after.cost, schedule_of([RankOrder(kinds[row // (2 * p * m)], row // m % (2 * p), row % m)
                                    for row in after.order.reshape(p, 6 * m)])


def _settings(problem: Problem, cap: int) -> Iterator[Setting]:
    """The settings, the most promising first: (the most first chunks in flight per rank, the ranking of O, F of chunk 1
    and F of chunk 0, the pace of admission, the longest time that a rank may wait for O or F before it starts a W)."""
    p = problem.ranks
    rank = np.arange(p)
    period = float((problem.forward + problem.output_grad + problem.weight_grad).max() * 2)
    weight = float(problem.weight_grad.max())
    limits: list[Ints] = []
    for tilt in (1.0, 0.0, 0.8, 1.25, 0.6, 1.5, 0.4, 0.2, 1.75, 2.0):
        for top in (cap, cap - 1, *range(cap - 2, 0, -1)):
            limit = np.clip(np.round(top - tilt * rank * cap / (2 * p)), 1, max(1, cap - 1)).astype(np.int64)
            if not any((limit == other).all() for other in limits):
                limits.append(limit)
    rankings = sorted(permutations((0, 1, 2)), key=lambda r: (r[2] < r[1], r[2] < 2, r))
    near = limits[:4]
    for some, patience in ((near, (0.0,)), (limits, (0.0,)), (limits, (0.5, 1, 2, 4, 1e9))):
        for wait, limit, ranking, pace in product(patience, some, rankings, (0.0, 1.0, 1.25)):
            yield limit, ranking, pace * period, wait * weight


def _search(p, m, times, latency, cap, limits, ranking, pace, patience, eps, cost, order):  # type: ignore[no-untyped-def]
    """Walks every setting; writes makespan plus largest span of each to `cost`, and the last walk to `order`.

    Task code: (kind * stages + stage) * m + micro-batch, kinds F, O, W.
    """
    stages = 2 * p
    inf = 1e300
    ready = [inf] * (3 * stages * m)
    following = [0] * (3 * stages)
    start_of, weight_next = [0.0] * p, [False] * p
    free, first, idle = [0.0] * p, [0.0] * p, [0.0] * p
    live, live0, placed = [0] * p, [0] * p, [0] * p
    for setting in range(len(pace)):
        for i in range(3 * stages * m):
            ready[i] = inf
        for i in range(m):
            ready[i] = pace[setting] * i
        for i in range(3 * stages):
            following[i] = 0
        for r in range(p):
            free[r], first[r], idle[r] = 0.0, -1.0, 0.0
            live[r], live0[r], placed[r] = 0, 0, 0
            start_of[r], weight_next[r] = inf, False
        start_of[0] = 0.0
        complete = True
        for _ in range(6 * p * m):
            r = 0
            for other in range(1, p):
                if start_of[other] < start_of[r]:
                    r = other
            now = start_of[r]
            if now >= inf:
                complete = False
                break
            # the best-ranked task that can start now
            chosen, place = -1, 99
            for row in range(6):
                kind = row // 2
                stage = r if row % 2 == 0 else stages - 1 - r
                at = following[kind * stages + stage]
                if at >= m or ready[(kind * stages + stage) * m + at] > now + eps:
                    continue
                if kind == 0 and (live[r] >= cap or (row == 0 and live0[r] >= limits[setting * p + r])):
                    continue
                if kind == 2:
                    rank_of = 11 - row
                elif kind == 1:
                    rank_of = 2 * ranking[setting * 3] + 1 - row % 2
                else:
                    rank_of = 2 * ranking[setting * 3 + 2 - row]
                if rank_of < place:
                    chosen, place = row, rank_of
            kind = chosen // 2
            stage = r if chosen % 2 == 0 else stages - 1 - r
            lane = kind * stages + stage
            at = following[lane]
            following[lane] = at + 1
            begin = max(free[r], ready[lane * m + at])
            end = begin + times[lane]
            if first[r] < 0:
                first[r] = begin
            else:
                idle[r] += begin - free[r]
            free[r] = end
            order[r * 6 * m + placed[r]] = lane * m + at
            placed[r] += 1
            other = r
            if kind == 0:
                live[r] += 1
                if chosen == 0:
                    live0[r] += 1
                target = stage + 1
                if target < stages:
                    other = target if target < p else stages - 1 - target
                    ready[target * m + at] = end + (latency if other != r else 0.0)
                else:
                    ready[(stages + stage) * m + at] = end
            elif kind == 1:
                ready[(2 * stages + stage) * m + at] = end
                if stage > 0:
                    target = stage - 1
                    other = target if target < p else stages - 1 - target
                    ready[(stages + target) * m + at] = end + (latency if other != r else 0.0)
            else:
                live[r] -= 1
                if chosen % 2 == 0:
                    live0[r] -= 1
            # when the ranks touched can start next
            for which in range(2):
                q = r if which == 0 else other
                if which == 1 and other == r:
                    break
                others, weight = inf, inf
                for row in range(6):
                    kind = row // 2
                    stage = q if row % 2 == 0 else stages - 1 - q
                    at = following[kind * stages + stage]
                    if at >= m:
                        continue
                    if kind == 0 and (live[q] >= cap or (row == 0 and live0[q] >= limits[setting * p + q])):
                        continue
                    begin = max(free[q], ready[(kind * stages + stage) * m + at])
                    if kind == 2:
                        weight = min(weight, begin)
                    else:
                        others = min(others, begin)
                start_of[q] = min(others, weight)
                gap = others - weight
                if eps < gap < times[2 * stages + q] - eps and idle[q] + gap <= patience[setting]:
                    start_of[q] = others
        makespan, span = 0.0, 0.0
        for r in range(p):
            makespan = max(makespan, free[r])
            span = max(span, free[r] - first[r])
        cost[setting] = makespan + span if complete else inf
