"""Shares of a step's arrays, one for each rank of a group, and the tasks that work on them: for `shard.py`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from math import prod
from typing import Any

import numpy as np

from ..core.graph import Launch, Role, View
from ..core.placement import Refused
from ..core.tasks import Kind, pack, repack, unpack
from .draft import Draft, touched
from .rewrite import gradients

WHAT = "shards"  #: for messages, and the note of an order that says what is shared out
WHOLE = {"muon"}  #: updates that need all elements of a parameter


@dataclass
class Sum:
    """A sum over ranks: its task, its updates, the tasks that need whole gradients; gradients and parameters, as
    buffers and as views of all elements; the task after which gradients are final; and its time. Copies of
    parameters of another rank have no gradients here; their update, which is the task too, receives the new values."""

    task: int
    updates: list[int]
    gradients: list[int]
    final: int
    time: float
    norms: list[int] = field(default_factory=list)
    parameters: list[int] = field(default_factory=list)
    gradient: list[View] = field(default_factory=list)
    parameter: list[View] = field(default_factory=list)


@dataclass
class Gather:
    """An all-gather of the shares of these buffers of a sum, after task `after`, for the tasks `users`: up to `end` no
    other gather is needed."""

    sum: Sum
    buffers: list[int]
    users: list[int]
    after: int = -1
    end: int = -1


class Work:
    """The shares that are made, and what the tasks do with them."""

    def __init__(self, draft: Draft, level: int, ranks: int) -> None:
        graph = draft.graph
        self.e, self.draft, self.level, self.ranks, self.rank = draft.edit(), draft, level, ranks, draft.rank
        self.update_of = {b: u for u, own in gradients(graph).items() for b in own.tolist()}
        self.readers, self.writers = (rows.transposed(len(graph.buffer_bytes)) for rows in (graph.reads, graph.writes))
        self.shares = dict[int, tuple[View, int]]()  # storage -> this rank's share, and its buffer
        self.unscales = set[int]()
        self.decides = dict[int, int]()  # task that divides by the loss scale -> the one that goes on, after the flags
        self.parts = Counter[tuple[int, int]]()  # all-gathers of each stage and unit
        self.tokens = dict[int, int]()  # rank -> a buffer

    # --------------------------------------------------------------------------------------------------- what there is
    def sum(self, t: int) -> Sum:
        """The sum that task t makes; its updates change shares from now on."""
        e = self.e
        own = {b: self.update_of[b] for b in self.draft.graph.writes[t].tolist()}
        found = Sum(t, [*dict.fromkeys(own.values())], [*own], t, e.time[t])
        for b, u in own.items():
            for r in sorted({*self.readers[b].tolist(), *self.writers[b].tolist()} - {*range(t + 1), u}):
                kernels = {one.kernel for one in e.launches[r] if e.storage_of[b] in {v.storage for v in one.views}}
                if not kernels or kernels - {"square_sum", "unscale"}:
                    raise Refused(WHAT, f"{self.draft.graph.name(r)} uses a gradient that ranks have summed, and is no "
                                  f"update", "leave --shard out")
                if "square_sum" in kernels and r not in found.norms:
                    found.norms.append(r)
                if "unscale" in kernels:
                    found.final = r
        if found.final != t:
            self.unscales.add(found.final)
        summed = e.places(own)
        for u in found.updates:
            self._update(u, found, summed)
        return found

    def _update(self, u: int, s: Sum, summed: set[int]) -> None:
        """Task u updates the shares of a sum's parameters; the sum is of these storages."""
        e, mine, others = self.e, {*summed}, list[Launch]()
        for launch in e.launches[u]:
            changes = launch.writes and e.specs[launch.writes[0].storage].role == Role.PARAMETER
            if changes and summed & {v.storage for v in launch.reads}:
                if launch.kernel in WHOLE:
                    raise Refused(WHAT, f"{launch.kernel} changes a matrix as a whole, not its elements one by one",
                                  "leave --shard out, or train with --optimizer adamw")
                p, g = launch.reads[:2]
                s.parameter.append(_flat(p))
                s.gradient.append(_flat(g))
                for view in (p, g, *launch.writes[1:], *launch.work):
                    self.share(view)
                    mine.add(view.storage)
            elif launch.kernel != "mul" or launch.writes[0].storage not in summed:
                others.append(launch)
        for launch in others:
            if mine & {v.storage for v in launch.views}:
                raise Refused(WHAT, f"an update runs {launch.kernel}, which is not of single elements",
                              "leave --shard out")
        e.launches[u] = tuple(launch if launch in others else self.on_shares(launch) for launch in e.launches[u])
        s.parameters += sorted(b for b in e.reads[u] | e.writes[u] if e.storage_of[b] in mine & self.shares.keys()
                               and e.specs[e.storage_of[b]].role == Role.PARAMETER)
        e.reads[u], e.writes[u] = self.of(e.reads[u], mine), self.of(e.writes[u], mine)

    def share(self, view: View) -> None:
        """Makes this rank's share of the storage of a view, if there is none."""
        if view.storage in self.shares:
            return
        spec = self.e.specs[view.storage]
        if view.offset or prod(view.shape) != prod(spec.shape):
            raise Refused(WHAT, f"an update has only some elements of {spec.name}", "leave --shard out")
        size = -(-prod(spec.shape) // self.ranks)
        lasts = spec.role == Role.STATE or (spec.role == Role.PARAMETER and self.level == 3)
        self.shares[view.storage] = self.e.array(f"{spec.name}, share", (size,), spec.dtype, spec.role if lasts
                                                 else Role.WORKSPACE, share_of=spec.live if lasts else None)

    def of(self, buffers: Iterable[int], only: Collection[int] | None = None) -> set[int]:
        """The buffers, in place of those with a share its buffer; `only`: of these storages."""
        return {self.shares[at][1] if (at := self.e.storage_of[b]) in self.shares and (only is None or at in only)
                else b for b in buffers}

    def on_shares(self, launch: Launch) -> Launch:
        reads, writes, work = (tuple(self.shares.get(v.storage, (v,))[0] for v in views)
                               for views in (launch.reads, launch.writes, launch.work))
        return replace(launch, reads=reads, writes=writes, work=work)

    def copies(self, s: Sum) -> list[Sum]:
        """The copies of a sum's parameters on other ranks, by the tasks that receive them: from now on shares."""
        e, found, link = self.e, dict[int, Sum](), self.draft.machine.collective
        for b, r in ((b, r) for b, readers in self.far(s).items() for r in readers):
            own = [one for one in e.launches[r] if e.storage_of[b] in {view.storage for view in one.reads}]
            mine = {view.storage for one in own for view in one.views}
            for view in (view for one in own for view in one.writes):
                self.share(view)
            copied = found.setdefault(r, Sum(r, [r], [], r, 0.0)).parameters
            copied += sorted(c for c in e.writes[r] if e.storage_of[c] in mine)
            e.launches[r] = tuple(self.on_shares(one) if one in own else one for one in e.launches[r])
            e.reads[r], e.writes[r] = self.of(e.reads[r], mine), self.of(e.writes[r], mine)
        for r, copy in found.items():
            size = sum(e.buffer_bytes[c] for c in copy.parameters)
            copy.time = np.nan if link is None else link({int(self.draft.graph.unit[r]): size})
        return [*found.values()]

    def far(self, s: Sum) -> dict[int, list[int]]:
        """The sum's parameters that tasks of other ranks read, after the update, and these tasks."""
        home = self.rank[s.task]
        found = {b: [r for r in self.readers[b].tolist() if self.rank[r] != home] for b in s.parameters}
        return {b: readers for b, readers in found.items() if readers}

    # ---------------------------------------------------------------------------------------------------- what is done
    def scatter(self, s: Sum) -> None:
        """The sum leaves each rank its share. Below level 3 it also takes this rank's share of the parameters."""
        e, t, copied = self.e, s.task, s.parameter if self.level < 3 else []
        given = [*s.gradient, *copied]
        own = [self.shares[v.storage][0] for v in given]
        e.keys[t] = int(repack(e.keys[t], kind=Kind.AS))
        e.reads[t] = {*s.gradients, *(s.parameters if copied else ())}
        e.writes[t] = self.of(e.reads[t])
        if given:
            most = self.ranks * max(v.size for v in own[: len(s.gradient)])  # received, of one array after the other
            received, buffer = e.array("received", (most,), s.gradient[0].dtype, Role.WORKSPACE)
            e.writes[t].add(buffer)
            e.launches[t] = (Launch("reduce_scatter", tuple(given), tuple(own), (received,),
                                    (("summed", len(s.gradient)),)),)
        e.time[t] /= 2

    def gather(self, gather: Gather, before: int, end: int = -1) -> None:
        """The users of a gather read what it brings together, once task `before` has let go (-1: none). It is whole
        until task `end`."""
        e, s = self.e, gather.sum
        copies = e.copies(gather.buffers, "whole", role=Role.WORKSPACE, live=None)
        lets_go = self.decides.get(before, before)
        new = self._all_gather(s, lets_go if before > gather.after else gather.after, copies.storages, gather.buffers,
                               copies.buffers.values(), s.time / 2)
        for user in gather.users:
            e.use(copies, self.decides.get(user, user))
        if end >= 0:
            e.reads[end] |= {*copies.buffers.values()}
        if before >= 0:
            self.follow(lets_go, new, int(self.rank[s.task]))

    def follow(self, task: int, then: int, rank: int) -> None:
        """A task of this rank runs after another one."""
        e = self.e
        self.tokens[rank] = (e.buffer(self.tokens[rank], e.storage_of[self.tokens[rank]], "token")
                             if rank in self.tokens else e.array("token", (1,), "uint8", Role.WORKSPACE)[1])
        e.writes[task].add(self.tokens[rank])
        e.reads[then].add(self.tokens[rank])

    def bring_back(self, s: Sum) -> None:
        """The updated shares of parameters come to all ranks. Those that other stages' ranks read go there from a task
        that launches nothing: messages carry results of updates."""
        e, far, update = self.e, self.far(s), max(s.updates)
        at = {e.storage_of[b]: e.storage_of[b] for b in s.parameters}
        new = self._all_gather(s, update, at, s.parameters, s.parameters, e.time[s.task])
        if far:
            self._further(new, update, reads=far, writes=far)

    def _all_gather(self, s: Sum, after: int, whole: Mapping[int, int], buffers: Collection[int],
                    writes: Iterable[int], time: float) -> int:
        """The number of an all-gather of shares of storages (keys) to whole ones."""
        e = self.e
        shares, views = [self.shares[at][0] for at in whole], [e.whole(to) for to in whole.values()]
        return self._gathering(s.task, after, reads=self.of(buffers), writes=writes, time=time,
                               nbytes=sum(e.buffer_bytes[b] for b in buffers),
                               launches=[Launch("all_gather", tuple(shares), tuple(views))] if shares else ())

    def _gathering(self, like: int, after: int, **more: Any) -> int:
        """The number of a further all-gather of the unit of task `like`, in its direction."""
        unit, place, stage = unpack(self.e.keys[like]).unit, self.draft.placement, self.e.stage[like]
        part = self.parts[stage, unit] * place.directions + stage // place.stages
        self.parts[stage, unit] += 1
        if self.draft.graph.find(pack(unit, Kind.AG, part=[part]))[0] >= 0:  # it gathers something else
            return self._gathering(like, after, **more)
        return self.e.task(after, unit, Kind.AG, part=part, stage=stage, **more)

    def _further(self, after: int, like: int, **more: Any) -> int:
        """The number of a further update of the unit of task `like`, after the last micro-batch: its messages have
        names of their own."""
        e, own = self.e, unpack(self.e.keys[like])
        number = next(n for n in count(self.draft.micro_batches) if {
            int(pack(own.unit, Kind.U, n, part=part)) for part in (0, 1)}.isdisjoint(e.keys))
        return e.task(after, own.unit, Kind.U, number, part=own.part, stage=e.stage[like], **more)

    def wait(self, one: Sum, then: Sum) -> None:
        """A later gradient is not begun before this one has been scattered, if that is possible."""
        first = min(int(self.writers[b][0]) for b in then.gradients)
        if first > one.task:
            self.e.reads[first] |= self.of(one.gradients[:1])

    def unscale(self) -> None:
        """Each rank divides its shares by the loss scale; the flags of all ranks decide. The rest of such a task comes
        then, as a task of its own."""
        e = self.e
        for t in sorted(self.unscales):
            at = next(i for i, launch in enumerate(e.launches[t]) if launch.kernel == "unscale")
            (*copy, divide), later = e.launches[t][: at + 1], e.launches[t][at + 1 :]
            n, flag, access = len(divide.writes) - 1, divide.writes[-1], e.buffers_of(t)
            if {v.storage for v in divide.writes[:n]} - {v.storage for v in divide.reads} - self.shares.keys():
                raise Refused(WHAT, f"{self.draft.graph.name(t)} divides gradients into others", "leave --shard out")
            for made, view in zip(divide.writes, divide.work[1:], strict=False):
                if made.storage in self.shares:
                    self.share(view)
            mine, raised = e.array("not finite, share", (1,), "int32", Role.WORKSPACE)
            whole, every = e.array("not finite, by rank", (self.ranks,), "int32", Role.WORKSPACE)
            flags = tuple(replace(flag, storage=whole.storage, offset=r) for r in range(self.ranks))
            own = self.on_shares(divide)
            first = (*copy, replace(own, writes=(*own.writes[:n], mine)))
            second = (Launch("any_set", flags, (flag,)), *later)
            access |= {whole.storage: [every]}
            used = {v.storage for launch in e.launches[t] for v in launch.views}
            marked = [{b for b in rows[t] if e.storage_of[b] not in used} for rows in (e.reads, e.writes)]
            reads, writes = touched((*copy, divide), access)
            e.launches[t], e.reads[t] = first, self.of(reads & e.reads[t]) | marked[0]
            e.writes[t] = self.of(writes - {*access[flag.storage]}) | {raised} | marked[1]
            reads, writes = touched(second, access)
            self._gathering(t, t, reads={raised}, writes={every}, nbytes=4 * self.ranks,
                            launches=[Launch("all_gather", (mine,), (whole,))])
            self.decides[t] = self._further(t, t, reads=reads, writes=writes, launches=second)

    def done(self) -> Draft:
        """The draft, its graph in the order of all lanes."""
        for t, new in self.decides.items():  # last: it reads what gathers bring together after task t
            self.e.follows[t].remove(new)
            self.e.follows[t].append(new)
        return self.e.draft


def _flat(view: View) -> View:
    return replace(view, shape=(prod(view.shape),), strides=(1,))
