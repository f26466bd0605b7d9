"""Where a grid of torch's gathers stages, lets them go and sums their gradients: for `shard.py`, in place of its rules.

`1UNSHARD@0F3` comes right after task 0F3 of its rank, `1UNSHARD` before all of its tasks. At one place gradients are
summed first, then stages are let go, then others gathered.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import numpy as np

from ..core.placement import Refused
from ..core.tasks import Kind, parse_task, task_name
from .draft import Draft
from .shares import WHAT, Gather, Sum

PLACED = "where stages are whole"  #: the note of an order that says it
ACTION = re.compile(r"(\d{1,6})(UNSHARD|RESHARD|REDUCE_GRAD)(?:@(\d{1,6}[FOWB]\d{1,6}))?")
CURE = "change the grid, or give --shard 3,prefetch=0,keep=none"


def moved(notes: Mapping[str, str], to: Mapping[int, int]) -> dict[str, str]:
    """The notes of an order whose places come after other tasks. `to`: a task's key -> the other's; -1: before all."""
    names = {f"@{task_name(a)}": f"@{task_name(b)}" if b >= 0 else "" for a, b in to.items() if PLACED in notes}
    return {name: re.sub("@[^+]*", lambda at: names.get(at[0], at[0]), text) if name == PLACED else text
            for name, text in notes.items()}


def _places(draft: Draft, placed: Sequence[str], sums: bool) -> list[tuple[int, str, int]]:
    """(stage, action, the task after which it comes or -1) of the sums, or of other actions, in the order of tasks."""
    graph, rank, found = draft.graph, draft.rank, list[tuple[int, str, int]]()
    home = dict(zip(graph.unit.tolist(), rank.tolist(), strict=True))
    for word in placed:
        stage, what, after = ACTION.fullmatch(word).groups()  # type: ignore[union-attr]
        at = -1 if after is None else int(graph.find(np.array([parse_task(after)]))[0])
        if int(stage) not in home or (after and at < 0) or (after and rank[at] != home[int(stage)]):
            raise Refused(WHAT, f"{word} is of a stage or a task that its rank does not have", CURE)
        if (what == "REDUCE_GRAD") == sums:
            found.append((int(stage), what, at))
    return sorted(found, key=lambda action: action[2])


def with_sums_placed(draft: Draft, placed: Sequence[str]) -> Draft:
    """The draft whose sums come where REDUCE_GRAD stands, or after the last weight gradient. Raises Refused for two of
    a stage, or one before a weight gradient."""
    graph, place, told = draft.graph, np.arange(len(draft.graph), dtype=np.float64), _places(draft, placed, True)
    for t in np.flatnonzero(graph.kind == Kind.A).tolist():
        stage, before = int(graph.unit[t]), graph.preds[t]
        last = int(before[graph.kind[before] != Kind.U].max(initial=-1))
        own = [at for unit, _, at in told if unit == stage] or [last]
        if own[0] < last or len(own) > 1:
            raise Refused(WHAT, f"stage {stage} is summed {'before' if own[0] < last else 'twice after'} its last "
                          f"weight gradient {graph.name(last)}", CURE)
        place[t] = max(own[0], before.max(initial=-1)) + 0.5
    return draft.take(np.argsort(place, kind="stable"))


def sums_placed(draft: Draft, sums: Sequence[Sum], placed: Sequence[str]) -> dict[int, int]:
    """Sum -> the task after which it comes."""
    where = {stage: at for stage, _, at in _places(draft, placed, True)}
    return {s.task: at for s in sums if s.gradients and (at := where.get(int(draft.graph.unit[s.task]), -1)) >= 0}


def gathers_placed(draft: Draft, sums: Sequence[Sum], uses: Sequence[tuple[int, int]], placed: Sequence[str]
                   ) -> list[tuple[Gather, int, int]]:
    """The gathers of these sums' parameters, each with the tasks between which they are whole. `uses`: tasks that use
    parameters, each with the number of the sum. Raises Refused for two gathers of a stage at once, and for a use of a
    stage that is not whole."""
    graph, found, where = draft.graph, list[tuple[int, Gather, int, int]](), sums_placed(draft, sums, placed)
    computes = np.isin(graph.kind, (Kind.F, Kind.O, Kind.W, Kind.B))
    for i, s in enumerate(sums):
        mine = [(k, *action[1:]) for k, action in enumerate(_places(draft, placed, False))
                if action[0] == graph.unit[s.task]]
        if len(mine) % 2:  # it is let go at the end at the latest
            mine.append((0, "RESHARD", int(np.flatnonzero(computes & (draft.rank == draft.rank[s.task]))[-1])))
        left = {t for t, of in uses if of == i}
        for (k, first, begin), (_, then, end) in zip(mine[::2], mine[1::2], strict=True):
            if (first, then) != ("UNSHARD", "RESHARD") or begin >= end:
                raise Refused(WHAT, f"stage {graph.unit[s.task]} is gathered while it is whole, or let go before a "
                              f"task of its rank has run", CURE)
            users = sorted(t for t in left if begin < t <= end)
            left -= {*users}
            summed = max((t for t, at in where.items() if at == begin and t < min([end, *users])), default=-1)
            found.append((k, Gather(s, s.parameters, users, summed), begin, end))
        if left:
            raise Refused(WHAT, f"{graph.name(min(left))} uses stage {graph.unit[s.task]}, which is not whole then",
                          CURE)
    return [gather for _, *gather in sorted(found, key=lambda each: each[0])]  # type: ignore[misc]
