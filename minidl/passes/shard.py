"""Shards over data-parallel ranks: of the optimizer's states (ZeRO 1), gradients (2) and parameters (3, FSDP).

Rajbhandari, Rasley, Ruwase, He, "ZeRO: memory optimizations toward training trillion parameter models", 2020; Zhao et
al., "PyTorch FSDP", 2023. The sum of gradients becomes a reduce-scatter (AS), and the update changes this rank's share.
On level 3 the parameters outlive a step as shares alone: an all-gather (AG) brings them together before they are read,
and they are freed again. Below it, AG follows the update. Sums are added in the order of ranks as before, and updates
work element by element, so it is bit-identical to ranks that update everything. Clipping needs the sum of squares in
the order of one process: AG brings each summed gradient together for it. Loss scaling works on shares, and an AG tells
all ranks each one's flag.

Few arrays are whole at one time: a gather reads a token, a buffer that no launch touches, which a user of an earlier
one writes, and a weight gradient waits until an earlier one has been scattered. So the memory plan uses a place again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from math import prod

import numpy as np

from ..core.graph import Launch, Role, StorageSpec, View
from ..core.machine import PlanError
from ..core.placement import Refused
from ..core.schedule import Schedule
from ..core.tasks import COLLECTIVE, Kind, repack, unpack, widths
from ..pricing.cost import CostModel
from .draft import Draft
from .rewrite import gradients
from .updates_last import ended_by_updates

WHAT = "shards"  #: for messages, and the note of an order that says what is shared out
DISTANCES = (0, 1, 2, 4)  #: that the search tries


@dataclass(frozen=True)
class Shards:
    """The arrays that ranks share out. `level`: 0 nothing, 1 states, 2 gradients as well, 3 parameters as well.
    `prefetch`: how many groups of whole gradients or parameters there may be besides the one that is used. `keep`: the
    layers whose parameters stay whole from their first use to their last one. None: a search chooses, by time within
    the limit."""

    level: int = 0
    prefetch: int | None = None
    keep: tuple[int, ...] | None = None

    @classmethod
    def of(cls, told: Shards | int | str) -> Shards:
        """From a level, or from text such as `3,prefetch=1,keep=0+4`. Raises PlanError."""
        if isinstance(told, Shards):
            return told
        level, *more = str(told).split(",")
        known = dict(word.partition("=")[::2] for word in more)
        keep = known.get("keep", "")
        words = [level, known.get("prefetch", "0"), *(keep.split("+") if keep not in ("", "none") else ())]
        if (not all(word.isdecimal() and len(word) < 8 for word in words) or int(level) > 3 or
            known.keys() - {"prefetch", "keep"} or len(known) < len(more) or ("keep" in known and level != "3") or
            ("prefetch" in known and int(level) < 2)):
            raise PlanError(f"shard is {str(told)[:40]!r}; it must be 1 (states), 2 (gradients as well) or 3 "
                            f"(parameters as well), 2 or 3 with ,prefetch=N, 3 with ,keep=none or layers as in "
                            f",keep=0+4")
        return cls(int(level), int(known["prefetch"]) if "prefetch" in known else None,
                   tuple(map(int, words[2:])) if "keep" in known else None)

    def __str__(self) -> str:
        prefetch = f",prefetch={self.prefetch}" if self.level > 1 and self.prefetch is not None else ""
        keep = self.keep is not None and (",keep=" + ("+".join(map(str, self.keep)) or "none"))
        return f"{self.level}{prefetch}{keep or ''}" if self.level > 2 else f"{self.level}{prefetch}"


@dataclass
class _Sum:
    """A sum over ranks: its task, its updates, the tasks that need whole gradients; and gradients and parameters, as
    buffers and as views of all elements."""

    task: int
    updates: list[int]
    norms: list[int]
    gradients: list[int]
    parameters: list[int]
    gradient: list[View]
    parameter: list[View]


@dataclass
class _Gather:
    """An all-gather of the shares of these buffers of a sum, after task `after`, for the tasks `users`: up to `end` no
    other gather is needed."""

    sum: _Sum
    buffers: list[int]
    users: list[int]
    after: int = -1
    end: int = -1


def shard(draft: Draft, shard: Shards | int | str = 0) -> Draft:
    """The draft in which each rank has a share. Raises Refused for a step on one rank, for stages, for updates of the
    next step, and if something else than an update, clipping or loss scaling uses a gradient that ranks have summed."""
    how = Shards.of(shard)
    if not how.level:
        return draft
    graph, ranks = draft.graph, draft.machine.ranks
    if draft.staged or draft.sums is None or ranks == 1:
        raise Refused(WHAT, "each of several data-parallel ranks keeps a share",
                      "give --parallel data and at least 2 ranks, or leave --shard out")
    if widths(graph.keys):
        raise Refused(WHAT, "parts of an update change other elements than a rank's share",
                      "leave --split or --shard out")
    sums = np.flatnonzero(np.isin(graph.kind, COLLECTIVE))
    if (graph.kind[sums] != Kind.A).any() or (unpack(graph.keys[sums]).part > 0).any():
        raise _other(draft, "cuts its sums")
    given = draft.order if np.isin(unpack(draft.order.keys).kind, (Kind.AS, Kind.AG)).any() else None
    draft = _in_order(_updates_last(draft) if given is None else replace(draft, schedule=_with_sums(given)))
    how = replace(how, prefetch=how.prefetch if how.level > 1 else 0, keep=how.keep if how.level > 2 else ())
    layers = sorted(draft.graph.unit[draft.graph.kind == Kind.A].tolist())
    if strange := {*(how.keep or ())} - {*layers}:
        raise Refused(WHAT, f"there is no sum of gradients {min(strange)}A0 of a layer whose parameters to keep",
                      f"keep some of {', '.join(map(str, layers))}")
    if None in (how.prefetch, how.keep):
        return _searched(draft, how, layers)
    made = _sharded(draft, how)
    return made if given is None else replace(made, schedule=replace(given, notes=made.order.notes))


def _searched(draft: Draft, how: Shards, layers: Sequence[int]) -> Draft:
    """The draft of the shortest step whose peak is within the limit; of equal ones, the one of the least peak. First
    the distance is chosen, then how many of the last layers keep their parameters, which are whole for the shortest
    time."""
    planned, limit = draft.planned, draft.machine.memory_limit
    assert planned is not None
    found: list[tuple[float, int, int, Draft, Shards]] = []

    def tried(one: Shards) -> None:
        made = _sharded(draft, one)
        plan = planned(made.name, made.graph, made.order, costs(made, made.cost), made.machine.size)
        peak = max(plan.peak_bytes)
        time = float(f"{plan.period:.9g}") if limit is None or peak <= limit else np.inf  # without noise
        found.append((time, peak, len(found), made, one))

    for prefetch in DISTANCES if how.prefetch is None else (how.prefetch,):
        tried(replace(how, prefetch=prefetch, keep=how.keep or ()))
    best = min(found)[-1]
    for quarters in range(1, 5) if how.keep is None else ():
        tried(replace(best, keep=tuple(layers[len(layers) * (4 - quarters) // 4 :])))
    return min(found)[-2]


def costs(draft: Draft, cost: CostModel) -> CostModel:
    """These costs, with the draft's transfers."""
    known = draft.priced.tasks
    return replace(cost, tasks={**cost.tasks, **{t.name: known[t.name] for t in draft.graph if t.name in known
                                                 and (t.kind in (Kind.AS, Kind.AG) or not known[t.name])}})


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
    if (order := ended_by_updates(draft.order)) is None:
        raise _other(draft, "updates beside the next step")
    return replace(draft, schedule=order)


