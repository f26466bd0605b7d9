"""Orders by rules with a few parameters, for any number of stages per rank: the searches try many of them.

In order of time, each rank runs a forward or an output gradient that is ready, of several the one with the lowest rank
in a ranking; a weight gradient if it would wait too long for either, or if memory is full.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...core.columns import Floats, run_loop
from ...core.schedule import Schedule
from ...core.tasks import Kind
from .problem import Problem, RankOrder, schedule_of


@dataclass(frozen=True)
class Rule:
    """`ahead`: for each rank and chunk, the most forwards whose output gradient has not run. `ranking`: of F of each
    chunk, then O of each; the lowest runs first. `idle`: the time that the busiest rank may wait before it fills a gap
    with a weight gradient, until its forwards are over; `tail`: after that; other ranks may wait longer by the work
    that they lack. `alternate`: no output gradient runs while a forward may. `pace`: the time between micro-batches."""

    ahead: tuple[int, ...]
    ranking: tuple[int, ...]
    idle: float
    tail: float
    alternate: bool = False
    pace: float = 0.0


def by_rules(problem: Problem, cap: float, kept: float, rules: Sequence[Rule]) -> tuple[Floats, Floats, Schedule]:
    """(largest span and makespan of each rule's order, infinite if it gets stuck, the schedule of the last). `cap`: the
    most live activations per rank, in chunks; `kept`: the share of one that stays from its O to its W."""
    p, m, v, n = problem.ranks, problem.micro_batches, problem.chunks, len(rules)
    held = np.array([problem.placement.held(rank) for rank in range(p)])
    busy = m * (problem.forward + problem.output_grad + problem.weight_grad)[held].sum(axis=1)
    allowed = np.array([[rule.idle, rule.tail] for rule in rules])[:, :, None] + (busy.max() - busy)
    times = np.concatenate([problem.forward, problem.output_grad, problem.weight_grad])
    _, after = run_loop(
        _by_rule, 3 * p * v * m * n, n, p, v, m, float(cap), kept, float(problem.latency), 1e-9 * float(times.max()),
        held.ravel(), problem.placement.table[0].astype(np.int64), times,
        np.array([rule.ahead for rule in rules], np.int64).ravel(),
        np.array([rule.ranking for rule in rules], np.int64).ravel(), allowed.ravel(),
        np.array([rule.alternate for rule in rules]), np.array([rule.pace for rule in rules], np.float64),
        np.zeros(p), np.zeros(p), np.zeros(p), np.zeros(p), np.zeros(3 * p * v, np.int64), np.zeros(3 * p * v * m),
        np.zeros(p, np.int64), np.zeros(p), np.zeros(p, np.int64), np.full(n, np.inf), np.full(n, np.inf),
        np.zeros(3 * p * v * m, np.int64))
    kinds = np.array([Kind.F, Kind.O, Kind.W])
    return after.spans, after.makespans, schedule_of([
        RankOrder(kinds[row // (p * v * m)], row // m % (p * v), row % m) for row in after.order.reshape(p, 3 * v * m)])


def _by_rule(n, p, v, m, cap, kept, latency, eps, held, rank, times, ahead, ranking,  # type: ignore[no-untyped-def]
             allowed, alternate, pace, free, first, idle, live, done, ready, action, at, placed, spans, makespans,
             order):
    """`done[kind * stages + stage]`: how many have run; `ready[.. * m + i]`: when the next ones may start. `action[r]`
    and `at[r]`: a rank's next task, as kind * v + chunk, and its start. `order[r * 3 * v * m + i]`: a rank's i-th."""
    stages, never = p * v, 1e300
    for x in range(n):
        for i in range(3 * stages * m):
            ready[i] = pace[x] * i if i < m else never
        for i in range(3 * stages):
            done[i] = 0
        for r in range(p):
            free[r], first[r], idle[r], live[r], placed[r], at[r] = 0.0, -1.0, 0.0, 0.0, 0, never
        r, other, complete = 0, 0, False
        for step in range(3 * stages * m + 1):
            for which in range(1 + (other != r)):  # the next task of the ranks for which something has changed
                q = other if which == 1 else r
                now, best, start, best_rank = free[q], 0, never, 2 * v
                blocked, forwards, turn, weight = never, False, False, -1
                for row in range(2 * v):
                    lane = row // v * stages + held[q * v + row % v]
                    i = done[lane]
                    if row >= v and done[lane + stages] < i:
                        weight = row % v
                    if i == m or (row >= v and turn):
                        continue
                    begin = max(now, ready[lane * m + i])
                    if row < v:
                        forwards = True
                        if i - done[lane + stages] >= ahead[(x * p + q) * v + row]:
                            continue
                        turn = alternate[x]
                        if live[q] + 1 > cap + 1e-9:
                            blocked = min(blocked, begin)
                            continue
                    mine = ranking[x * 2 * v + row]
                    if begin < start - eps or (begin <= start + eps and mine < best_rank):
                        best, start, best_rank = row, begin, mine
                if weight >= 0 and start > now:
                    gap, budget = start - now, allowed[(2 * x + (not forwards)) * p + q]
                    if (blocked < start or gap >= times[2 * stages + held[q * v + weight]] * (1 - 1e-12)
                            or idle[q] + gap > budget * (1 + 1e-12)):
                        best, start = 2 * v + weight, now
                action[q], at[q] = best, start
            r = 0
            for q in range(1, p):
                if at[q] < at[r]:
                    r = q
            if at[r] >= never:
                complete = step == 3 * stages * m
                break
            kind, stage, begin = action[r] // v, held[r * v + action[r] % v], at[r]
            lane = kind * stages + stage
            i = done[lane]
            done[lane] += 1
            order[r * 3 * v * m + placed[r]] = lane * m + i
            placed[r] += 1
            if first[r] < 0:
                first[r] = begin
            else:
                idle[r] += begin - free[r]
            free[r] = end = begin + times[lane]
            live[r] += 1 if kind == 0 else kept - 1 if kind == 1 else -kept
            other, following = r, stage + 1 - 2 * kind  # the stage that goes on
            if kind == 0 and following == stages:
                ready[(stages + stage) * m + i] = end
            elif kind < 2 and following >= 0:
                other = rank[following]
                ready[(kind * stages + following) * m + i] = end + (latency if other != r else 0.0)
        if complete:
            spans[x] = makespans[x] = 0.0
            for r in range(p):
                spans[x] = max(spans[x], free[r] - first[r])
                makespans[x] = max(makespans[x], free[r])
