"""A policy as a comparison: `before(a, b)` says whether task a of a rank runs before task b of the same rank.

A third way to write an order, after a function and a file; Shardy MPMD (JAX) writes its pipelines so. The answers are
kept exactly: with the data they are the edges of one graph, which may have no circle. A comparison need not be
transitive, nor say anything of a pair: what it leaves open runs as soon as it can, as in `fast_forward_greedy`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import Parameter, Signature, signature
from itertools import islice, pairwise, permutations
from typing import Any

import numpy as np

from ...core.columns import Rows, grouped
from ...core.graph import TaskGraph
from ...core.machine import shorten
from ...core.placement import PipelineError
from ...core.schedule import Schedule
from ...core.tasks import Kind
from ..ordered import beyond
from .listing import work_conserving
from .policy import Policy
from .problem import Problem
from .stages import stage_graph

Before = Callable[..., Any]
FREE = (Kind.B, Kind.O, Kind.F, Kind.W)  #: of ready tasks between which nothing is said, these kinds run first
STARTS = 50  #: the tasks from which the shortest circle is looked for


@dataclass(frozen=True, slots=True)
class RankTask:
    """A task of a rank, as a comparison sees it. `kind`: F, O or W, or F or B if backwards are fused; `chunk`: the
    number of the stage on its rank; `problem`: ranks, micro-batches, times, latency, cap."""

    kind: str
    stage: int
    micro_batch: int
    rank: int
    chunk: int
    problem: Problem

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


def needed(function: Callable[..., Any]) -> int:
    """How many arguments of a function have no default, and may be given by place; of a comparison exactly two."""
    try:
        found = signature(function).parameters.values()
    except (TypeError, ValueError):
        return 0
    return sum(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in found)


def compared(before: Before, placement: str = "looped", chunks: int = 1, chunks_fixed: bool = False,
             fused: bool = False) -> Policy:
    """The policy of a comparison; `placement` and `chunks` as in a `Policy`. Its options are the comparison's own, and
    `fused`: whether a backward is one task B, or O and W apart. Its order raises PipelineError for answers that are no
    bool, that contradict each other, or that make a circle with the data."""
    name = getattr(before, "__name__", type(before).__name__)

    def order(problem: Problem, *, fused: bool = fused, **options: Any) -> Schedule:
        graph = stage_graph(problem.stages, problem.micro_batches, fused, problem.placement.directions)
        said = _said(name, partial(before, **options), problem, graph)
        try:
            return work_conserving(problem, FREE, fused, lambda problem, graph: said)
        except PipelineError:
            raise PipelineError(f"{name}: {_circle(graph, said)}") from None

    first = [*signature(order, eval_str=True).parameters.values()][:2]
    own = [p.replace(kind=Parameter.KEYWORD_ONLY) for p in beyond(before, 2).values()]
    order.__signature__ = Signature([*first, *own])  # type: ignore[attr-defined]
    order.__name__, order.__doc__ = name, before.__doc__
    return Policy(order, placement, chunks, chunks_fixed)


def _said(name: str, before: Before, problem: Problem, graph: TaskGraph) -> Rows:
    """The successors of each task by the comparison, which is asked about both orders of each pair."""
    place, m = problem.placement, problem.micro_batches
    rank = place.rank(graph.unit, graph.micro_batch, m)
    chunk = np.empty_like(place.table)
    for r in range(problem.ranks):
        chunk[place.table == r] = np.arange(np.count_nonzero(place.table == r))
    chunk = chunk[place.direction(graph.micro_batch, m), graph.unit]
    columns = (graph.kind, graph.unit, graph.micro_batch, rank, chunk)
    tasks = [RankTask(Kind(kind).name, stage, micro_batch, on, number, problem) for kind, stage, micro_batch, on, number
             in zip(*(column.tolist() for column in columns), strict=True)]
    pairs = list[tuple[int, int]]()
    for r in range(problem.ranks):
        for s, t in permutations(np.flatnonzero(rank == r).tolist(), 2):
            answer = before(tasks[s], tasks[t])
            if answer is True or (isinstance(answer, np.bool_) and answer):
                pairs.append((s, t))
            elif answer is not False and not isinstance(answer, np.bool_):
                raise PipelineError(f"{name}: of {tasks[s]} and {tasks[t]} it says {shorten(answer)}; a comparison "
                                    f"of two tasks says True or False")
    source, target = np.array(pairs, np.int64).reshape(-1, 2).T
    both = np.flatnonzero(np.isin(source * len(tasks) + target, target * len(tasks) + source))
    if both.size:
        s, t = tasks[source[both[0]]], tasks[target[both[0]]]
        raise PipelineError(f"{name}: it says both that {s} is before {t} and that {t} is before {s}")
    return Rows.from_pairs(source, target, len(tasks))


def _circle(graph: TaskGraph, said: Rows) -> str:
    """A shortest circle of the data's edges and those that a comparison says, in words."""
    source, target = (np.concatenate(ids) for ids in zip(
        *((rows.row_of_each(), rows.ids) for rows in (graph.succs, said)), strict=True))
    while not (on := np.isin(source, target) & np.isin(target, source)).all():  # the rest leads to circles or from them
        source, target = source[on], target[on]
    succs = grouped(zip(source.tolist(), target.tolist(), strict=True))
    path = min(islice(filter(None, (_back(start, succs) for start in sorted(succs))), STARTS), key=len)
    needs = [t in graph.succs[s] for s, t in pairwise(path)]
    edges = [f"{graph.name(t)} needs {graph.name(s)}" if need else f"{graph.name(s)} before {graph.name(t)}"
             for need, (s, t) in zip(needs, pairwise(path), strict=True)]
    return f"the comparison {'and the data make' if any(needs) else 'makes'} a circle: {', '.join(edges)}"


def _back(start: int, succs: Mapping[int, Sequence[int]]) -> list[int]:
    """The shortest way from a task back to itself; empty if there is none."""
    ways, reached = deque([[start]]), set[int]()
    while ways:
        way = ways.popleft()
        if start in succs[way[-1]]:
            return [*way, start]
        ways += [[*way, t] for t in dict.fromkeys(succs[way[-1]]) if t not in reached]
        reached.update(succs[way[-1]])
    return []
