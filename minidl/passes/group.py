"""Weight gradients that wait for company: several become one task of one launch, the kernel `group`.

A W is free if only updates, sums over ranks and later micro-batches need its result. The free W whose launches are
alike (`minidl.kernels.registry.kernel`) are taken in recorded order, `group_weights` of them at a time; with `lag`,
never more layers than may wait. A group is ready when its last member is. It has a unit of its own, whose name says who
is in it: `53W0 (4W0+7W0)`. Each member keeps its arrays and its kernel, so no bit changes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from ..core.columns import Ints, spread
from ..core.graph import Launch, TaskGraph
from ..core.machine import PlanError, is_whole, shorten
from ..core.placement import Refused
from ..core.tasks import COLLECTIVE, GraphError, Kind, as_recorded, pack, parse_task, task_name, unpack
from .draft import Draft
from .lag import layers
from .rewrite import merge

WHAT = "group_weights"
_GROUP = re.compile(r"\d+W\d+(\+\d+W\d+)+")  #: the name of a group's unit


def grouped(draft: Draft, group_weights: int | str | None = None, lag: int | None = None) -> Draft:
    """The draft with groups of at most `group_weights` weight gradients, or with these: `4W0+7W0 9W0+12W0`. A group
    takes as long as its members without the launches that it saves, and no less than the longest. Raises PlanError for
    anything else than a number from 2 on or names of tasks, and Refused for groups of tasks that are not alike, or that
    would wait for each other."""
    graph = draft.graph
    if not (groups := _groups(graph, group_weights, lag)):
        return draft
    keys, units = graph.keys.copy(), max(len(graph.unit_names), int(graph.unit.max(initial=-1)) + 1)
    names = [*graph.unit_names, *[""] * (units - len(graph.unit_names))]
    for i, members in enumerate(groups):
        names.append("+".join(map(task_name, members)))
        ids = graph.find(np.array(members, np.int64))
        if not _fit(graph, ids) or (keys[ids] != graph.keys[ids]).any():
            raise Refused(WHAT, f"{names[-1]} are no weight gradients of this step that are alike, each in one group",
                          "is it the plan of another network?")
        keys[ids] = pack(units + i, Kind.W, unpack(members[0]).micro_batch)
    try:
        joined, group = merge(replace(graph, unit_names=tuple(names)), keys)
    except GraphError as error:
        raise Refused(WHAT, str(error), "leave it out") from None
    found = draft.merged(replace(joined, launches=tuple(
        together(own) if unit >= units else own
        for unit, own in zip(joined.unit.tolist(), joined.launches, strict=True))), group)
    at = np.flatnonzero(joined.unit >= units)
    longest = spread(group, np.nan_to_num(draft.time), len(joined), by=np.maximum)
    saved = (np.bincount(group)[at] - 1) * (draft.cost.launch + draft.cost.node)
    time = found.time.copy()
    time[at] = np.maximum(time[at] - saved, longest[at])
    made = [joined.name(t) for t in at.tolist()]
    own = dict(zip(made, np.maximum(time[at] - draft.cost.launch, 0.0).tolist(), strict=True))
    corun = draft.cost.corun  # with others they slow each other down as their first members do
    corun = corun and replace(corun, groups={**corun.groups, **{
        name: corun.groups.get(joined.unit_names[joined.unit[t]].partition("+")[0], "")
        for name, t in zip(made, at.tolist(), strict=True)}})
    kinds = {kind: [*each, *[0.0] * (units + len(groups) - len(each))] if isinstance(each, Sequence) else each
             for kind, each in draft.cost.kinds.items()}  # of each unit: groups are named below
    return replace(found, time=time, cost=replace(draft.cost, kinds=kinds, corun=corun,
                                                  tasks={**draft.cost.tasks, **own}))


def _fit(graph: TaskGraph, ids: Ints) -> bool:
    """Whether these tasks can be a group: several that are alike, of one micro-batch, none of which needs another."""
    if (ids < 0).any() or len(np.unique(ids)) < max(2, len(ids)):
        return False
    alike = {(_alike(graph, t), int(graph.micro_batch[t])) for t in ids.tolist()}
    return len(alike) == 1 and "" not in next(iter(alike)) and not any(
        np.isin(graph.preds[t], ids).any() for t in ids.tolist())


def _groups(graph: TaskGraph, asked: int | str | None, lag: int | None) -> list[list[int]]:
    """The keys of the members of each group."""
    try:
        if isinstance(asked, str):
            return [[parse_task(name) for name in own.split("+")] for own in asked.split()]
    except GraphError as error:
        raise PlanError(f"{WHAT} is {shorten(asked)}: {error}") from None
    if asked is None or not is_whole(asked, 2):
        raise PlanError(f"{WHAT} is {shorten(asked)}; it must be a whole number of weight gradients, from 2 on")
    return [graph.keys[own].tolist() for own in companies(graph, asked, lag) if len(own) > 1]


def companies(graph: TaskGraph, most: int, lag: int | None = None) -> Iterator[list[int]]:
    """The members of each group: the free W that are alike, of the same micro-batch, in recorded order, `most` at a
    time; some stay alone. With `lag`, output gradients of the first and the last are at most so many layers apart."""
    free, depth = set[int](), [0] * len(graph)  # the most free W before each task, one after another
    waiting = dict[tuple[str, int, int], list[int]]()
    turn = {} if lag is None else {t: i for i, (_, own) in enumerate(layers(graph)) for t in own}
    for t, before in enumerate(graph.preds.lists()):
        depth[t] = max((depth[p] + (p in free) for p in before), default=0)
        if not (alike := _alike(graph, t)) or not _may_wait(graph, t) or (lag is not None and t not in turn):
            continue
        free.add(t)
        company = waiting.setdefault((alike, int(graph.micro_batch[t]), depth[t]), [])
        if len(company) == most or (lag is not None and company and turn[t] - turn[company[0]] > lag):
            yield [*company]
            company.clear()
        company.append(t)
    yield from waiting.values()


def _may_wait(graph: TaskGraph, t: int) -> bool:
    """Whether only updates, sums over ranks and later micro-batches need a task."""
    after = graph.succs[t]
    return bool((np.isin(graph.kind[after], (Kind.U, *COLLECTIVE))
                 | (graph.micro_batch[after] > graph.micro_batch[t])).all())


def together(launches: Sequence[Launch]) -> tuple[Launch, ...]:
    """The launches of several tasks, those that are alike as one, with the others after it: what they add to."""
    one = [launch for launch in launches if launch.alike]
    of = tuple((x.kernel, len(x.reads), len(x.writes), x.constants) for x in one)
    reads, writes, work = (tuple(v for x in one for v in getattr(x, what)) for what in ("reads", "writes", "work"))
    return (Launch("group", reads, writes, work, (("of", of),)), *(x for x in launches if not x.alike))


def groups_in(graph: TaskGraph) -> dict[int, str]:
    """Unit of each group -> its members, as in `4W0+7W0`."""
    return {unit: name for unit, name in enumerate(graph.unit_names) if _GROUP.fullmatch(name)}


def group_of(graph: TaskGraph, key: int) -> int:
    """The key of the group in which a task is; its own if it is in none."""
    own = [unit for unit, members in groups_in(graph).items() if task_name(key) in members.split("+")]
    return int(as_recorded(graph.keys[graph.unit == own[0]][0])) if own else key


def _alike(graph: TaskGraph, t: int) -> str:
    """Which tasks t may be joined with: by its first launch, if only the others need that one's results; else none."""
    own, key = graph.launches[t] if graph.launches else (), unpack(graph.keys[t])
    fits = key.kind == Kind.W and not (key.part or key.late or key.iteration)
    return own[0].alike if own and fits and not any(launch.alike for launch in own[1:]) else ""
