"""Lower bounds on the times of any synchronous order, from the placement and the costs alone."""

from __future__ import annotations

import numpy as np

from .problem import Problem
from .zb_auto import cap_of, lower_bounds


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
        order = np.arange(place.stages)
        hops = np.append(0.0, np.where(np.diff(rank) != 0, problem.latency, 0.0))
        reached = np.cumsum(np.append(0.0, problem.forward[:-1]) + hops)
        np.add.at(work, rank, count[direction] * (problem.forward + backward)[order])
        if count[direction]:
            np.minimum.at(head, rank, reached)
    held = work > 0
    makespan = float((head + work)[held].max())
    if problem.chunks == 1 and place.directions == 1 and (backward >= problem.output_grad + problem.weight_grad).all():
        makespan = max(makespan, lower_bounds(problem, cap_of(problem))[1])
    return makespan, float(work.max())
