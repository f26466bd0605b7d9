"""A bound on how late weight gradients may run: at most `lag` + 1 of those whose inputs are there may wait at once.

A W that waits keeps its layer's input and output gradient. With the bound, a W ends before the output gradient begins
that would be one too many; in a pipeline, before the O of the same stage `lag` + 1 micro-batches later. Layers whose W
read the same output gradient count once. `lag=0`: each W before the next one's input, as in a conventional backward.
XLA has such a fence for collectives (openxla/xla #45753, #45929); the rule for layers is ours.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from ..core.columns import Ints, grouped
from ..core.graph import FENCE, Role, TaskGraph
from ..core.machine import PlanError, is_whole, shorten
from ..core.placement import Refused
from ..core.schedule import Schedule
from ..core.tasks import Kind, repack, task_name, unpack
from .boundary import Mask
from .draft import Draft
from .rewrite import with_edges

Turns = Sequence[tuple[Sequence[int], Sequence[int]]]  #: in order: tasks that make an output gradient, and the W of it


def fenced(draft: Draft, lag: int | None = None) -> Draft:
    """The draft in which edges keep the bound, in whatever order and on whatever lanes its tasks run: if nothing else
    does, a W writes a token, and the O that would break the bound reads it. Raises PlanError for a bound that is no
    whole number from 0 on, and Refused if a W needs an O that would have to wait for it."""
    lag = _checked(lag)
    if not draft.staged:
        return _fenced(draft, layers(draft.graph), lag)
    order = draft.order
    for stage, rank in sorted({*zip(unpack(order.keys).unit.tolist(), order.rank_of_each.tolist(), strict=True)}):
        draft = _fenced(draft, _micro_batches(draft.graph, order.keep(order.rank_of_each == rank), stage), lag)
    return draft


def layers(graph: TaskGraph) -> Turns:
    """By the task that makes the last of a W's output gradients, all its parts; without the W that read none. A group
    of W (`group.py`) has the turn of its first member, whose inputs it holds."""
    whole = np.where(graph.kind == Kind.X, graph.keys, repack(graph.keys, part=0))
    gradient = graph.role_is(Role.GRADIENT)
    parts, of = grouped(zip(whole.tolist(), range(len(graph)), strict=True)), dict[int, list[int]]()
    for t in np.flatnonzero(graph.kind == Kind.W).tolist():
        read = graph.reads[t][gradient[graph.reads[t]]]
        makers = [p for p in graph.preds[t].tolist()
                  if graph.kind[p] != Kind.W and np.isin(graph.writes[p], read).any()]
        if makers:
            which = min if graph.launches and graph.launches[t][0].kernel == "group" else max
            of.setdefault(int(whole[which(makers)]), []).append(t)
    return sorted((parts[key], tasks) for key, tasks in of.items())


def _micro_batches(graph: TaskGraph, order: Schedule, stage: int) -> Turns:
    """By the O of a stage, all its parts, in the order in which they run."""
    ids = order.ids(graph)
    own = ids[(graph.unit[ids] == stage) & np.isin(graph.kind[ids], (Kind.O, Kind.W))]
    of = {kind: grouped((int(graph.micro_batch[t]), t) for t in own.tolist() if graph.kind[t] == kind)
          for kind in (Kind.O, Kind.W)}
    return [(tasks, of[Kind.W].get(i, [])) for i, tasks in of[Kind.O].items()]


def _fenced(draft: Draft, turns: Turns, lag: int) -> Draft:
    """The draft in which the W of each turn end before the O of the turn `lag` + 1 later begin."""
    graph, order = draft.graph, draft.schedule
    flat, until = [t for _, tasks in turns for t in tasks], dict[int, int]()  # O -> how many of the W come before it
    count = np.append(0, np.cumsum([len(tasks) for _, tasks in turns]))
    for turn, (makers, _) in enumerate(turns):
        until |= dict.fromkeys(makers, int(count[max(0, turn - lag)]))
    needs = graph.preds.lists()
    if order is not None:  # lanes keep their order
        ids, begin = order.ids(graph), order.place == 0
        for before, t in zip(ids[:-1][~begin[1:]].tolist(), ids[1:][~begin[1:]].tolist(), strict=True):
            needs[t] = [*needs[t], before]
    ended, number = [0] * len(graph), {t: i for i, t in enumerate(flat)}  # as bits, the W that have ended before
    tokens, sequence = list[tuple[int, int]](), [*_sequence(graph, needs, flat, until)]
    for t in sequence:
        for p in needs[t]:
            ended[t] |= ended[p]
        while late := ((1 << until.get(t, 0)) - 1) & ~ended[t]:
            w = flat[late.bit_length() - 1]
            tokens.append((w, t))
            ended[t] |= ended[w]
        if t in number:
            ended[t] |= 1 << number[t]
    if any(w > t for w, t in tokens):
        place = {t: i for i, t in enumerate(sequence)}
        draft, tokens = draft.take(np.array(sequence)), [(place[w], place[t]) for w, t in tokens]
    return replace(draft, graph=with_edges(draft.graph, tokens, FENCE))


def _sequence(graph: TaskGraph, needs: Sequence[Sequence[int]], flat: Sequence[int],
              until: dict[int, int]) -> Iterator[int]:
    """All tasks in an order in which the first `until[t]` of the W come before t: the recorded one, but for W that come
    just in time."""
    done, low = bytearray(len(graph)), 0
    for first in range(len(graph)):
        todo = [] if done[first] else [first]
        while todo:
            t = todo[-1]
            while low < len(flat) and done[flat[low]]:
                low += 1
            missing = next((x for x in (*needs[t], *flat[low : until.get(t, 0)]) if not done[x]), None)
            if missing is None:
                done[todo.pop()] = True
                yield t
            elif missing in todo:
                raise Refused("lag", f"{graph.name(missing)} needs a result that has to wait for it then",
                              "give a larger lag")
            else:
                todo.append(missing)


def in_time(draft: Draft, lag: int | None = None) -> Draft:
    """An order of stages in which each W that would break the bound comes just before the O that would, or before the
    pair with it. Raises PlanError as `fenced` does, and Refused if a lane does not have both gradients of a stage, if
    another W would have to come first whose O has not run, or if an order by old weights breaks the bound."""
    lag, order = _checked(lag), draft.order
    lanes = [_lane_in_time(draft, lane, lag) for lane in range(len(order.lanes))]
    keys = np.concatenate([keys for keys, _ in lanes])
    if (keys == order.keys).all():
        return draft
    if draft.stale or draft.read:
        why = "also orders what tasks read" if draft.stale else "is given"
        raise Refused("lag", f"the order of {draft.name} {why}, and weight gradients wait longer", "give a larger lag")
    joined = None if order.joined is None else np.concatenate([second for _, second in lanes])
    return replace(draft, schedule=replace(order, keys=keys, joined=joined, slots=None))


def _lane_in_time(draft: Draft, lane: int, lag: int) -> tuple[Ints, Mask]:
    """The entries of a lane, and whether each runs as one action with the one before it."""
    order = draft.order
    own, second = unpack(order.order(lane)), order.second[order.ptr[lane] : order.ptr[lane + 1]].tolist()
    kind, stage, micro_batch = own.kind.tolist(), own.unit.tolist(), own.micro_batch.tolist()
    left = grouped((stage[i], i) for i, k in enumerate(kind) if k == Kind.W)  # of each stage, in order
    every = unpack(order.keys)
    elsewhere = set(every.unit[every.kind == Kind.W].tolist()) - left.keys()
    waits, ran, found, begin = defaultdict[int, set[int]](set), set[int](), list[tuple[int, bool]](), 0
    for i, k in enumerate(kind):
        begin = begin if second[i] else len(found)  # of the action
        if k == Kind.O and stage[i] in elsewhere:
            raise Refused("lag", f"{draft.name} runs the two gradients of a stage on different lanes", "leave lag out")
        mine = waits[stage[i]]  # micro-batches whose O has run, and whose W has not
        while k == Kind.O and stage[i] in left and len(mine - {micro_batch[i]}) > lag:
            w = left[stage[i]].pop(0)
            if micro_batch[w] not in mine:
                raise Refused("lag", f"{draft.name} runs {task_name(own.key[w])} before the other weight gradients of "
                              f"its stage, but its output gradient later", "leave lag out")
            mine.remove(micro_batch[w])
            ran.add(w)
            found.insert(begin, (w, False))
            begin += 1
        if i in ran:
            continue
        if k == Kind.O:
            mine.add(micro_batch[i])
        elif k == Kind.W:
            if draft.stale and micro_batch[i] not in mine:
                raise Refused("lag", f"{draft.name} runs weight gradients an iteration late", "leave lag out")
            mine.discard(micro_batch[i])
            left[stage[i]].remove(i)
        found.append((i, second[i] and begin < len(found)))
    entries, joined = np.array(found, np.int64).reshape(-1, 2).T
    return own.key[entries], joined.astype(bool)


def _checked(lag: int | None) -> int:
    if lag is None or not is_whole(lag, 0):
        raise PlanError(f"lag is {shorten(lag)}; it must be a whole number of layers or micro-batches, from 0 on")
    return lag
