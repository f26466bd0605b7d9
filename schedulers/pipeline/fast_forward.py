"""Gradient fast-forwarding (out-of-order backprop, 2022): output gradients run first, weight gradients later.

`fast_forward`: the released dependency set; `fast_forward_push` admits a new micro-batch per retired one.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...schedule import Schedule
from ...tasks import Kind
from .choice import Order, best_order
from .listing import work_conserving
from .looped import modulo
from .placement import PipelineError
from .problem import Problem, RankOrder, schedule_of
from .zero_bubble import lagging


def fast_forward_strict(problem: Problem) -> Schedule:
    """All F, all O, all W on every rank (defined here): makespan (m+p-1)(F+O) + mW + 2(p-1)c, peak m."""
    m = problem.micro_batches
    kind, micro_batch = np.repeat([Kind.F, Kind.O, Kind.W], m), np.tile(np.arange(m), 3)
    return schedule_of([RankOrder(kind, np.full(3 * m, rank), micro_batch) for rank in range(problem.ranks)])


def fast_forward(problem: Problem) -> Schedule:
    """Ranks before the last: all F, then O and W in turn; the last rank: F and O in turn, then all W (out-of-order
    backprop, 2022)."""
    p, m = problem.ranks, problem.micro_batches
    micro_batch = np.arange(m)
    twice = np.repeat(micro_batch, 2)
    orders = [RankOrder(np.concatenate([np.full(m, Kind.F), np.tile([Kind.O, Kind.W], m)]), np.full(3 * m, rank),
                    np.concatenate([micro_batch, twice])) for rank in range(p - 1)]
    orders.append(RankOrder(np.concatenate([np.tile([Kind.F, Kind.O], m), np.full(m, Kind.W)]), np.full(3 * m, p - 1),
                        np.concatenate([twice, micro_batch])))
    return schedule_of(orders)


def fast_forward_greedy(problem: Problem) -> Schedule:
    """Work-conserving: a free rank runs a task that is ready, O before F before W, the oldest micro-batch first
    (defined here)."""
    return work_conserving(problem, (Kind.O, Kind.F, Kind.W))


def fast_forward_auto(problem: Problem, form: str | None = None) -> Schedule | tuple[Schedule, dict[str, Any]]:
    """The form with the smallest simulated makespan, or the given one: `greedy` or `strict`; with one stage per rank
    also `released` (`fast_forward`) and, for m > p, `push`.

    With several stages per rank and a link with latency, the group size is searched too. Raises PipelineError for a
    form that the numbers do not allow.
    """
    forms: dict[str, Order] = {"greedy": fast_forward_greedy, "strict": modulo}
    if problem.chunks == 1:
        forms |= {"released": fast_forward} | ({"push": fast_forward_push} if problem.micro_batches > problem.ranks
                                               else {})
    if form is not None and form not in forms:
        raise PipelineError(f"fast_forward_auto: there is no form {form!r} with {problem.chunks} chunks per rank and "
                            f"{problem.micro_batches} micro-batches; there are: {', '.join(forms)}")
    return forms[form](problem) if form else best_order(problem, forms, "form")


def fast_forward_push(problem: Problem) -> Schedule:
    """W(i) of a rank admits F(i + p - s): at most p - s micro-batches in flight on rank s, O and W in turn
    (out-of-order backprop, 2022).

    Needs m > p: otherwise nothing is pushed; use `fast_forward`.
    """
    p, m = problem.ranks, problem.micro_batches
    micro_batch = np.arange(m)
    orders = []
    for rank in range(p):
        tasks = np.full(m, rank), micro_batch
        orders.append(lagging(tasks, tasks, min(p - rank, m), 0))
    return schedule_of(orders)
