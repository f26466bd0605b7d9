"""The memory plan: where every buffer of a step lies in one arena. Offsets are fixed before the first run.

Two storages may share bytes only if, by the schedule's happens-before, every launch that touches the one has ended
before any launch that touches the other starts. The launches of a task run in order, so what only some of them need
makes room for the others: a stage's task, which has the launches of many layers, needs no more than its layers one by
one. So reuse cannot cause a race, and a step allocates nothing. Parameters and states outlive the step, so they have
their own memory; they count toward the peak, which is what the runtime allocates, to the byte.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..core.columns import Columns, Content, Ints, Rows, offsets, run_loop, spread
from ..core.graph import Role, TaskGraph, check_kinds
from ..core.schedule import Schedule

ALIGNMENT = 256
NEVER = np.iinfo(np.int64).max


class MemoryLimitError(ValueError):
    """The plan needs more memory than the limit. The message says both. `least`: the smallest limit that the policy can
    meet, if it knows this."""

    def __init__(self, message: str, least: int | None = None) -> None:
        super().__init__(message)
        self.least = least


@dataclass(frozen=True)
class MemoryPlan(Columns):
    """`offset[s]`: the byte at which storage s begins in the arena; -1 for persistent storages, which have their own
    memory, and for storages that no task touches. `activation_bytes`: the most bytes of activations at one time.
    `peak_bytes`: arena, parameters and states together."""

    offset: Ints
    arena_bytes: int
    persistent_bytes: int
    activation_bytes: int

    @property
    def peak_bytes(self) -> int:
        return self.arena_bytes + self.persistent_bytes


def rounded(nbytes: Ints) -> Ints:
    """Sizes rounded up to the alignment; a storage without elements gets one unit."""
    return np.maximum(-(-nbytes // ALIGNMENT), 1) * ALIGNMENT


def owned(graph: TaskGraph) -> Ints:
    """The bytes of each storage if it has memory of its own, as parameters and states have; at least one. Far
    storages take none of the device's memory."""
    return np.array([0 if s.role == Role.FAR else max(s.bytes, 1) for s in graph.storages], np.int64)


def plan_memory(graph: TaskGraph, schedule: Schedule) -> MemoryPlan:
    """Packs the storages of a step, largest first, and of equal ones those first that clash with the most; each at the
    lowest offset free of storages that it clashes with. The work grows with the number of storages and of clashes."""
    check_kinds(graph=(graph, TaskGraph), schedule=(schedule, Schedule))
    size = rounded(np.array([s.bytes for s in graph.storages], np.int64))
    persistent = np.array([s.role.persistent for s in graph.storages], bool)
    lives = lifetimes(graph, schedule)
    clashes, _ = _packed(lives, lives.used, np.zeros_like(size))
    planned = lives.used[~persistent[lives.used]]
    order = planned[np.lexsort((planned, -clashes[planned], -size[planned]))]
    _, offset = _packed(lives, order, size)
    held = [s for s in lives.used.tolist() if graph.storages[s].role == Role.ACTIVATION]
    when = np.argsort([*lives.leave[held], *lives.enter[held]], kind="stable")
    return MemoryPlan(offset, int((offset + size)[order].max(initial=0)), int(owned(graph)[persistent].sum()),
                      int(np.cumsum(np.concatenate([-size[held], size[held]])[when]).max(initial=0)))


@dataclass(frozen=True)
class Lifetimes(Content):
    """When each storage is alive, in launches of each lane. The caller counts as one more lane, the last: it loads all
    inputs before the first task and reads all outputs after the last.

    `last[s, l]`: one past the last launch of lane l that touches storage s. `known[s, l]`: how many launches of lane l
    have surely ended when the first launch on s starts. Storage s is dead before t begins if `last[s] <= known[t]` on
    all lanes. But tasks of one action may run at the same time: `joined[s]` are the tasks on s that share their action
    with others, and `action` is the action of each task. Two storages clash if neither is dead before the other begins,
    or if different tasks of one action touch them. `used`: the storages that anything touches.

    On the lane with the most launches, storages that clash overlap, each from `enter[s]` to before `leave[s]`; others
    may overlap as well.
    """

    last: Ints
    known: Ints
    joined: Rows
    action: Ints
    used: Ints
    enter: Ints
    leave: Ints


