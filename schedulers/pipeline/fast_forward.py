"""Gradient fast-forwarding (out-of-order backprop, 2022): output gradients run first, weight gradients later.

`fast_forward` and `fast_forward_push_released` have the released dependency sets; `fast_forward_push`, defined here,
admits a new micro-batch per retired one on every rank.
"""

from __future__ import annotations

from functools import partial
from itertools import permutations

import numpy as np

from ...core.columns import Rows
from ...core.graph import TaskGraph
from ...core.schedule import Schedule
from ...core.tasks import Kind, pack
from ..ordered import Ordered
from .choice import Order, best_order
from .flush import same_stage
from .listing import work_conserving
from .looped import modulo
from .problem import Problem


def fast_forward_strict(problem: Problem) -> Schedule:
    """All F, all O, all W on every rank (defined here): makespan (m+p-1)(F+O) + mW + 2(p-1)c, peak m."""
    all_of_them = [problem.micro_batches] * problem.ranks
    return same_stage(problem, all_of_them, all_of_them)


def fast_forward(problem: Problem) -> Schedule:
    """Ranks before the last: all F, then O and W in turn; the last rank: F and O in turn, then all W (out-of-order
    backprop, 2022)."""
    last, m = problem.ranks - 1, problem.micro_batches
    return same_stage(problem, [m] * last + [1], [0] * last + [m])


def fast_forward_greedy(problem: Problem) -> Schedule:
    """Work-conserving: a free rank runs a task that is ready, O before F before W, the oldest micro-batch first
    (defined here)."""
    return work_conserving(problem, (Kind.O, Kind.F, Kind.W))


def fast_forward_auto(problem: Problem) -> Ordered:
    """The form with the smallest simulated makespan: `greedy` or `strict`; with one stage per rank also `released`
    (`fast_forward`) and, for m > p, `push`.

    With several stages per rank and a link with latency, the group size is also searched.
    """
    forms: dict[str, Order] = {"greedy": fast_forward_greedy, "strict": modulo}
    if problem.chunks == 1:
        forms["released"] = fast_forward
        if problem.micro_batches > problem.ranks:
            forms["push"] = fast_forward_push
    return best_order(problem, forms, "form")


def fast_forward_push(problem: Problem) -> Schedule:
    """W(i) of rank s admits F(i + p - s): at most p - s micro-batches in flight on rank s, O and W in turn (defined
    here, after the push style of out-of-order backprop, 2022; its own dependency set is `fast_forward_push_released`).

    Needs m > p: otherwise nothing is pushed; use `fast_forward`.
    """
    return same_stage(problem, range(problem.ranks, 0, -1), [0] * problem.ranks)


def fast_forward_push_released(problem: Problem) -> Ordered:
    """The released dependency set of the push style (out-of-order backprop, 2022). On ranks s before the last, W(i)
    comes between O(i) and O(i+1), and W(i+s) admits F(i+p); on rank p-2, F(p-1) comes before O(0); on the last rank
    every W waits for the last O, so that its peak is m.

    The set leaves open which ready task runs: of the six orders of O, F and W, oldest micro-batch first, the one with
    the smallest simulated makespan. Needs m > p: otherwise nothing is pushed; use `fast_forward`.
    """
    orders: dict[str, Order] = {
        ", ".join(kind.name for kind in kinds): partial(work_conserving, kinds=kinds, extra=_pushed)
        for kinds in permutations((Kind.O, Kind.F, Kind.W))}
    return best_order(problem, orders, "priority")


def _pushed(problem: Problem, graph: TaskGraph) -> Rows:
    """The released edges of the push style besides those by data."""
    p, m = problem.ranks, problem.micro_batches
    i, s = (a.ravel() for a in np.meshgrid(np.arange(m), np.arange(p), indexing="ij"))
    inner, last = s < p - 1, s == p - 1
    retired = inner & (i < m - p)
    follows = inner & (i < m - 1)
    edges = [  # (stage, kind, micro-batch) -> (stage, kind, micro-batch)
        (s[inner], Kind.O, i[inner], s[inner], Kind.W, i[inner]),
        (s[last], Kind.O, np.full(m, m - 1), s[last], Kind.W, i[last]),
        (s[follows], Kind.W, i[follows], s[follows], Kind.O, i[follows] + 1),
        (s[retired], Kind.W, (i + s)[retired], s[retired], Kind.F, i[retired] + p)]
    if p > 1:
        edges.append((np.array([p - 2]), Kind.F, np.array([p - 1]), np.array([p - 2]), Kind.O, np.array([0])))
    pairs = [(graph.find(pack(a, k, b)), graph.find(pack(c, l, d))) for a, k, b, c, l, d in edges]
    return Rows.from_pairs(np.concatenate([x for x, _ in pairs]), np.concatenate([y for _, y in pairs]), len(graph))
