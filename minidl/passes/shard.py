"""Sharded updates (ZeRO 1): each data-parallel rank keeps the optimizer's states of its share of every parameter.

Rajbhandari, Rasley, Ruwase, He, "ZeRO: memory optimizations toward training trillion parameter models", 2020. The
sum of gradients becomes a reduce-scatter (AS), which also takes this rank's share of the parameters; the update changes
that share, and an all-gather (AG) brings the shares of all ranks to all. Sums are added in the order of ranks as
before, and updates work element by element, so it is bit-identical to ranks that update everything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from ..core.graph import Launch, Role, StorageSpec, View
from ..core.placement import Refused
from ..core.schedule import Schedule
from ..core.tasks import COLLECTIVE, Kind, repack, unpack
from .draft import Draft, Edit
from .rewrite import gradients

WHAT = "sharded updates"


def shard(draft: Draft, shard: int = 0) -> Draft:
    """The draft in which each rank updates its share. Raises Refused for a step on one rank, for stages, for updates of
    the next step, and for gradients that something else than an update reads when ranks have summed them."""
    if not shard:
        return draft
    graph, ranks = draft.graph, draft.machine.ranks
    if draft.staged or draft.sums is None or ranks == 1:
        raise Refused(WHAT, "each of several data-parallel ranks keeps a share",
                      "give --parallel data and at least 2 ranks, or leave --shard out")
    sums: list[int] = np.flatnonzero(np.isin(graph.kind, COLLECTIVE)).tolist()
    if (graph.kind[sums] != Kind.A).any() or (unpack(graph.keys[sums]).part > 0).any():
        raise _other(draft, "cuts its sums")
    given = draft.order if np.isin(unpack(draft.order.keys).kind, (Kind.AS, Kind.AG)).any() else None
    draft = _updates_last(draft) if given is None else replace(draft, schedule=_with_sums(given))
    e, spent, lane_of = draft.edit(), gradients(graph), _lanes(draft)
    update_of = {b: u for u, buffers in spent.items() for b in buffers.tolist()}
    for t in sums:
        own = {int(b): update_of[int(b)] for b in graph.writes[t].tolist()}
        readers = {b: [r for r in range(t + 1, len(graph)) if b in graph.reads[r]] for b in own}
        for b, found in readers.items():
            if found != [own[b]]:
                who = graph.name(next(r for r in found if r != own[b]))
                raise Refused(WHAT, f"{who} reads all elements of a gradient that ranks have summed, as clipping by "
                              f"norm and loss scaling do", "leave --clip or --shard out")
        _sharded(e, t, own, ranks, lane_of)
    made = e.draft
    return replace(made, graph=made.graph.compact(), schedule=given or made.order)  # without whole states


def _with_sums(order: Schedule) -> Schedule:
    """An order of a sharded step as one of the step whose ranks sum."""
    kind = unpack(order.keys).kind
    keys = np.where(kind == Kind.AS, repack(order.keys, kind=np.where(kind == Kind.AS, Kind.A, kind)), order.keys)
    left = np.concatenate([[0], np.cumsum(kind != Kind.AG)])
    return replace(order, ptr=left[order.ptr], keys=keys[kind != Kind.AG], slots=None)


def _other(draft: Draft, why: str) -> Refused:
    return Refused(WHAT, f"{draft.name} {why}", "give --scheduler barrier, buckets or no_overlap")


def _updates_last(draft: Draft) -> Draft:
    """The draft whose updates, which came before the next step, end the step: the next forward needs all shares."""
    order, lanes = draft.order, []
    for lane in range(len(order.lanes)):
        keys = order.order(lane)
        own = unpack(keys)
        late = int((own.late > 0).sum())
        if not (own.late[:late] > 0).all() or (own.kind[:late] != Kind.U).any():
            raise _other(draft, "updates beside the next step")
        lanes.append(np.concatenate([keys[late:], repack(keys[:late], late=0)]))
    return replace(draft, schedule=replace(order, keys=np.concatenate(lanes)))


def _lanes(draft: Draft) -> dict[int, tuple[int, bool]]:
    """Of each task the last one of its lane, and whether this lane only communicates."""
    found, order, ids = dict[int, tuple[int, bool]](), draft.order, draft.order.ids(draft.graph)
    for a, b in zip(order.ptr[:-1].tolist(), order.ptr[1:].tolist(), strict=True):
        talks = bool(np.isin(draft.graph.kind[ids[a:b]], COLLECTIVE).all())
        found |= dict.fromkeys(ids[a:b].tolist(), (int(ids[b - 1]), talks) if b > a else (-1, talks))
    return found


def _sharded(e: Edit, summed: int, own: Mapping[int, int], ranks: int, lane_of: Mapping[int, tuple[int, bool]]) -> None:
    """Replaces an A over gradients (buffer -> its update) by AS, updates of shares, and AG."""
    new, buffer_of = dict[int, int](), dict[int, int]()  # storage -> its share, and the buffer of that
    gradient, before, after, parameters = list[View](), list[View](), list[View](), list[View]()
    for u in dict.fromkeys(own.values()):
        for launch in e.launches[u]:
            if not launch.writes or e.specs[launch.writes[0].storage].role != Role.PARAMETER:
                raise Refused(WHAT, f"an update runs {launch.kernel}, which is not of single elements",
                              "leave --shard out")
            p, g = launch.reads[:2]
            gradient.append(_flat(g))
            parameters.append(_flat(p))
            for view in (p, g, *launch.writes[1:], *launch.work):
                if view.storage not in new:
                    new[view.storage], buffer_of[view.storage] = _share(e, view, ranks)
            before.append(e.whole(new[g.storage]))
            after.append(e.whole(new[p.storage]))
        def own_share(views: tuple[View, ...]) -> tuple[View, ...]:
            return tuple(e.whole(new[v.storage]) if v.storage in new else v for v in views)

        e.launches[u] = tuple(replace(one, reads=own_share(one.reads), writes=own_share(one.writes),
                                      work=own_share(one.work)) for one in e.launches[u])
    whole = {b for u in dict.fromkeys(own.values()) for b in e.reads[u] | e.writes[u] if e.storage_of[b] in new}
    of_parameters = {b for b in whole if e.specs[e.storage_of[b]].role == Role.PARAMETER}
    shares = {b: buffer_of[e.storage_of[b]] for b in whole}
    for u in dict.fromkeys(own.values()):
        e.reads[u] = {shares.get(b, b) for b in e.reads[u]}
        e.writes[u] = {shares.get(b, b) for b in e.writes[u]}
    nbytes, half = e.bytes[summed], e.time[summed] / 2
    last = max(own.values())
    key = unpack(e.keys[summed])
    gathered = e.task(last, key.unit, Kind.AG, key.micro_batch, stage=e.stage[summed],
                      reads={shares[b] for b in of_parameters}, writes=of_parameters, time=half, nbytes=nbytes,
                      launches=[Launch("all_gather", tuple(after), tuple(parameters))])
    end, talks = lane_of[summed]
    e.then(end if talks else last, gathered)
    e.keys[summed] = int(repack(e.keys[summed], kind=Kind.AS))
    e.reads[summed] = {*own} | of_parameters
    e.writes[summed] = {shares[b] for b in {*own} | of_parameters}
    e.launches[summed] = (Launch("reduce_scatter", (*gradient, *parameters), (*before, *after),
                                 constants=(("summed", len(gradient)),)),)
    e.time[summed] = half


def _share(e: Edit, view: View, ranks: int) -> tuple[int, int]:
    """A storage for a rank's share of another one, as long on all ranks, and a buffer on it."""
    spec = e.specs[view.storage]
    size = int(np.prod(spec.shape, dtype=np.int64))
    if view.offset or int(np.prod(view.shape, dtype=np.int64)) != size:
        raise Refused(WHAT, f"an update has only some elements of {spec.name}", "leave --shard out")
    count = -(-size // ranks)
    state = spec.role == Role.STATE
    return e.place(StorageSpec(f"{spec.name}, share", (count,), spec.dtype, count * np.dtype(spec.dtype).itemsize,
                               Role.STATE if state else Role.WORKSPACE, share_of=spec.live if state else None))


def _flat(view: View) -> View:
    return replace(view, shape=(int(np.prod(view.shape, dtype=np.int64)),), strides=(1,))
