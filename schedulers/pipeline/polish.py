"""Improves an order of F, O and W, one move at a time; the result is never worse.

A rank's span is as long as the longest path to its end. Only a move that takes an entry out of that path can shorten
it, so moves are drawn from there. Each is priced exactly, and kept unless max_span or makespan grew: moves that change
nothing lead out of most dead ends. Deterministic: the draws come from a fixed seed. One stage per rank.
"""

from __future__ import annotations

import numpy as np

from ...core.columns import run_loop
from ...core.graph import Ints
from .problem import Problem

EFFORT = 8_000_000  #: the most tasks timed for one order
MOVES = 40  #: the most moves tried per task
SAME = 1e-11  #: times with a smaller relative difference are equal


def polish(problem: Problem, cap: float, kept: float, kinds: Ints,
           bounds: tuple[float, ...]) -> tuple[tuple[float, float], Ints]:
    """((max_span, makespan), order): no larger max_span, or the same and no larger makespan. Stops at both `bounds`."""
    p, m = problem.ranks, problem.micro_batches
    n = 3 * p * m
    tries = max(1, min(EFFORT // n, MOVES * n))
    _, after = run_loop(
        _polish, n * tries, p, m, cap, kept, problem.forward, problem.output_grad, problem.weight_grad, problem.latency,
        bounds[0], bounds[1], 1 - SAME, tries, kinds.ravel(), np.zeros(n), np.zeros(n, np.int64), np.zeros(n, np.int64),
        np.zeros(p, np.int64), np.zeros(3 * p, np.int64), np.zeros(n, np.int64), np.zeros(2), np.zeros(2))
    span, makespan = after.best.tolist()
    return (span, makespan), after.kinds.reshape(p, 3 * m)


def _polish(p, m, cap, kept, f, o, w, c, span_bound, end_bound, below, tries, kinds, end, cause, where, placed,  # type: ignore[no-untyped-def]
            count, path, now, best):
    n = 3 * m
    length, step, out, to, dice = 0, 0, 0, -1, 12345
    for attempt in range(tries):
        fits, live, s = True, 0.0, out // n  # the rank of the last move must still keep the cap
        for e in range(s * n, s * n + n):
            if kinds[e] == 0:
                live += 1.0
                fits = fits and live <= cap + 1e-9
            else:
                live -= 1.0 - kept if kinds[e] == 1 else kept
        # time the order: `where` is the entry of each task, `cause` the entry that an entry waited for last
        for s in range(p):
            placed[s] = 0
        for s in range(3 * p):
            count[s] = 0
        for e in range(p * n):
            where[e] = -1
        ran, moved = 0, fits
        while moved:
            moved = False
            for s in range(p):
                while placed[s] < n:
                    e = s * n + placed[s]
                    k = kinds[e]
                    i = count[3 * s + k]
                    source = -1
                    if k == 0 and s > 0:
                        source = where[(s - 1) * n + i]
                    elif k == 1:
                        source = where[s * n + i] if s == p - 1 else where[(s + 1) * n + m + i]
                    elif k == 2:
                        source = where[s * n + m + i]
                    if source < 0 and (k > 0 or s > 0):
                        break
                    ready = 0.0
                    if source >= 0:
                        ready = end[source] + (c if source // n != s else 0.0)
                    cause[e] = source
                    if placed[s] > 0 and end[e - 1] >= ready:
                        ready, cause[e] = end[e - 1], e - 1
                    end[e] = ready + (f[s] if k == 0 else o[s] if k == 1 else w[s])
                    where[s * n + k * m + i] = e
                    count[3 * s + k] += 1
                    placed[s] += 1
                    ran += 1
                    moved = True
        worst = latest = 0
        now[0] = now[1] = 0.0
        for s in range(p):
            span = end[s * n + n - 1] - end[s * n] + f[s]
            if span > now[0]:
                now[0], worst = span, s
            if end[s * n + n - 1] > now[1]:
                now[1], latest = end[s * n + n - 1], s
        if now[0] <= span_bound:  # nothing to gain there
            worst = latest
        if ran == p * n and (attempt == 0 or now[0] < best[0] * below or (
                now[0] * below <= best[0] and now[1] * below <= best[1])):
            best[0], best[1] = now[0], now[1]
            length = 0
            e = worst * n + n - 1
            while e >= 0:
                path[length] = e
                length += 1
                e = cause[e]
        elif to >= 0:
            k = kinds[to]
            for e in range(to, out, -1):
                kinds[e] = kinds[e - 1]
            kinds[out] = k
        # the next move: an entry of the path goes behind the one after it, a weight gradient also further
        to = -1
        for _ in range(4 * length):
            dice = (dice * 1103515245 + 12345) % 2147483648
            step = dice // 65536 % (length - 1)
            dice = (dice * 1103515245 + 12345) % 2147483648
            reach = 1
            late, out = path[step], path[step + 1]
            if kinds[out] == 2:
                reach = 1 << dice // 65536 % 5
            if out == late - 1 and kinds[out] != kinds[late] and out + reach < (late // n + 1) * n:
                to = out + reach
                break
        if to < 0 or attempt == tries - 1 or (best[0] <= span_bound and best[1] <= end_bound):
            break
        k = kinds[out]
        for e in range(out, to):
            kinds[e] = kinds[e + 1]
        kinds[to] = k
