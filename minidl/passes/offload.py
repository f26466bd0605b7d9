"""Offload: activations between their forward and their backward, and an optimizer's states between two updates, leave
the device's memory for far memory: the host's, or a file.

A task D copies out, a task H copies back into memory of its own, on a lane for each direction. Copies keep bits, so a
step is bit-identical to the plain one. A D runs as soon as the values are there; a later task of the same lane waits
for it, so that what follows may use the memory. An H runs after a task that is `window` tasks before the first reader.
If only some must leave, those do that are away for the longest, as in PipeOffload (Wan, Qi, Huang, Lin, "PipeOffload:
improving scalability of pipeline parallelism with memory optimization", 2025).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..core.columns import Ints
from ..core.graph import Role, TaskGraph
from ..core.placement import Refused
from ..core.schedule import Lane, Schedule
from ..core.tasks import COMPUTE, COPIES, SENDS, Kind, repack, unpack
from .boundary import loop
from .draft import Copies, Draft, Edit
from .updates_last import ended_by_updates

WHAT = "offload"
EACH = ("none", "activations", "states", "all")  #: what can be offloaded
OUT, IN = "out", "in"  #: the names of the lanes


@dataclass(frozen=True)
class Moves:
    """The memory that is offloaded: "activations", "states" or "all"; of these, the `most` that are away the longest
    (None: all). `window`: the number of tasks beside which a copy may run."""

    what: str
    window: int = 1
    most: int | None = None

    def __str__(self) -> str:
        return f"{self.what},window={self.window}" + ("" if self.most is None else f",most={self.most}")


@dataclass(frozen=True)
class Item:
    """Storages that one D and one H of a rank copy. `made`: the last task that writes them; `readers`: those that read
    what comes back, in order; `gone`: the task that waits for D; `back`: the task for which H waits; `life`: the time
    of the lane's tasks while they are away. An update reads its states when they are back, and makes new ones."""

    storages: Sequence[int]
    rank: int
    made: int
    readers: Sequence[int]
    gone: int | None
    back: int | None
    life: float


def offload(draft: Draft, moves: Moves) -> Draft:
    """The draft with copies out and back. Raises Refused if nothing can be offloaded."""
    graph, order = draft.graph, draft.order
    if moves.what != "activations":
        order = ended_by_updates(order) or order
    late = unpack(order.keys).late == 1
    plain = order if graph.late.any() else replace(order, keys=repack(order.keys, late=0))  # as the graph has them
    draft = replace(draft.take(_in_time(graph, order, plain, late)), schedule=replace(plain, slots=None))
    found = sorted(_items(draft, moves, {*draft.graph.find(plain.keys[late]).tolist()}),
                   key=lambda item: -item.life)[: moves.most]
    if not found:
        kept = "states of an optimizer" if moves.what == "states" else "activations"
        beside = late.any() and moves.what == "states"
        why = "updates beside the next step" if beside else f"has no {kept} that could be away for a task or more"
        raise Refused(WHAT, f"{draft.name} {why}", "leave --offload out")
    e, buffers = draft.edit(), [list[int]() for _ in draft.graph.storages]
    for b, s in enumerate(draft.graph.buffer_storage.tolist()):
        buffers[s].append(b)
    copies = [copy for item in found for copy in (_state if item.made in item.readers else _activation)(
        e, item, sorted(b for s in item.storages for b in buffers[s]))]
    for _, task, lane in sorted(copies, key=lambda copy: copy[:2]):
        e.own_lane(lane, task)
    made = e.draft
    new = np.flatnonzero(np.isin(made.graph.kind, COPIES))
    time = made.time.copy()
    time[new] = draft.cost.durations(made.graph.take(new)) + draft.cost.launch
    keys = made.order.keys
    keys = np.where(np.isin(keys, plain.keys[late]), repack(keys, late=1), keys)
    return replace(made, time=time, schedule=replace(made.order, keys=keys))


def _in_time(graph: TaskGraph, order: Schedule, plain: Schedule, late: Ints) -> Ints:
    """The tasks in an order that both lanes and edges keep. In the graph of a step, late ones are last."""
    slots = order.validate(loop(graph, order).body[0]).slots
    assert slots is not None
    return plain.ids(graph)[np.lexsort((slots, late & (plain is not order)))]


