"""The proved optimum of small pipelines, by OR-tools' CP-SAT: the measure for every other policy.

One stage per rank, O and W apart, each kind first in first out, at most `cap` live activations on a rank. The weight
gradients of a rank are interchangeable, so fixing their order loses nothing; fixing the order of F and O is an
assumption. The solver's package comes with the extra `optimal`.
"""

from __future__ import annotations

from dataclasses import replace
from math import gcd, lcm
from typing import Any

import numpy as np

from ...core.columns import Ints
from ...core.placement import PipelineError
from ...core.schedule import Schedule
from ...core.tasks import Kind, pack
from ...pricing.cost import CostModel
from ...pricing.simulation import times
from ..ordered import Ordered
from .bounds import cap_of, lower_bounds
from .problem import Problem, RankOrder, schedule_of
from .stages import stage_graph
from .zb_auto import zb_auto

OBJECTIVES = ("makespan", "span", "period")
KINDS = (Kind.F, Kind.O, Kind.W)
FINEST = 2**40  #: the most ticks of a whole schedule


def optimal(problem: Problem, objective: str = "makespan", time_limit: float = 60.0) -> Ordered:
    """The order of the smallest `objective`, found by constraint programming (extra `optimal`), and whether that is
    proved; for small problems. Times without a common tick, such as measured ones, are rounded to thousandths of the
    longest first; the status then has `rounded_to` and is about the rounded times.

    It is never worse than `zb_auto`, from which the search starts. With `makespan` and `span`, every rank starts as
    early as possible, as in a real run. Iterations that are chained without a barrier settle into a rhythm in which
    ranks may start at any time, and each rank's iterations follow each other: the period is the smallest max_span over
    all starts. The status: `value` of the objective, the best proved `bound` on it, the solver's `status`, FEASIBLE
    where the time limit came first. Raises PipelineError for an unknown objective, a cap below 1, several stages per
    rank, or a missing OR-tools.
    """
    if objective not in OBJECTIVES:
        raise PipelineError(f"unknown objective {objective!r}; known: {', '.join(OBJECTIVES)}")
    if not time_limit > 0:
        raise PipelineError(f"the time limit is {time_limit} s; it must be positive")
    try:
        from ortools.sat.python import cp_model
    except ImportError:
        raise PipelineError("optimal needs OR-tools: pip install 'minidl[optimal]'") from None
    rounded_to = 1.0
    try:
        ticks, unit = in_ticks(problem)
    except PipelineError:
        problem, rounded_to = _rounded(problem)
        ticks, unit = in_ticks(problem)
    p, m, cap = problem.ranks, problem.micro_batches, int(cap_of(problem))
    duration, latency = ticks[:3], int(ticks[3, 0])
    hint = _earliest(zb_auto(problem), ticks, m)
    horizon = int(m * ticks[:3].sum() + 2 * m * p * latency)  # one task after another: no path is longer
    first, last = hint[0, :, 0], hint[2, :, -1] + duration[2]
    known = int((last if objective == "makespan" else last - first).max())
    # for spans this holds whenever ranks start
    floor = int(np.floor(lower_bounds(problem, cap)[objective == "makespan"] / unit * (1 - 1e-9)))

    model = cp_model.CpModel()
    start = [[[model.new_int_var(0, horizon, f"{stage}{kind.name}{i}") for i in range(m)] for stage in range(p)]
             for kind in KINDS]

    def after(kind: int, stage: int, i: int, before: int, before_stage: int, j: int, delay: int = 0) -> None:
        model.add(start[kind][stage][i] >= start[before][before_stage][j] + int(duration[before, before_stage]) + delay)

    for s in range(p):
        model.add_no_overlap([model.new_fixed_size_interval_var(start[k][s][i], int(duration[k, s]), "")
                              for k in range(3) for i in range(m)])
        for i in range(m):
            for k in range(3):
                if i:
                    after(k, s, i, k, s, i - 1)
            if i >= cap:  # first in first out, so the cap is a precedence
                after(0, s, i, 2, s, i - cap)
            if s:
                after(0, s, i, 0, s - 1, i, latency)
                after(1, s - 1, i, 1, s, i, latency)
            after(1, s, i, 0, s, i)
            after(2, s, i, 1, s, i)
            for k in range(3):
                model.add_hint(start[k][s][i], int(hint[k, s, i]))
        if objective != "period":
            model.add(start[0][s][0] == int(first[s]))
    cost = model.new_int_var(floor, known, objective)
    for s in range(p):
        ends = start[2][s][m - 1] + int(duration[2, s])
        model.add(cost >= (ends if objective == "makespan" else ends - start[0][s][0]))
    model.minimize(cost)
    solver = cp_model.CpSolver()
    solver.parameters.catch_sigint_signal = False  # else the solver would catch Ctrl-C for the whole process
    solver.parameters.max_time_in_seconds = time_limit
    solver.parameters.random_seed = 0
    status = solver.solve(model)
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        begun = np.array([[[solver.value(x) for x in row] for row in rows] for rows in start])
        value, bound = solver.objective_value, solver.best_objective_bound
    else:  # out of time before the hint was read
        begun, value, bound = hint, float(known), float(floor)
    schedule = schedule_of([RankOrder(task // m, rank, task % m) for rank, task in enumerate(
        np.argsort(begun.transpose(1, 0, 2).reshape(p, 3 * m), axis=1, kind="stable"))])
    proved = status == cp_model.OPTIMAL
    return Ordered(schedule, {"status": {
        "objective": objective, "value": value * unit * rounded_to, "bound": bound * unit * rounded_to,
        "proved": proved, "status": "OPTIMAL" if proved else "FEASIBLE",
        **({} if rounded_to == 1 else {"rounded_to": rounded_to})}})