def _in_order(draft: Draft) -> Draft:
    """The draft whose graph has its tasks in the order of the lane that computes, each sum where it is in this lane, or
    as soon as it can be. Raises Refused for several such lanes."""
    graph, order = draft.graph, draft.order
    ids, talks = order.ids(graph), np.isin(graph.kind, COLLECTIVE)
    lanes = [ids[a:b] for a, b in pairwise(order.ptr.tolist()) if b > a]
    compute = [lane for lane in lanes if not talks[lane].all()]
    if len(compute) != 1 or len(lanes) > 2:
        raise _other(draft, "computes on several lanes")
    place = np.full(len(graph), -1.0)
    place[compute[0]] = np.arange(len(compute[0]))
    for t in np.flatnonzero(talks & (place < 0)).tolist():
        place[t] = place[graph.preds[t]].max(initial=-1) + 0.5
    return draft.take(np.argsort(place, kind="stable"))


def _sharded(draft: Draft, how: Shards) -> Draft:
    """The draft with these shares, on the same lanes; its graph has their order."""
    assert how.prefetch is not None
    work = _Work(draft, how.level)
    sums = [work.sum(t) for t in np.flatnonzero(draft.graph.kind == Kind.A).tolist()]
    unscaled = work.unscale()
    gathers = [_Gather(s, s.gradients, s.norms, max(s.task, unscaled)) for s in sums if s.norms]
    gathers += [_Gather(s, s.parameters, run) for s, run in _runs(draft, sums, how.keep or ())] * (how.level > 2)
    gathers.sort(key=lambda gather: gather.users[0])
    for k, gather in enumerate(gathers):
        needed = gathers[k + 1].users[0] if k + 1 < len(gathers) else len(draft.graph)
        gather.end = max((u for u in gather.users if u < needed), default=gather.users[0])
        before = [g.end for g in gathers[: max(0, k - how.prefetch)] if g.end < gather.users[0]]
        work.gather(gather, before[-1] if before and how.level > 1 else -1)
    for j, one in enumerate(sums):
        work.scatter(one)
        if how.level < 3:
            work.bring_back(one)
        for then in sums[j + 1 + how.prefetch :][: how.level > 1]:
            work.wait(one, then)
    return work.done(how)


