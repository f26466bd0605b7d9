"""Weight versions of a step with several updates: the version that each task reads becomes part of the graph.

In a stale pipeline micro-batches run on weights of some updates ago. The parameters themselves are always the newest
version, which updates change in place. Before an update changes them, it copies the version if it is still to be read,
or moves an average towards it. Copies are buffers of the graph like activations, so its edges are enough for the proof;
a copy takes the place of one that is read no more.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace

import numpy as np

from ..core.columns import Ints, offsets, spread
from ..core.graph import Launch, Role, TaskGraph
from ..core.placement import DECAYS, Refused, Versions
from ..core.schedule import Schedule
from ..core.tasks import Kind, as_recorded, unpack
from .boundary import Mask, outliving
from .draft import Draft, Edit


def updates(graph: TaskGraph) -> Ints:
    """The tasks of a graph of stages that change parameters."""
    return np.flatnonzero(graph.changed_by(graph.role_is(Role.PARAMETER)) & (graph.kind == Kind.U))


def newest(schedule: Schedule, ends: Mask, of_step: int) -> Ints:
    """For each entry, how many of the entries `ends` of its stage are done when its action begins, since the beginning
    of its own step, which has `of_step` of them on each stage."""
    own, (action, _) = unpack(schedule.keys), schedule.actions()  # the results of a pair are visible at its end
    order = np.lexsort((np.arange(len(schedule)), own.unit))  # stage by stage, in lane order: a stage has one lane
    unit = own.unit[order]
    done = offsets(ends[order])[:-1]
    fresh = np.append(True, (np.diff(unit) != 0) | (np.diff(action[order]) != 0))
    begin = np.maximum.accumulate(np.where(fresh, np.arange(len(schedule)), 0))
    left = np.bincount(own.unit[ends & (own.late > 0)], minlength=int(unit.max(initial=0)) + 1)  # of the step before
    since = done[begin] - done[np.searchsorted(unit, unit)] - left[unit]
    return spread(order, since, len(schedule)) + own.late * of_step


def wanted(graph: TaskGraph, schedule: Schedule, versions: Versions) -> Callable[[int, int], int]:
    """A function from a task and a stage to the version that the task reads of the stage's weights. Tasks of other
    stages read the version that the stage's own forward reads (see `followers.py`)."""
    own, ids = unpack(schedule.keys), graph.find(schedule.keys if graph.late.any() else as_recorded(schedule.keys))
    read = dict(zip(ids.tolist(), versions.read.tolist(), strict=True))
    forward = {(unit, micro_batch): version for unit, micro_batch, version in zip(
        *(column[own.kind == Kind.F].tolist() for column in (own.unit, own.micro_batch, versions.read)), strict=True)}

    def version(task: int, stage: int) -> int:
        return int(read[task] if graph.unit[task] == stage else forward[stage, int(graph.micro_batch[task])])

    return version


def weight_versions(draft: Draft, dropped: Collection[int] = ()) -> Draft:
    """In a pipeline that never drains, tasks read the versions of their stage's weights that `draft.versions` gives.

    Version 0 is the newest one when a step begins, with all updates of the steps before; each update of a stage, in the
    order of micro-batches, makes the next one. When the loop begins, all older versions are alike: copies then hold the
    parameters' own values. A moving average replaces old versions if `versions` says so. Let d be the age of all
    versions that are read: tasks then read W_t - d G, where G is the moving average of updates since the loop began
    (the kernel `past`). It takes the place of one version: the update first turns it into what it needs of the past.
    Predicted weights are the same with an age below 0: W_t - p d G, by default with decay 0, so G = W_(t-1) - W_t; read
    by forwards whose backward comes after d more updates. `dropped`: units that are computed again, with their
    forward's weights. Raises Refused for a version that does not exist in time, or no longer, for different ages under
    an average, and for units that are computed again without exact versions.
    """
    body, versions, name = draft.graph, draft.versions, draft.name
    assert versions is not None
    if dropped and versions.history != "exact":
        raise Refused(name, "stages do not keep the exact weights with which to compute activations again",
                      "keep all activations, or exact weights")
    version, changing, part = wanted(body, draft.order, versions), updates(body), unpack(body.keys).part
    average, e = versions.history == "average", draft.edit()
    for stage, copy in sorted({(int(body.unit[t]), int(part[t])) for t in changing}):
        mine = changing[(body.unit[changing] == stage) & (part[changing] == copy)]
        own = sorted({b for t in mine.tolist() for b in body.writes[t].tolist()
                      if body.buffer(b).role == Role.PARAMETER})
        users = [t for t in range(len(body)) if body.kind[t] != Kind.U and e.reads[t] & set(own)]
        late = int(body.late[mine].sum())  # updates of the step before: version 0 comes after them
        newest = dict(zip(users, (np.searchsorted(mine, users) - late).tolist(), strict=True))
        old = {}
        for t in users:
            found = version(t, stage) - len(mine) * int(body.late[t])
            if found > newest[t]:
                raise Refused(name, f"{body.name(t)} reads version {version(t, stage)} of its weights before it exists",
                              "let it read an older one")
            if found < newest[t] and (versions.history in ("exact", "average") or body.unit[t] == stage):
                old[t] = found
        if average:
            ages = {t: newest[t] - v for t, v in old.items()}
            age = max(ages.values(), default=0)
            for t in (t for t, other in ages.items() if other != age):
                raise Refused("averaged weights", f"{body.name(t)} reads weights {ages[t]} updates old, but other "
                              f"tasks of its stage read weights {age} updates old", "a moving average gives only one "
                              "age, so keep exact versions")
            if old:
                _averaged(e, own, mine.tolist(), old, age, DECAYS[versions.decay](age))
            continue
        if versions.history == "predicted":
            ahead = _drift(draft.order, versions, stage)
            if ahead and versions.p:
                _averaged(e, own, mine.tolist(), [t for t in users if body.kind[t] == Kind.F], -versions.p * ahead,
                          DECAYS[versions.decay](ahead))
            continue
        slots, moves, lasting = _slots(name, body, mine, old, late)
        copies = [e.copies(own, f"kept {i}", role=Role.STATE if i in lasting else Role.WORKSPACE, live=None,
                           filled=i in lasting) for i in range(max(moves.values(), default=-1) + 1)]
        for t, slot in slots.items():
            e.use(copies[slot], t)
        for t, slot in moves.items():
            e.reads[t] |= {*own}
            e.writes[t] |= {*copies[slot].buffers.values()}
            e.launches[t] = (*e.copy(copies[slot].storages), *e.launches[t])
    draft = e.draft
    return replace(draft, graph=outliving(draft.graph))


