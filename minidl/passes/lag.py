"""A bound on how late a weight gradient may run: the inputs of at most `lag` + 1 layers' weight gradients are alive.

A W that waits keeps its layer's input and output gradient. With the bound, a W runs before the output gradient is made
that the W `lag` + 1 places later reads; in a pipeline, before the O of the same stage, `lag` + 1 micro-batches later.
XLA has such a fence for collectives (openxla/xla #45753, #45929); the rule for layers is ours.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import numpy as np

from ..core.columns import grouped
from ..core.graph import Role, StorageSpec
from ..core.machine import PlanError, shorten
from ..core.placement import Refused
from ..core.tasks import Kind, unpack
from .draft import Draft

TOKEN = StorageSpec("token", (1,), "uint8", 1, Role.WORKSPACE)  #: of buffers that order tasks, and hold nothing

def fenced(draft: Draft, lag: int | None = None) -> Draft:
    """A whole step in which each W within the bound writes a token, a buffer that no launch touches, and the O that
    would break the bound reads it. Raises PlanError for a bound that is no whole number from 0 on."""
    graph, lag, e = draft.graph, _checked(lag), draft.edit()
    maker = dict(zip(graph.writes.ids.tolist(), graph.writes.row_of_each().tolist(), strict=True))
    layers = grouped(((int(graph.micro_batch[t]), int(graph.unit[t])), t)
                     for t in np.flatnonzero(graph.kind == Kind.W).tolist())
    by_micro_batch, token = defaultdict[int, list[list[int]]](list), 0
    for (micro_batch, _), tasks in layers.items():
        by_micro_batch[micro_batch].append(tasks)
    for order in by_micro_batch.values():
        for early, late in zip(order, order[lag + 1 :], strict=False):
            made = [maker[b] for t in late for b in graph.reads[t].tolist() if graph.kind[maker.get(b, t)] == Kind.O]
            if made and max(early) < min(made):
                token = e.buffer(token, e.storage_of[token], "token") if token else e.place(TOKEN)[1]
                for t in early:
                    e.writes[t].add(token)
                for t in made:
                    e.reads[t].add(token)
    return e.draft


def in_time(draft: Draft, lag: int | None = None) -> Draft:
    """An order of stages in which each W that would break the bound comes just before the O that would. Raises Refused
    for an order that also says which weights tasks read, or runs tasks in pairs, and PlanError as `fenced` does."""
    lag, order = _checked(lag), draft.order
    if draft.stale or order.joined is not None:
        raise Refused("lag", f"{draft.name} " + ("orders tasks by the weights that they read" if draft.stale else
                                                 "runs tasks in pairs"), "leave lag out")
    keys = list[int]()
    for lane in range(len(order.lanes)):
        waits, done = defaultdict[int, list[int]](list), list[int]()  # stage -> its W in order that have not run
        own = unpack(order.order(lane))
        for key, kind, stage in zip(own.key.tolist(), own.kind.tolist(), own.unit.tolist(), strict=True):
            if kind == Kind.W:
                waits[stage].append(key)
        opened = dict.fromkeys(waits, 0)
        for key, kind, stage in zip(own.key.tolist(), own.kind.tolist(), own.unit.tolist(), strict=True):
            if kind == Kind.W and key not in waits[stage]:
                continue  # it has run
            if kind == Kind.W:
                waits[stage].remove(key)
                opened[stage] -= 1
            elif kind == Kind.O and stage in waits:
                while opened[stage] > lag:
                    done.append(waits[stage].pop(0))
                    opened[stage] -= 1
                opened[stage] += 1
            done.append(key)
        keys += done
    return replace(draft, schedule=replace(order, keys=np.array(keys, np.int64), slots=None))


def _checked(lag: int | None) -> int:
    if not isinstance(lag, int) or isinstance(lag, bool) or lag < 0:
        raise PlanError(f"lag is {shorten(lag)}; it must be a whole number of layers or micro-batches, from 0 on")
    return lag
