"""Lower bounds on the times of any synchronous order, from the placement and the costs alone."""

from __future__ import annotations

import numpy as np

from ...core.placement import PipelineError
from .problem import Problem


def bounds(problem: Problem) -> tuple[float, float]:
    """Lower bounds on (makespan, period) of every order that updates once an iteration.

    A rank cannot begin before a first micro-batch has reached it, and then has to do its work. If each rank has one
    stage, it also waits for its first output gradient, since only as many forwards as the cap allows fit before it
    (`lower_bounds`). Raises PipelineError for a cap below 1.
    """
    place, m = problem.placement, problem.micro_batches
    backward = np.minimum(problem.fused, problem.output_grad + problem.weight_grad)
    work, head = np.zeros(problem.ranks), np.full(problem.ranks, np.inf)
    count = np.bincount(place.direction(np.arange(m), m), minlength=place.directions)
    for direction, rank in enumerate(place.table):
        hops = np.append(0.0, np.where(np.diff(rank) != 0, problem.latency, 0.0))
        reached = np.cumsum(np.append(0.0, problem.forward[:-1]) + hops)
        np.add.at(work, rank, count[direction] * (problem.forward + backward))
        if count[direction]:
            np.minimum.at(head, rank, reached)
    makespan = float((head + work)[work > 0].max())
    if problem.chunks == 1 and place.directions == 1 and (backward >= problem.output_grad + problem.weight_grad).all():
        makespan = max(makespan, lower_bounds(problem, cap_of(problem))[1])
    return makespan, float(work.max())


def cap_of(problem: Problem) -> float:
    """The most live activations per rank. Raises PipelineError below 1."""
    cap = problem.micro_batches if problem.cap is None else problem.cap
    if cap < 1:
        raise PipelineError(f"no order fits an activation cap of {cap:.15g}; the smallest feasible cap is 1")
    return float(min(cap, problem.micro_batches))


def lower_bounds(problem: Problem, cap: float, kept: float = 1.0) -> tuple[float, float]:
    """Lower bounds on max_span and makespan under the cap (one stage per rank, first in first out).

    For each rank the larger of two bounds counts. First: its work, plus its idle time before its first output gradient
    arrives, since only `cap` forwards can run before. Second: when rank r ends its last output gradient, at most
    `(cap - 1) / kept` of its weight gradients are open besides the last one, and the gradient must still reach rank s
    and its last W.
    """
    f, o, w, c, m = problem.forward, problem.output_grad, problem.weight_grad, problem.latency, problem.micro_batches
    first = np.concatenate([[0.0], np.cumsum(f + c)[:-1]])  # the start of each rank
    above = np.concatenate([[0.0], np.cumsum(o + c)])  # from rank s to rank r: above[r] - above[s]
    head = first[-1] + f[-1] + (above[-1] - above[1:]) - first
    span = m * (f + o + w) + np.maximum(0.0, head - min(m, int(cap)) * f)
    open_ = min(m - 1, int((cap - 1) / kept + 1e-9))
    for r in range(problem.ranks):
        done = first[r] + m * (f[r] + o[r]) + (m - 1 - open_) * w[r]
        span[:r] = np.maximum(span[:r], done + above[r] - above[:r] + w[:r] - first[:r])
    return float(span.max()), float((first + span).max())