def _slots(name: str, body: TaskGraph, mine: Ints, old: dict[int, int],
           late: int) -> tuple[dict[int, int], dict[int, int], set[int]]:
    """Places for old versions, as few as the loop allows: (task that reads one -> place, update that copies the
    version that it is about to change -> place, the places that must outlive a step). `mine`: the updates in order;
    `old`: task -> version, of which an update after it has been made."""
    end: dict[int, int] = {}  # update -> the last task that reads its copy, counted on into the next step
    made: dict[int, int] = {}
    for t, wanted in old.items():
        steps, k = divmod(wanted + late, len(mine))
        made[t] = int(mine[k])
        if steps < -1 or (steps == -1 and t > made[t]):
            raise Refused(name, f"{body.name(t)} reads weights that are older than a step of {len(mine)} updates",
                          "take more micro-batches")
        end[made[t]] = max(end.get(made[t], -1), t - steps * len(body))
    place: dict[int, int] = {}
    for u in sorted(end, key=lambda u: (end[u] < len(body), u)):
        taken = {place[v] for v in place for turn in (-len(body), 0, len(body))
                 if v + turn <= end[u] and u <= end[v] + turn}
        place[u] = min({*range(len(place) + 1)} - taken)
    return ({t: place[u] for t, u in made.items()}, place,
            {place[u] for u in end if end[u] >= len(body) or body.late[u]})


def _drift(schedule: Schedule, versions: Versions, stage: int) -> int:
    """How many updates newer the weights of the stage's backward are than its forward's."""
    own = unpack(schedule.keys)
    mine, forward = own.unit == stage, own.kind == Kind.F
    reads = [dict(zip(own.micro_batch[of].tolist(), versions.read[of].tolist(), strict=True))
             for of in (mine & forward, mine & np.isin(own.kind, (Kind.W, Kind.B)))]
    return max(reads[1][i] - version for i, version in reads[0].items())


def _averaged(e: Edit, own: Iterable[int], updates: Iterable[int], users: Iterable[int], age: float,
              decay: float) -> None:
    """Users read weights of `age` updates ago, or as many ahead if it is below 0, which updates make in one copy."""
    copies = e.copies(own, "average", role=Role.STATE, live=None, filled=True)
    count, counter = e.array("updates averaged", (1,), "float64", Role.STATE, filled=0.0)
    before, after = ([Launch("past", (e.whole(s), e.whole(copy), count), (e.whole(copy),),
                             constants=(("age", age), ("decay", decay), ("done", done)))
                      for s, copy in copies.storages.items()] for done in (False, True))
    e.use(copies, *users)
    for t in updates:
        e.reads[t] |= {*own, *copies.buffers.values(), counter}
        e.writes[t] |= {*copies.buffers.values(), counter}
        e.launches[t] = (*before, *e.launches[t], Launch("shift", (count,), (count,), constants=(("term", 1.0),)),
                         *after)