def lifetimes(graph: TaskGraph, schedule: Schedule) -> Lifetimes:
    """The lifetimes of a graph's storages in any run of the schedule. Raises ValueError for several ranks."""
    clocks = schedule.clocks(graph)
    users, (first, final) = graph.storage_users, graph.storage_launches
    n, lanes = len(graph.storages), clocks.clock.shape[1]
    if len(set(clocks.rank.tolist())) > 1:
        raise ValueError("a memory plan is made for one rank at a time")
    begin, ended = np.empty(len(graph), np.int64), np.empty_like(clocks.clock)  # clocks that count launches, not tasks
    of_lane = [np.flatnonzero(clocks.column == lane) for lane in range(lanes)]
    of_lane = [tasks[np.argsort(clocks.place[tasks])] for tasks in of_lane]
    counts = [offsets(graph.launch_counts[tasks]) for tasks in of_lane]
    for lane, (tasks, launches) in enumerate(zip(of_lane, counts, strict=True)):
        begin[tasks], ended[:, lane] = launches[:-1], launches[clocks.clock[:, lane]]
    storage, task = users.row_of_each(), users.ids
    last = spread((storage, clocks.column[task]), begin[task] + final + 1, (n, lanes + 1), by=np.maximum)
    known = np.full((n, lanes + 1), NEVER)
    known[:, -1] = 1
    before_launch = ended[task]
    before_launch[np.arange(len(task)), clocks.column[task]] = begin[task] + first
    np.minimum.at(known[:, :-1], storage, before_launch)
    inputs, outputs = ([view.storage for view in views] for views in (graph.inputs, graph.outputs))
    known[inputs], last[inputs, -1] = 0, 1
    last[outputs, -1] = 2

    main = int(np.argmax([launches[-1] for launches in counts]))
    enter = np.minimum(known[:, main], NEVER - 1)
    leave = np.where(last[:, -1] == 2, NEVER, np.maximum(last[:, main], 1))
    for lane in {*range(lanes)} - {main}:  # surely dead once a task has begun that starts after the last launch
        begun = np.append(begin[of_lane[main]] + 1, NEVER)[np.searchsorted(ended[of_lane[main], lane], last[:, lane])]
        leave = np.where(last[:, lane] > 0, np.maximum(leave, begun), leave)
    action, starts, ends = _actions(graph, schedule, begin)
    shared = action[task] >= 0
    storage, task = storage[shared], task[shared]
    here = clocks.column[task] == main
    np.minimum.at(enter, storage[here], starts[task[here]])
    np.maximum.at(leave, storage[here], ends[task[here]])
    return Lifetimes(last, known, Rows.from_pairs(storage, task, n), action, np.flatnonzero((last > 0).any(axis=1)),
                     enter, leave)


def _actions(graph: TaskGraph, schedule: Schedule, begin: Ints) -> tuple[Ints, Ints, Ints]:
    """The action of each task, -1 if it has only this task, and the first launch of the action and one past its last.
    `begin`: the first launch of each task on its lane."""
    action, starts, ends = np.full(len(graph), -1, np.int64), begin.copy(), begin + graph.launch_counts
    if schedule.joined is not None:
        ids, (entry, _) = schedule.ids(graph), schedule.actions()
        action[ids] = np.where(np.bincount(entry)[entry] > 1, entry, -1)
        first = np.flatnonzero(~np.asarray(schedule.joined, bool))
        starts[ids] = starts[ids[first]][entry]
        ends[ids] = np.maximum.reduceat(ends[ids], first)[entry]
    return action, starts, ends


