"""Offload: activations between their forward and their backward, an optimizer's states between two updates, and weights
between the tasks that use them leave the device's memory for far memory: the host's, or a file.

A task D copies out, a task H copies back into memory of its own, on a lane for each direction. Copies keep bits, so a
step is bit-identical to the plain one. A D runs as soon as the values are there; a later task of the same lane waits
for it, so that what follows may use the memory. An H runs after a task that is `window` tasks before the first reader.
If only some must leave, those do that are away for the longest, as in PipeOffload (Wan, Qi, Huang, Lin, "PipeOffload:
improving scalability of pipeline parallelism with memory optimization", 2025).

Weights are fetched for all forwards of a step, for all its backwards, and for the update, whose D brings them home; if
two of these follow each other, once for both. So a rank holds the weights of the slot that it works on, and of the next
one, as in RoundPipe (2604.27085).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..core.columns import Ints, Rows, grouped
from ..core.graph import Role, TaskGraph
from ..core.placement import Refused
from ..core.schedule import Lane, Schedule
from ..core.tasks import COMPUTE, COPIES, SENDS, Kind, pack, repack, unpack
from .boundary import loop
from .draft import Copies, Draft, Edit
from .updates_last import ended_by_updates

WHAT = "offload"
#: what can be offloaded; all: activations and states
EACH = ("none", "activations", "states", "all", "weights")
OUT, IN = "out", "in"  #: the names of the lanes


@dataclass(frozen=True)
class Moves:
    """The memory that is offloaded: "activations", "states", both ("all"), or "weights"; of these, the `most` that are
    away the longest (None: all). `window`: the number of tasks beside which a copy may run."""

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


@dataclass(frozen=True)
class Spell:
    """Tasks in a row that use weights; `back`, `gone`: for which H before them waits, which waits for D after them."""

    users: Sequence[int]
    back: int | None
    gone: int | None


@dataclass(frozen=True)
class Weights:
    """The weights that an update of a rank changes, and the spells in which they are used. `elsewhere`: the tasks of
    other ranks that read what the update makes. The others as in `Item`."""

    storages: Sequence[int]
    rank: int
    update: int
    elsewhere: Sequence[int]
    life: float
    spells: Sequence[Spell]


def offload(draft: Draft, moves: Moves) -> Draft:
    """The draft with copies out and back. Raises Refused if nothing can be offloaded."""
    graph, order = draft.graph, draft.order
    if moves.what in ("states", "all"):
        order = ended_by_updates(order) or order
    late = unpack(order.keys).late == 1
    plain = order if graph.late.any() else replace(order, keys=repack(order.keys, late=0))  # as the graph has them
    draft = replace(draft.take(_in_time(graph, order, plain, late)), schedule=replace(plain, slots=None))
    after = {*draft.graph.find(plain.keys[late]).tolist()}
    lanes, items = _Lanes(draft, moves.window, after), list[Item | Weights]()
    items += _weights(draft, lanes) if moves.what == "weights" else _items(draft, moves, lanes, after)
    found = sorted(items, key=lambda item: -item.life)[: moves.most]
    if not found:
        kept = {"states": "states of an optimizer", "weights": "weights"}.get(moves.what, "activations")
        beside = late.any() and moves.what == "states"
        why = "updates beside the next step" if beside else f"has no {kept} that could be away for a task or more"
        raise Refused(WHAT, f"{draft.name} {why}", "leave --offload out")
    e, buffers = draft.edit(), grouped((s, b) for b, s in enumerate(draft.graph.buffer_storage.tolist()))
    copies = list[tuple[int, int, Lane]]()
    for item in found:
        own = sorted(b for s in item.storages for b in buffers[s])
        copies += _fetched(e, item, own) if isinstance(item, Weights) else _away(e, item, own)
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


class _Lanes:
    """The tasks of each lane that compute and are not `late`, with the time until each."""

    def __init__(self, draft: Draft, window: int, late: Collection[int]) -> None:
        graph, order = draft.graph, draft.order
        ids, action, time = order.ids(graph), order.actions()[0].tolist(), np.nan_to_num(draft.time).tolist()
        works = np.flatnonzero(np.isin(graph.kind[ids], COMPUTE) & ~np.isin(ids, [*late]))
        self.window = window
        # task -> the first tasks of the actions of its lane, the time until each and after the last, and its action
        self.place = dict[int, tuple[list[int], list[float], int]]()
        for entries in np.split(works, np.searchsorted(works, order.ptr[1:-1])):
            firsts, times = list[int](), [0.0]
            for entry, task in zip(entries.tolist(), ids[entries].tolist(), strict=True):
                if not (firsts and action[entry] == action[entry - 1]):
                    firsts.append(task)
                    times.append(times[-1])
                times[-1] += time[task]
                self.place[task] = firsts, times, len(firsts) - 1

    def away(self, made: int, read: int) -> tuple[int | None, int | None, float]:
        """(the task that waits for D, the one for which H waits, the time between them in the lane of the first)."""
        (tasks, times, i), (others, theirs, j) = self.place[made], self.place[read]
        gone, back = i + 1 + self.window, j - 1 - self.window
        end = gone
        if made >= read:  # from one step to the next
            life = times[-1] - times[min(gone, len(tasks))] + theirs[max(back + 1, 0)]
        else:
            while back >= 0 and end < len(tasks) and tasks[end] <= others[back]:
                end += 1
            life = times[end] - times[gone] if end > gone else 0.0
        return tasks[gone] if gone < len(tasks) else None, others[back] if back >= 0 else None, life


def _items(draft: Draft, moves: Moves, lanes: _Lanes, late: set[int]) -> Iterator[Item]:
    """The storages that can leave. `late`: tasks that run in the next step, whose storages stay."""
    graph, order = draft.graph, draft.order
    storage, outputs = graph.buffer_storage, {view.storage for view in (*graph.inputs, *graph.outputs)}
    writers = [{*own} for own in Rows.from_pairs(storage[graph.writes.ids], graph.writes.row_of_each(),
                                                 len(graph.storages)).lists()]
    rank, groups = order.rank_of_tasks(graph).tolist(), dict[tuple[int, ...], list[tuple[int, list[int], list[int]]]]()
    forward, unit, micro_batch = (a.tolist() for a in (np.isin(graph.kind, (Kind.F, *SENDS)), graph.unit,
                                                       graph.micro_batch))
    for s, spec in enumerate(graph.storages):
        users = graph.storage_users[s].tolist()
        if s in outputs or not writers[s] or not late.isdisjoint(users) or len({rank[t] for t in users}) > 1:
            continue
        if (graph.kind[users] == Kind.X).any():  # which no lane that computes has
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
        gone, back, life = lanes.away(made, readers[0])
        if life > 0:
            yield Item([s for s, _, _ in own], rank[made], made, readers, gone, back, life)


TURN = {Kind.F: 0, Kind.O: 1, Kind.W: 1, Kind.B: 1, Kind.R: 1, Kind.U: 2}  #: weights stay for all tasks of a number


def _weights(draft: Draft, lanes: _Lanes) -> Iterator[Weights]:
    """The weights that one update changes, if only tasks of its lane use them, and others what it makes."""
    graph, rank, storage = draft.graph, draft.order.rank_of_tasks(draft.graph).tolist(), draft.graph.buffer_storage
    returned = {view.storage for view in (*graph.inputs, *graph.outputs)}
    made = Rows.from_pairs(storage[graph.writes.ids], graph.writes.row_of_each(), len(graph.storages))
    weights = [s for s, spec in enumerate(graph.storages) if spec.role == Role.PARAMETER and spec.share_of is None
               and s not in returned and len(made[s]) == 1]
    for update, own in grouped((int(made[s][0]), s) for s in weights).items():
        users = np.unique(np.concatenate([graph.storage_users[s] for s in own])).tolist()
        elsewhere = [t for t in users if rank[t] != rank[update]]
        here = [t for t in users if rank[t] == rank[update]]
        if not {*here} <= lanes.place.keys() or any(t < update for t in elsewhere):
            continue
        spells = list[list[int]]()
        for tasks in grouped((TURN[Kind(graph.kind[t])], t) for t in here).values():
            if spells and (tasks[0] < spells[-1][-1] or lanes.away(spells[-1][-1], tasks[0])[2] <= 0):
                spells[-1] = sorted({*spells[-1], *tasks})
            else:
                spells.append(tasks)
        gaps = [lanes.away(spells[i - 1][-1], spell[0]) for i, spell in enumerate(spells)]
        if (life := sum(life for *_, life in gaps)) > 0:
            yield Weights(own, rank[update], update, elsewhere, life, [
                Spell(users, before[1], after[0]) for users, before, after in
                zip(spells, gaps, gaps[1:] + gaps[:1], strict=True)])


def _moved_out(e: Edit, item: Item | Weights, own: Sequence[int]) -> None:
    """The storages of an item are far memory, which is copied from and to."""
    for s in item.storages:
        e.specs[s] = replace(e.specs[s], role=Role.FAR)
    for b in own:
        e.role[b] = Role.FAR.number


def _away(e: Edit, item: Item, own: Sequence[int]) -> list[tuple[int, int, Lane]]:
    """Activations are copied to far memory and back to other memory. States live in far memory; the update has them in
    memory of its own."""
    t, state = item.made, item.made in item.readers
    if state:
        back = e.copies(own, "near", role=Role.WORKSPACE, live=None, share_of=None)
        out = back.inverse
        _moved_out(e, item, own)
        e.move(back, t)
    else:
        out, near = e.copies(own, "far", role=Role.FAR), e.copies(own, "back")
        e.use(near, *item.readers)
        back = Copies({out.buffers[b]: to for b, to in near.buffers.items()},
                      {out.storages[s]: to for s, to in near.storages.items()})
    return [_copy(e, Kind.D, t, item.rank, t, int(state), out, item.gone),
            _copy(e, Kind.H, item.readers[0] - 1, item.rank, t, int(state), back, item.back)]


def _fetched(e: Edit, item: Weights, own: Sequence[int]) -> list[tuple[int, int, Lane]]:
    """Each spell uses memory of its own; H brings the weights if it reads them, D takes them home if it has the update.
    They are named by the first user, and are part 0 beside a forward."""
    near = [e.copies(own, f"near {i}", role=Role.WORKSPACE, live=None) for i in range(len(item.spells))]
    _moved_out(e, item, own)
    like, found = item.spells[0].users[0], list[tuple[int, int, Lane]]()
    part = int(unpack(e.keys[like]).kind != Kind.F)
    for spell, here in zip(item.spells, near, strict=True):
        reads = any(e.reads[t] & {*own} for t in spell.users)
        e.move(here, *spell.users)
        if reads:
            found.append(_copy(e, Kind.H, spell.users[0] - 1, item.rank, like, part, here, spell.back))
        if item.update in spell.users:
            e.use(here, *item.elsewhere)
            found.append(_copy(e, Kind.D, item.update, item.rank, like, part, here.inverse, spell.gone))
    return found


def _copy(e: Edit, kind: Kind, after: int, rank: int, like: int, part: int, copies: Copies,
          meets: int | None) -> tuple[int, int, Lane]:
    """Adds a D or an H of the unit of another task, which makes these copies. Returns after which task it stands, its
    number and its lane. The task that waits for D (`meets`) is said to read what it has copied, and the one for which H
    waits to write it, so that edges say so."""
    own, reads, writes = unpack(e.keys[like]), {*copies.buffers}, {*copies.buffers.values()}
    micro_batch = own.micro_batch
    while int(pack(own.unit, kind, micro_batch, part=part)) in e.keys:  # a stage may have weights of several updates
        micro_batch += 1
    task = e.task(after, own.unit, kind, micro_batch, part=part, stage=e.stage[like], reads=reads, writes=writes,
                  launches=e.copy(copies.storages), nbytes=sum(e.specs[s].bytes for s in copies.storages))
    if meets is not None:
        said, of = (e.reads, writes) if kind == Kind.D else (e.writes, reads)
        said[meets] |= of
    return after, task, Lane(rank, OUT if kind == Kind.D else IN)