def _rounded(problem: Problem) -> tuple[Problem, float]:
    """The problem with times in thousandths of the longest, at least one each; and that thousandth."""
    rows = {name: getattr(problem, name) for name in ("forward", "output_grad", "weight_grad")}
    tick = float(max(times.max() for times in rows.values())) / 1000
    whole: dict[str, Any] = {name: np.maximum(1, np.rint(times / tick)) for name, times in rows.items()}
    return replace(problem, latency=float(np.rint(problem.latency / tick)), **whole), tick


def in_ticks(problem: Problem) -> tuple[Ints, float]:
    """(the forward, output-gradient and weight-gradient times and the latency per stage in whole ticks, the length of a
    tick). Raises PipelineError if the times need such a fine tick that a schedule would have 2**40 ticks."""
    from fractions import Fraction  # it also imports `decimal`: only for this policy

    rows = (problem.forward, problem.output_grad, problem.weight_grad, np.full(problem.ranks, problem.latency))
    exact = [[Fraction(repr(float(t))) for t in row] for row in rows]
    flat = [t for row in exact for t in row]
    scale = lcm(*(t.denominator for t in flat))
    step = gcd(*(int(t * scale) for t in flat))
    ticks = [[int(t * scale) // step for t in row] for row in exact]
    if sum(map(sum, ticks)) * problem.micro_batches > FINEST:
        raise PipelineError("the times have no common tick that is long enough for the solver")
    return np.array(ticks, np.int64), float(Fraction(step, scale))


def _earliest(schedule: Schedule, ticks: Ints, micro_batches: int) -> Ints:
    """The earliest start of every task in ticks, by (kind, stage, micro-batch)."""
    stages = ticks.shape[1]
    graph = stage_graph(stages, micro_batches)
    forward, output_grad, weight_grad, (latency, *_) = ticks.tolist()
    start, _, _ = times(graph, schedule, CostModel.given(forward, output_grad, weight_grad, latency))
    kind, stage, micro_batch = np.ix_(range(3), range(stages), range(micro_batches))
    at = graph.find(pack(stage, kind, micro_batch).ravel())
    return np.rint(start[at]).astype(np.int64).reshape(3, stages, micro_batches)