def _items(draft: Draft, moves: Moves, late: set[int]) -> Iterator[Item]:
    """The storages that can leave. `late`: tasks that run in the next step, whose storages stay."""
    graph, order = draft.graph, draft.order
    ids, action, time = order.ids(graph), order.actions()[0].tolist(), np.nan_to_num(draft.time).tolist()
    works = np.flatnonzero(np.isin(graph.kind[ids], COMPUTE) & ~np.isin(ids, [*late]))
    # task -> the first tasks of the actions of its lane, the time until each and after the last, and its action
    place = dict[int, tuple[list[int], list[float], int]]()
    for entries in np.split(works, np.searchsorted(works, order.ptr[1:-1])):
        firsts, times = list[int](), [0.0]
        for entry, task in zip(entries.tolist(), ids[entries].tolist(), strict=True):
            if not (firsts and action[entry] == action[entry - 1]):
                firsts.append(task)
                times.append(times[-1])
            times[-1] += time[task]
            place[task] = firsts, times, len(firsts) - 1

    def away(made: int, read: int) -> tuple[int | None, int | None, float]:
        """(the task that waits for D, the one for which H waits, the time between them in the lane of the first)."""
        (tasks, times, i), (others, theirs, j) = place[made], place[read]
        gone, back = i + 1 + moves.window, j - 1 - moves.window
        end = gone
        if made >= read:  # from one step to the next
            life = times[-1] - times[min(gone, len(tasks))] + theirs[max(back + 1, 0)]
        else:
            while back >= 0 and end < len(tasks) and tasks[end] <= others[back]:
                end += 1
            life = times[end] - times[gone] if end > gone else 0.0
        return tasks[gone] if gone < len(tasks) else None, others[back] if back >= 0 else None, life

    storage, outputs = graph.buffer_storage, {view.storage for view in (*graph.inputs, *graph.outputs)}
    writers = [set[int]() for _ in graph.storages]
    for t, b in zip(graph.writes.row_of_each().tolist(), storage[graph.writes.ids].tolist(), strict=True):
        writers[b].add(t)
    rank, groups = order.rank_of_tasks(graph).tolist(), dict[tuple[int, ...], list[tuple[int, list[int], list[int]]]]()
    forward, unit, micro_batch = (a.tolist() for a in (np.isin(graph.kind, (Kind.F, *SENDS)), graph.unit,
                                                       graph.micro_batch))
    for s, spec in enumerate(graph.storages):
        users = graph.storage_users[s].tolist()
        if s in outputs or not writers[s] or not late.isdisjoint(users) or len({rank[t] for t in users}) > 1:
            continue
        if spec.role == Role.STATE and moves.what != "activations":
            if len(users) == 1 and graph.kind[users[0]] == Kind.U:
                groups.setdefault((users[0],), []).append((s, users, users))
        elif spec.role == Role.ACTIVATION and moves.what != "states":
            early, readers = ([t for t in users if forward[t] == wanted] for wanted in (True, False))
            makers = {(unit[t], micro_batch[t]) for t in writers[s]}
            if early and readers and {*early} >= writers[s] and len(makers) == 1 and early[-1] < readers[0]:
                groups.setdefault(next(iter(makers)), []).append((s, [*writers[s]], readers))
    for own in groups.values():
        made = max(t for _, made, _ in own for t in made)
        readers = sorted({t for _, _, readers in own for t in readers})
        gone, back, life = away(made, readers[0])
        if life > 0:
            yield Item([s for s, _, _ in own], rank[made], made, readers, gone, back, life)


def _activation(e: Edit, item: Item, own: Sequence[int]) -> list[tuple[int, int, Lane]]:
    far, near = e.copies(own, "far", role=Role.FAR), e.copies(own, "back")
    e.use(near, *item.readers)
    return _copied(e, item, own, far, near, far.storages)


def _state(e: Edit, item: Item, own: Sequence[int]) -> list[tuple[int, int, Lane]]:
    t = item.made
    near = e.copies(own, "near", role=Role.WORKSPACE, live=None, share_of=None)
    for s in item.storages:
        e.specs[s] = replace(e.specs[s], role=Role.FAR)
    for b in own:
        e.role[b] = Role.FAR.number
    e.use(near, t)
    e.writes[t] = {near.buffers.get(b, b) for b in e.writes[t]}
    far = Copies({b: b for b in own}, {s: s for s in item.storages})
    return _copied(e, item, [*near.buffers.values()], far, near, {near.storages[s]: s for s in item.storages}, part=1)


def _copied(e: Edit, item: Item, made: Sequence[int], far: Copies, near: Copies, out: Mapping[int, int],
            part: int = 0) -> list[tuple[int, int, Lane]]:
    """Adds D, which copies storages `out` to their values, and H, from `far` to `near`. Returns for each after which
    task it stands, its number and its lane. The task that waits for D is said to read what it has copied, and the one
    for which H waits to write it, so that edges say so."""
    key, away, here = unpack(e.keys[item.made]), {*far.buffers.values()}, {*near.buffers.values()}
    back = {far.storages[s]: near.storages[s] for s in item.storages}
    found = []
    for kind, after, reads, writes, moved, lane in ((Kind.D, item.made, {*made}, away, out, OUT),
                                                    (Kind.H, item.readers[0] - 1, away, here, back, IN)):
        task = e.task(after, int(key.unit), kind, int(key.micro_batch), part=part, stage=e.stage[item.made],
                      reads=reads, writes=writes, launches=e.copy(moved),
                      nbytes=sum(e.specs[s].bytes for s in item.storages))
        found.append((after, task, Lane(item.rank, lane)))
    if item.gone is not None:
        e.reads[item.gone] |= away
    if item.back is not None:
        e.writes[item.back] |= away
    return found
