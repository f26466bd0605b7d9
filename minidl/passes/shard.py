"""Shards over data-parallel ranks, or over the replicas of each stage of a pipeline: of the optimizer's states (ZeRO
1), gradients (2) and parameters (3, FSDP).

Rajbhandari, Rasley, Ruwase, He, "ZeRO: memory optimizations toward training trillion parameter models", 2020; Zhao et
al., "PyTorch FSDP", 2023. The sum of gradients becomes a reduce-scatter (AS), and the update changes this rank's share.
On level 3 the parameters outlive a step as shares alone: an all-gather (AG) brings them together before they are read,
and they are freed again. Below it, AG follows the update. Sums are added in the order of ranks as before, and updates
work element by element, so it is bit-identical to ranks that update everything. Clipping needs the sum of squares in
the order of one process: AG brings each summed gradient together for it. Loss scaling works on shares, and an AG tells
all ranks each one's flag.

Few arrays are whole at one time: a gather reads a token, a buffer that no launch touches, which a user of an earlier
one writes, and a weight gradient waits until an earlier one has been scattered. So the memory plan uses a place again.

In a pipeline a stage's parameters are one array of this kind, and its order says when a rank uses which: a run of tasks
of one stage is one use of whole parameters. On level 3 a rank also has only a share of the copies of parameters that
another rank updates, as tied weights and a second direction need: from each share of the home to one of the copy.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise

import numpy as np

from ..core.columns import spread
from ..core.graph import TaskGraph
from ..core.machine import PlanError
from ..core.placement import Refused
from ..core.schedule import Schedule
from ..core.tasks import COLLECTIVE, Kind, repack, unpack, widths
from ..pricing.cost import CostModel
from .draft import Draft
from .placed import ACTION, PLACED, gathers_placed, sums_placed, with_sums_placed
from .shares import WHAT, Gather, Sum, Work
from .updates_last import ended_by_updates

DISTANCES = (0, 1, 2, 4)  #: that the search tries
AHEAD = re.compile(r"full|auto|\d{1,7}(\+\d{1,7})*")  #: distances as text


@dataclass(frozen=True)
class Shards:
    """The arrays that ranks share out. `level`: 0 nothing, 1 states, 2 gradients as well, 3 parameters as well.
    `prefetch`: how many groups of whole gradients or parameters there may be besides the one that is used: the next
    ones, or one that is used again soon; one number, or one for each rank of a pipeline; "full": all of a rank, which
    are gathered at the start; "auto": rank r has at most r + 2 stages whole, the used one among them, since later ranks
    have more time before their first task (pytorch/pytorch #196706). `keep`: the layers, or stages, whose parameters
    stay whole from their first use to their last one. None: a search chooses, by time within the limit. `placed`: where
    stages are whole and summed in place of these two, as `minidl.passes.placed` has it."""

    level: int = 0
    prefetch: int | str | tuple[int, ...] | None = None
    keep: tuple[int, ...] | None = None
    placed: tuple[str, ...] | None = None

    @classmethod
    def of(cls, told: Shards | int | str) -> Shards:
        """From a level, or from text such as `3,prefetch=1,keep=0+4`. Raises PlanError."""
        if isinstance(told, Shards):
            return told
        level, *more = str(told).split(",")
        known = dict(word.partition("=")[::2] for word in more)
        keep, placed = known.get("keep", ""), known.get("placed", "").split("+")
        words = [level, *(keep.split("+") if keep not in ("", "none") else ())]
        if (not all(word.isdecimal() and len(word) < 8 for word in words) or int(level) > 3 or
            known.keys() - {"prefetch", "keep", "placed"} or len(known) < len(more) or
            not AHEAD.fullmatch(ahead := known.get("prefetch", "0")) or
            (level != "3" and {"keep", "placed"} & known.keys()) or ("prefetch" in known and int(level) < 2) or
            ("placed" in known and (len(more) > 1 or not all(map(ACTION.fullmatch, placed))))):
            raise PlanError(f"shard is {str(told)[:40]!r}; it must be 1 (states), 2 (gradients as well) or 3 "
                            f"(parameters as well), 2 or 3 with ,prefetch=N, full, auto or, for each rank, as in "
                            f",prefetch=2+1+1+0, 3 with ,keep=none or layers as in ,keep=0+4, or with places as in "
                            f",placed=0UNSHARD+0RESHARD@0F1")
        numbers = tuple(map(int, ahead.split("+"))) if ahead[0].isdecimal() else (ahead,)
        return cls(int(level), None if "prefetch" not in known else numbers if len(numbers) > 1 else numbers[0],
                   tuple(map(int, words[1:])) if "keep" in known else None,
                   tuple(placed) if "placed" in known else None)

    def where(self, notes: Mapping[str, str]) -> Shards:
        """These, with the places of an order that has some, unless an argument sets something else."""
        free = self.level in (0, 3) and {self.prefetch, self.keep, self.placed} == {None}
        return Shards.of(f"3,placed={notes[PLACED]}") if free and PLACED in notes else self

    def __str__(self) -> str:
        if self.placed is not None:
            return f"{self.level},placed={'+'.join(self.placed)}"
        ahead = "+".join(map(str, self.prefetch)) if isinstance(self.prefetch, tuple) else self.prefetch
        prefetch = f",prefetch={ahead}" if self.level > 1 and ahead is not None else ""
        keep = "" if self.keep is None or self.level < 3 else f",keep={'+'.join(map(str, self.keep)) or 'none'}"
        return f"{self.level}{prefetch}{keep}"

    def ahead(self, rank: int, count: int) -> int:
        """How many of its `count` arrays this rank has whole at most besides the one that it uses."""
        told = self.prefetch[rank] if isinstance(self.prefetch, tuple) else self.prefetch or 0
        return told if isinstance(told, int) else count if told == "full" else min(rank + 2, count) - 1


def shard(draft: Draft, shard: Shards | int | str = 0) -> Draft:
    """The draft in which each rank has a share. Raises Refused for a step on one rank, for stages without replicas or
    on older weights, for updates of the next step, and if something else than an update, clipping or loss scaling uses
    a gradient that ranks have summed."""
    how = Shards.of(shard)
    graph, ranks = draft.graph, draft.machine.replicas if draft.staged else draft.machine.ranks
    if ranks == 1 or (draft.sums is None and not draft.staged):
        raise Refused(WHAT, "each of several data-parallel ranks, or of several replicas, keeps a share",
                      "give --parallel data and at least 2 ranks, or a pipeline --replicas, or leave --shard out")
    if draft.stale:
        raise Refused(WHAT, f"{draft.name} updates stages beside the next step", "leave --shard out")
    if draft.placement.apart and how.level > 2:
        raise Refused(WHAT, f"ranks of forwards have copies of parameters under {draft.name}", "give --shard 2")
    if not draft.staged and widths(graph.keys):
        raise Refused(WHAT, "parts of an update change other elements than a rank's share",
                      "leave --split or --shard out")
    sums = np.flatnonzero(np.isin(graph.kind, (Kind.A, Kind.AS)))
    if (graph.kind[sums] != Kind.A).any() or (unpack(graph.keys[sums]).part > 0).any():
        raise _other(draft, "cuts its sums" + " at any element, and a rank's share begins at others" * draft.staged)
    shared = np.isin(unpack(draft.order.keys).kind, (Kind.AS, Kind.AG)) & (graph.find(draft.order.keys) < 0)
    given = draft.order if shared.any() else None
    draft = draft if given is None else replace(draft, schedule=with_sums(given, graph))
    if not draft.staged and given is None:  # the next forward needs all shares
        if (ended := ended_by_updates(draft.order)) is None:
            raise _other(draft, "updates beside the next step")
        draft = replace(draft, schedule=ended)
    draft = _in_order(draft) if draft.staged else _by_compute(draft)
    if how.placed is not None:
        if not draft.staged:
            raise Refused(WHAT, "places are of a pipeline's stages", "give prefetch and keep")
        draft, how = with_sums_placed(draft, how.placed), replace(how, prefetch=0, keep=())
    how = replace(how, prefetch=how.prefetch if how.level > 1 else 0, keep=how.keep if how.level > 2 else ())
    if not draft.staged and (how.prefetch == "auto" or isinstance(how.prefetch, tuple)):
        raise Refused(WHAT, "ranks that are all alike have one distance", "give prefetch one number, or full")
    if isinstance(how.prefetch, tuple) and len(how.prefetch) != draft.placement.ranks:
        raise Refused(WHAT, f"prefetch has {len(how.prefetch)} numbers for {draft.placement.ranks} ranks",
                      "give one for each rank")
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
        cost = made.priced if made.staged else costs(made, made.cost)
        plan = planned(made.name, made.graph, made.order, cost, made.machine.size)
        peak = max(plan.peak_bytes)
        time = float(f"{plan.period:.9g}") if limit is None or peak <= limit else np.inf  # without noise
        found.append((time, peak, len(found), made, one))

    for prefetch in DISTANCES if how.prefetch is None else (how.prefetch,):
        tried(replace(how, prefetch=prefetch, keep=how.keep or ()))
    best = min(found)[-1]
    for quarters in range(1, 5) if how.keep is None else ():
        tried(replace(best, keep=tuple(layers[len(layers) * (4 - quarters) // 4 :])))
    return min(found)[-2]


def searched(draft: Draft, told: Shards | int) -> tuple[str, ...]:
    """A remark on what a search has chosen."""
    found = draft.order.notes.get(WHAT)
    return () if found in (None, str(told)) else (
        f"shards: {found} is the fastest predicted"
        f"{'' if draft.machine.memory_limit is None else ' within the memory limit'}",)


def costs(draft: Draft, cost: CostModel) -> CostModel:
    """These costs, with the draft's transfers."""
    known = draft.priced.tasks
    return replace(cost, tasks={**cost.tasks, **{t.name: known[t.name] for t in draft.graph if t.name in known
                                                 and (t.kind in (Kind.AS, Kind.AG) or not known[t.name])}})


def with_sums(order: Schedule, graph: TaskGraph) -> Schedule:
    """An order of a sharded step as one of the step whose ranks sum, which has these tasks."""
    kind = unpack(order.keys).kind
    keys = np.where(kind == Kind.AS, repack(order.keys, kind=np.where(kind == Kind.AS, Kind.A, kind)), order.keys)
    made = np.isin(kind, (Kind.AG, Kind.U)) & (graph.find(order.keys) < 0)
    left = np.concatenate([[0], np.cumsum(~made)])
    joined = None if order.joined is None else order.second[~made]
    return replace(order, ptr=left[order.ptr], keys=keys[~made], joined=joined, slots=None)


def _other(draft: Draft, why: str) -> Refused:
    return Refused(WHAT, f"{draft.name} {why}", "leave part_bytes out" if draft.staged
                   else "give --scheduler barrier, buckets or no_overlap")


def _in_order(draft: Draft) -> Draft:
    """The draft whose graph has its tasks in the order in which ranks can run them; no task is within a pair."""
    order = draft.order.validate(draft.graph)
    return draft.take(order.ids(draft.graph)[np.argsort(order.slots, kind="stable")])


def _by_compute(draft: Draft) -> Draft:
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
    work = Work(draft, how.level, draft.machine.replicas if draft.staged else draft.machine.ranks)
    sums, ids = [work.sum(t) for t in np.flatnonzero(draft.graph.kind == Kind.A).tolist()], draft.order.ids(draft.graph)
    begin = spread(ids, ids[draft.order.first], len(draft.graph))  # of each task's action
    held = [*sums, *(copy for s in sums for copy in work.copies(s))] if how.level > 2 else sums
    work.unscale()
    for rank in np.unique(draft.rank[[s.task for s in sums]]).tolist():
        own, here = ([s for s in some if draft.rank[s.task] == rank] for some in (sums, held))
        ahead = how.ahead(rank, len(here))
        gathers = [Gather(s, s.gradients, sorted(s.norms), s.final) for s in own if s.norms]
        if how.placed is not None:
            for each in gathers_placed(draft, here, _uses(draft, here), how.placed):
                work.gather(*each)
        elif how.level > 2:
            gathers += [Gather(s, s.parameters, run) for s, run in _runs(draft, here, ahead, how.keep or ())]
        gathers.sort(key=lambda gather: gather.users[0])
        for k, gather in enumerate(gathers):
            needed = gathers[k + 1].users[0] if k + 1 < len(gathers) else len(draft.graph)
            kept = int(draft.graph.unit[gather.sum.task]) in (how.keep or ())
            gather.end = max((u for u in gather.users if not kept or u < needed), default=gather.users[0])
            over = sorted(g.end for g in gathers[:k] if g.end < begin[gather.users[0]])
            room = max(0, ahead - (k - len(over)))  # besides those that are still whole then
            work.gather(gather, over[-1 - room] if len(over) > room and how.level > 1 else -1)
        for j, one in enumerate(own):
            work.scatter(one)
            if how.level < 3:
                work.bring_back(one)
            for then in own[j + 1 + ahead :][: how.level > 1 and how.placed is None]:
                work.wait(one, then)
        for t, at in sums_placed(draft, own, how.placed or ()).items():
            work.follow(at, t, rank)
    return _on_lanes(draft, work.done(), how)


def _runs(draft: Draft, sums: Sequence[Sum], ahead: int, keep: Collection[int]) -> list[tuple[Sum, list[int]]]:
    """The tasks that use the parameters of each sum of a rank, in runs without a use of others between them. A run goes
    on where no more others are used in between than may be whole besides (`ahead`); all uses of those that units `keep`
    are one run."""
    runs = [(i, [t for t, _ in run]) for i, run in groupby(_uses(draft, sums), key=lambda use: use[1])]
    found, last = list[tuple[Sum, list[int]]](), dict[int, tuple[int, list[int]]]()
    for k, (i, run) in enumerate(runs):
        at, users = last.get(i, (-1, []))
        others = {j for j, _ in runs[at + 1 : k]}
        if at < 0 or (len(others) > ahead and int(draft.graph.unit[sums[i].task]) not in keep):
            users = []
            found.append((sums[i], users))
        users += run
        last[i] = k, users
    return found


def _uses(draft: Draft, sums: Sequence[Sum]) -> list[tuple[int, int]]:
    """The tasks that use the parameters of each sum of a rank, each with the number of the sum."""
    graph, rank = draft.graph, draft.rank
    readers = graph.reads.transposed(len(graph.buffer_bytes))
    uses = sorted({(t, i) for i, s in enumerate(sums) for b in s.parameters for t in readers[b].tolist()
                   if t not in s.updates and rank[t] == rank[s.task]})
    for t, i in uses:
        if t > min(sums[i].updates):
            raise Refused(WHAT, f"{graph.name(t)} reads updated parameters of its own rank", "leave --shard out")
    return uses


def _on_lanes(draft: Draft, made: Draft, how: Shards) -> Draft:
    """The sharded draft, its lanes in the order of the graph."""
    order, talks, rank = draft.order, np.isin(made.graph.kind, COLLECTIVE), made.rank
    of_lane = [np.isin(unpack(order.order(i)).kind, COLLECTIVE) for i in range(len(order.lanes))]
    apart = {lane.rank for lane, own in zip(order.lanes, of_lane, strict=True) if own.size and own.all()}
    keys = [made.graph.keys[(rank == lane.rank) & ((talks == bool(own.all())) | (lane.rank not in apart))]
            if own.size else order.keys[:0] for lane, own in zip(order.lanes, of_lane, strict=True)]
    every = np.concatenate(keys)
    schedule = replace(order, ptr=np.cumsum([0, *map(len, keys)]), keys=every, slots=None,
                       joined=None if order.joined is None else np.isin(every, order.keys[order.second]),
                       notes={**order.notes, WHAT: str(how)})
    return replace(made, graph=made.graph.compact(), schedule=schedule)