def _packed(lives: Lifetimes, order: Ints, size: Ints) -> tuple[Ints, Ints]:
    """(of each storage the number of storages in `order` that it clashes with, its offset), if storages are placed in
    this order, each at the lowest offset free of those placed before with which it clashes. -1: not placed."""
    n, lanes = lives.last.shape
    count = len(order)
    rank = np.argsort(lives.enter[order], kind="stable")
    enter, leave = lives.enter[order], lives.leave[order]
    leaf = spread(rank, np.arange(count), count)
    behind = np.searchsorted(enter[rank], leave)  # storages from this leaf on begin when it is dead
    overlaps = int(behind.sum() - np.searchsorted(np.sort(leave), enter, "right").sum())
    leaves = 1 << max(count - 1, 0).bit_length()
    _, after = run_loop(
        _pack, overlaps + n, lanes, leaves, order, order[rank], leaf, behind, enter, leave, size, lives.last.ravel(),
        lives.known.ravel(), lives.joined.ptr, lives.joined.ids, lives.action, np.zeros(2 * leaves, np.int64),
        np.zeros(n, np.int64), np.full(n, -1, np.int64), np.zeros(n, np.int64), np.empty(count, np.int64),
        np.zeros(count, np.int64), np.zeros(count, np.int64), np.full(count, -1, np.int64))
    return after.clashes, after.offset


def _pack(lanes, leaves, order, at_leaf, leaf, behind, enter, leave, size, last,  # type: ignore[no-untyped-def]
          known, joined_ptr, joined, action, latest, clashes, offset, level_of, levels, bottom, reach, mark):
    """Fills `clashes` and `offset`.

    `latest`: a tree over the placed storages in the order of `enter`, with the largest `leave` of each subtree, so that
    all that overlap are found without a look at the others. A level is an offset at which storages lie; `levels` is in
    order of their offsets `bottom`. If `mark[v]` is i, the storages of level v up to `reach[v]` are in the way of the
    i-th storage.
    """
    count = 0
    for i in range(len(order)):
        s = order[i]
        node = leaves
        while node > 0:  # the next leaf from this one on whose storage is alive when s begins
            if latest[node] > enter[i]:
                while node < leaves:
                    node *= 2
                    if latest[node] <= enter[i]:
                        node += 1
                if node - leaves >= behind[i]:
                    break
                t = at_leaf[node - leaves]
                before = after = True
                for lane in range(lanes):
                    before = before and last[s * lanes + lane] <= known[t * lanes + lane]
                    after = after and last[t * lanes + lane] <= known[s * lanes + lane]
                clash = not before and not after
                for j in range(joined_ptr[s], joined_ptr[s + 1]):
                    for k in range(joined_ptr[t], joined_ptr[t + 1]):
                        a, b = joined[j], joined[k]
                        clash = clash or (a != b and action[a] == action[b])
                if clash:
                    clashes[s] += 1
                    clashes[t] += 1
                    v = level_of[t]
                    if mark[v] != i or reach[v] < offset[t] + size[t]:
                        reach[v] = offset[t] + size[t]
                    mark[v] = i
            while node & 1:
                node >>= 1
            if node > 0:
                node += 1
        place, above = 0, 0
        while above < count:
            v = levels[above]
            if mark[v] == i:
                if bottom[v] >= place + size[s]:
                    break
                place = max(place, reach[v])
            above += 1
        offset[s] = place
        while above > 0 and bottom[levels[above - 1]] >= place:
            above -= 1
        if above == count or bottom[levels[above]] != place:
            for j in range(count, above, -1):
                levels[j] = levels[j - 1]
            levels[above], bottom[count] = count, place
            count += 1
        level_of[s] = levels[above]
        node = leaves + leaf[i]
        while node > 0 and latest[node] < leave[i]:
            latest[node] = leave[i]
            node >>= 1
    return count