def _runs(draft: Draft, sums: Sequence[_Sum], keep: Sequence[int]) -> list[tuple[_Sum, list[int]]]:
    """The tasks that use the parameters of each sum, in runs without a use of others between them; all uses of kept
    ones are one run."""
    graph, found, kept = draft.graph, list[tuple[_Sum, list[int]]](), dict[int, list[int]]()
    readers = graph.reads.transposed(len(graph.buffer_bytes))
    uses = sorted({(t, i) for i, s in enumerate(sums) for b in s.parameters for t in readers[b].tolist()
                   if t not in s.updates})
    for i, run in groupby(uses, key=lambda use: use[1]):
        users = [t for t, _ in run]
        if i in kept and int(graph.unit[sums[i].task]) in keep:
            kept[i] += users
        else:
            kept[i] = users
            found.append((sums[i], users))
    return found


class _Work:
    """The shares that are made, and what the tasks do with them."""

    def __init__(self, draft: Draft, level: int) -> None:
        graph = draft.graph
        self.e, self.draft, self.level, self.ranks = draft.edit(), draft, level, draft.machine.ranks
        self.update_of = {b: u for u, own in gradients(graph).items() for b in own.tolist()}
        self.readers, self.writers = (rows.transposed(len(graph.buffer_bytes)) for rows in (graph.reads, graph.writes))
        self.shares = dict[int, tuple[int, int]]()  # storage -> a storage for this rank's share, and a buffer on it
        self.unscales = set[int]()
        self.parts = Counter[int]()  # all-gathers of each unit
        self.tokens = list[int]()

    # --------------------------------------------------------------------------------------------------- what there is
    def sum(self, t: int) -> _Sum:
        """The sum that task t makes; its updates change shares from now on."""
        e = self.e
        own = {b: self.update_of[b] for b in self.draft.graph.writes[t].tolist()}
        found = _Sum(t, [*dict.fromkeys(own.values())], [], [*own], [], [], [])
        for b, u in own.items():
            for r in sorted({*self.readers[b].tolist(), *self.writers[b].tolist()} - {*range(t + 1), u}):
                kernels = {one.kernel for one in e.launches[r] if e.storage_of[b] in {v.storage for v in one.views}}
                if kernels == {"square_sum"}:
                    found.norms.append(r)
                elif "unscale" in kernels:
                    self.unscales.add(r)
                else:
                    raise Refused(WHAT, f"{self.draft.graph.name(r)} uses a gradient that ranks have summed, and is no "
                                  f"update", "leave --shard out")
        summed = {e.storage_of[b] for b in own}
        for u in found.updates:
            for launch in e.launches[u]:
                if launch.writes and e.specs[launch.writes[0].storage].role == Role.PARAMETER:
                    p, g = launch.reads[:2]
                    found.parameter.append(_flat(p))
                    found.gradient.append(_flat(g))
                    for view in (p, g, *launch.writes[1:], *launch.work):
                        self.share(view)
                elif launch.kernel != "mul" or launch.writes[0].storage not in summed:
                    raise Refused(WHAT, f"an update runs {launch.kernel}, which is not of single elements",
                                  "leave --shard out")
            found.parameters += sorted(b for b in e.reads[u] | e.writes[u] if e.storage_of[b] in self.shares
                                       and e.specs[e.storage_of[b]].role == Role.PARAMETER)
            e.launches[u] = tuple(map(self.on_shares, e.launches[u]))
            e.reads[u], e.writes[u] = self.of(e.reads[u]), self.of(e.writes[u])
        return found

    def share(self, view: View) -> None:
        """Makes this rank's share of the storage of a view, if there is none."""
        if view.storage in self.shares:
            return
        spec = self.e.specs[view.storage]
        if view.offset or prod(view.shape) != prod(spec.shape):
            raise Refused(WHAT, f"an update has only some elements of {spec.name}", "leave --shard out")
        count = -(-prod(spec.shape) // self.ranks)
        lasts = spec.role == Role.STATE or (spec.role == Role.PARAMETER and self.level == 3)
        self.shares[view.storage] = self.e.place(StorageSpec(
            f"{spec.name}, share", (count,), spec.dtype, count * np.dtype(spec.dtype).itemsize,
            spec.role if lasts else Role.WORKSPACE, share_of=spec.live if lasts else None))

    def of(self, buffers: Iterable[int]) -> set[int]:
        """The buffers, in place of those with a share its buffer."""
        return {self.shares.get(self.e.storage_of[b], (0, b))[1] for b in buffers}

    def on_shares(self, launch: Launch) -> Launch:
        reads, writes, work = (tuple(self.e.whole(self.shares[v.storage][0]) if v.storage in self.shares else v
                                     for v in views) for views in (launch.reads, launch.writes, launch.work))
        return replace(launch, reads=reads, writes=writes, work=work)

    # ---------------------------------------------------------------------------------------------------- what is done
    def scatter(self, s: _Sum) -> None:
        """The sum leaves each rank its share. Below level 3 it also takes this rank's share of the parameters."""
        e, t, copied = self.e, s.task, s.parameter if self.level < 3 else []
        given = [*s.gradient, *copied]
        own = [e.whole(self.shares[v.storage][0]) for v in given]
        e.keys[t] = int(repack(e.keys[t], kind=Kind.AS))
        e.reads[t] = {*s.gradients, *(s.parameters if copied else ())}
        e.writes[t] = self.of(e.reads[t])
        if given:
            most = self.ranks * max(v.size for v in own[: len(s.gradient)])  # received, of one array after the other
            dtype = s.gradient[0].dtype
            at, place = e.place(StorageSpec("received", (most,), dtype, most * np.dtype(dtype).itemsize,
                                            Role.WORKSPACE))
            e.writes[t].add(place)
            e.launches[t] = (Launch("reduce_scatter", tuple(given), tuple(own), (e.whole(at),),
                                    (("summed", len(s.gradient)),)),)
        e.time[t] /= 2

    def gather(self, gather: _Gather, before: int) -> None:
        """The users of a gather read what it brings together, once task `before` has let go (-1: none)."""
        e, s = self.e, gather.sum
        copies = e.copies(gather.buffers, "whole", role=Role.WORKSPACE, live=None)
        new = self._all_gather(s, max(gather.after, before), copies.storages, gather.buffers,
                               copies.buffers.values(), e.time[s.task] / 2)
        for user in gather.users:
            e.use(user, copies)
        if before >= 0:
            self.tokens.append(e.buffer(self.tokens[0], e.storage_of[self.tokens[0]], "token") if self.tokens else
                               e.place(StorageSpec("token", (1,), "uint8", 1, Role.WORKSPACE))[1])
            e.writes[before].add(self.tokens[-1])
            e.reads[new].add(self.tokens[-1])

    def bring_back(self, s: _Sum) -> None:
        """The updated shares of parameters come to all ranks."""
        whole = {self.e.storage_of[b]: self.e.storage_of[b] for b in s.parameters}
        self._all_gather(s, max(s.updates), whole, s.parameters, s.parameters, self.e.time[s.task])

    def _all_gather(self, s: _Sum, after: int, whole: Mapping[int, int], buffers: Iterable[int], writes: Iterable[int],
                    time: float) -> int:
        """The number of an all-gather of shares of storages (keys) to whole ones."""
        e, unit = self.e, unpack(self.e.keys[s.task]).unit
        shares, views = [e.whole(self.shares[at][0]) for at in whole], [e.whole(to) for to in whole.values()]
        self.parts[unit] += 1
        return e.task(after, unit, Kind.AG, part=self.parts[unit] - 1, stage=e.stage[s.task], reads=self.of(buffers),
                      writes=writes, time=time, nbytes=e.bytes[s.task],
                      launches=[Launch("all_gather", tuple(shares), tuple(views))] if s.gradient else ())

    def wait(self, one: _Sum, then: _Sum) -> None:
        """A later gradient is not begun before this one has been scattered, if that is possible."""
        first = min(int(self.writers[b][0]) for b in then.gradients)
        if first > one.task:
            self.e.reads[first] |= self.of(one.gradients[:1])

    def unscale(self) -> int:
        """Each rank divides its shares by the loss scale; the flags of all ranks decide. The last task of this, or
        -1."""
        e = self.e
        for t in sorted(self.unscales):
            *copy, divide, decide = e.launches[t]
            n, flag, access = len(divide.writes) - 1, divide.writes[-1], e.buffers_of(t)
            if {v.storage for v in divide.writes[:n]} - {*self.shares}:
                raise Refused(WHAT, f"{self.draft.graph.name(t)} divides gradients into others", "leave --shard out")
            for view in divide.work[1:]:
                self.share(view)
            mine, raised = e.place(StorageSpec("not finite, share", (1,), "int32", 4, Role.WORKSPACE))
            at, every = e.place(StorageSpec("not finite, by rank", (self.ranks,), "int32", 4 * self.ranks,
                                            Role.WORKSPACE))
            own = self.on_shares(divide)
            e.launches[t] = (*copy, replace(own, writes=(*own.writes[:n], e.whole(mine))))
            now, later = [{b for v in views for b in access[v.storage]} for views in (
                [v for one in (*copy, divide) for v in one.reads], decide.reads[:2])]
            e.reads[t] = self.of(now & e.reads[t])
            e.writes[t] = self.of(b for one in (*copy, divide) for v in (*one.writes, *one.work)
                                  for b in access[v.storage] if v.storage != flag.storage) | {raised}
            unit = unpack(e.keys[t]).unit
            e.task(t, unit, Kind.AG, stage=e.stage[t], reads={raised}, writes={every}, nbytes=4 * self.ranks,
                   launches=[Launch("all_gather", (e.whole(mine),), (e.whole(at),))])
            flags = tuple(replace(flag, storage=at, offset=r) for r in range(self.ranks))
            e.task(t, e.unit("loss scale of all ranks"), Kind.U, stage=e.stage[t], reads={every} | later,
                   writes={b for v in (flag, *decide.writes) for b in access[v.storage]},
                   launches=[Launch("any_set", flags, (flag,)), decide])
        return max(self.unscales, default=-1)

    def done(self, how: Shards) -> Draft:
        """The draft, its lanes in the order of the graph."""
        made, order = self.e.draft, self.draft.order
        talks = np.isin(made.graph.kind, COLLECTIVE)
        of_lane = [np.isin(unpack(order.order(i)).kind, COLLECTIVE) for i in range(len(order.lanes))]
        apart = any(own.size and own.all() for own in of_lane)
        keys = [made.graph.keys[(talks == bool(own.all())) | (not apart)] if own.size else order.keys[:0]
                for own in of_lane]
        schedule = replace(order, ptr=np.cumsum([0, *map(len, keys)]), keys=np.concatenate(keys), slots=None,
                           notes={**order.notes, WHAT: str(how)})
        return replace(made, graph=made.graph.compact(), schedule=schedule)


def _flat(view: View) -> View:
    return replace(view, shape=(prod(view.shape),), strides=(1,))
