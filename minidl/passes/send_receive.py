"""Sends and receives as tasks of a schedule with ranks, and the proof that they carry everything that ranks read of
each other.

Every rank has one lane for each peer and direction. Both ends of a link keep the order in which the sender computes the
messages, so they always agree. A receive has its own lane and waits only for its message, so it is posted as early as
possible. Therefore, where each rank computes on one lane, a schedule that is free of deadlock stays so when its
messages become tasks, rendezvous or not: think of each message right after the task that makes it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from graphlib import CycleError, TopologicalSorter
from typing import Any

import numpy as np

from ..core.columns import Content, Ints, Rows, grouped, run_loop, spread
from ..core.graph import ROLES, Role, StorageSpec, TaskGraph
from ..core.schedule import Lane, Schedule
from ..core.tasks import MESSAGES, RECEIVES, SENDS, GraphError, Kind, pack, repack, unpack
from .boundary import outliving
from .rewrite import sums

SENDABLE = (Kind.F, Kind.O, Kind.B, Kind.U)  #: kinds whose results can be sent


def talks(schedule: Schedule) -> bool:
    """Whether the schedule has messages as tasks."""
    return bool(np.isin(unpack(schedule.keys).kind, MESSAGES).any())


@dataclass(frozen=True)
class Messages(Content):
    """One message for everything that a task sends to a rank: message i goes from task `sender[i]` (of parts: the last)
    to rank `to[i]`. Buffer `copied[j]` travels in message `message[j]` and becomes buffer `copy[j]` on that rank."""

    sender: Ints
    to: Ints
    message: Ints
    copied: Ints
    copy: Ints

    def __len__(self) -> int:
        return len(self.sender)


def received(graph: TaskGraph, rank: Ints) -> tuple[TaskGraph, Messages]:
    """The graph in which tasks read their own rank's copies of what other ranks wrote, and the messages that will write
    them. `rank`: of each task. Raises GraphError if a task needs parts of one storage from several ranks."""
    reader, buffer, writer = crossing(graph, rank)
    writer = parts_of(graph, np.arange(len(graph)), np.maximum)[writer]
    ranks, buffers = int(rank.max(initial=0)) + 1, len(graph.buffer_bytes)
    message, of_read = np.unique(writer * ranks + rank[reader], return_inverse=True)
    copies, of_copy = np.unique(of_read * buffers + buffer, return_inverse=True)
    copied, carrier = copies % buffers, copies // buffers
    copy = buffers + np.arange(len(copies))
    at = np.searchsorted(graph.reads.row_of_each().astype(np.int64) * buffers + graph.reads.ids,
                         reader * buffers + buffer)
    moved = graph.reads.ids.astype(np.int64)
    moved[at] = copy[of_copy]
    names = [f"{graph.buffer_names[b]}, received" for b in copied] if graph.buffer_names else []
    moves, move = [dict[int, int]()], np.zeros(len(graph), np.int64)
    storage, specs = copy, list[StorageSpec]()
    if graph.storages:
        # copies in one message share a storage where the originals do, since launches use it as one array
        source = graph.buffer_storage[copied].astype(np.int64)
        pairs, of_pair = np.unique(carrier * len(graph.storages) + source, return_inverse=True)
        storage = len(graph.storages) + of_pair
        specs = [replace(spec, name=f"{spec.name}, received", role=_role(spec.role), live=None, share_of=None)
                 for spec in (graph.storages[s] for s in (pairs % len(graph.storages)).tolist())]
        for t, own in grouped(zip(reader.tolist(), of_copy.tolist(), strict=True)).items():
            found = [*zip(source[own].tolist(), storage[own].tolist(), strict=True)]
            move[t] = len(moves)
            moves.append(dict(found))
            others = {*graph.reads[t].tolist(), *graph.writes[t].tolist()} - {*copied[own].tolist()}
            if stray := [*(s for s, to in found if moves[-1][s] != to),
                         *(s for s in graph.buffer_storage[[*others]].tolist() if s in moves[-1])]:
                raise GraphError(f"task {graph.name(t)} needs parts of {graph.storages[stray[0]].name} that are made "
                                 f"on several ranks; cut the stages elsewhere")
    grown = graph.with_buffers(copied, storage, names, storages=specs)
    roles = [_role(ROLES[r]).number for r in graph.buffer_role[copied].tolist()]
    grown = replace(grown, buffer_role=np.append(graph.buffer_role, roles).astype(graph.buffer_role.dtype))
    messages = Messages(message // ranks, message % ranks, carrier, copied, copy)
    return grown.remap(moved, graph.writes.ids, moves, move), messages


def parts_of(graph: TaskGraph, values: Ints, take: np.ufunc) -> Ints:
    """For each task its value; for parts of one F, O or B the greatest of their values, or the least (`take`)."""
    cut: Ints = np.flatnonzero(np.isin(graph.kind, (Kind.F, Kind.O, Kind.B)) & (unpack(graph.keys).part > 0))
    first, of = np.unique(repack(graph.keys[cut], part=0), return_index=True, return_inverse=True)[1:]
    found = values.copy()
    take.at(found, cut[first][of], values[cut])
    found[cut] = found[cut[first][of]]
    return found


def _role(role: Role) -> Role:
    """The role of a received buffer: it does not outlive the step, even if it is a parameter."""
    return Role.ACTIVATION if role.persistent else role


def add_communication(graph: TaskGraph, schedule: Schedule, apart: bool = False) -> tuple[TaskGraph, Schedule]:
    """The graph and schedule with a send and a receive for every result that another rank reads.

    A message holds everything that one task sends to one rank: `2SF0>1` on the sender's lane `send->1` reads it, and
    `2RF0>1` on the receiver's lane `recv<-0` writes copies, which the tasks of that rank read. A result that several
    ranks read goes to each in a separate message. New weights travel as an activation of a micro-batch after the last:
    an update of micro-batch i among m sends them as micro-batch m + i. The sums of the
    two directions' gradients, parts of one task, go as micro-batches m and m + 1. In the body of a loop, late tasks may
    read what was sent in the iteration before: then the receive is late, and the send is not. `apart`: messages of each
    computing lane have lanes of their own, as in `F2->1`. Raises GraphError for results of W.
    """
    rank = schedule.rank_of_tasks(graph)
    own, messages = received(graph, rank)
    k, sender = len(messages), messages.sender
    if not k:
        return graph, schedule
    stray = ~np.isin(graph.kind, SENDABLE)[sender]
    if stray.any():
        raise GraphError(f"the result of {graph.name(int(sender[np.argmax(stray)]))} is read on another rank, but "
                         f"only results of F, O, B and U can be sent")
    size = np.bincount(messages.message, graph.buffer_bytes[messages.copied], k).astype(np.int64)
    made = unpack(graph.keys[sender])
    of_sums = sums(graph)[sender]
    new_weights = (made.kind == Kind.U) & ~of_sums
    count = int(graph.micro_batch[graph.kind == Kind.F].max(initial=-1)) + 1
    micro_batch = made.micro_batch + count * new_weights + made.part * of_sums
    place = parts_of(graph, spread(schedule.ids(graph), np.arange(len(graph)), len(graph)), np.minimum)
    after, late = _receives(graph, own, messages, rank, place)
    send, receive = (pack(made.unit, np.where((made.kind == Kind.F) | new_weights, *kinds), micro_batch,
                          destination=messages.to, late=when, iteration=made.iteration)
                     for kinds, when in ((SENDS, made.late), (RECEIVES, late)))
    travel, arrive = (Rows.from_pairs(messages.message, buffers, k) for buffers in (messages.copied, messages.copy))
    both = np.repeat(np.arange(k), 2)  # each send, then its receive
    talking = own.insert(
        np.stack([sender, after], axis=1).ravel(),
        np.stack([send, receive], axis=1).ravel(),
        travel.followed_by(arrive).take(both + np.tile([0, k], k)), arrive.take(both), size[both])
    if graph.late.any():
        talking = outliving(talking)
    lane = spread(schedule.ids(graph), schedule.lane_of_each(), len(graph))[sender] if apart else None
    return talking, _with_lanes(schedule, send, receive, rank, place, messages, lane)


def _receives(graph: TaskGraph, own: TaskGraph, messages: Messages, rank: Ints, place: Ints) -> tuple[Ints, Ints]:
    """Of each receive the task after which it comes, and whether it is late: if only late tasks read it. If its send is
    not late then, the message is of the iteration before, and the receive comes before its first reader. `own`: the
    graph in which tasks read copies.

    Other messages arrive in their own iteration, even if only late tasks read them: where ranks would wait for each
    other's next iteration, those to a rank that begins its iterations later than the sender; and, since the messages
    between two ranks arrive in the order in which they are sent (`place`), those that are sent before such a one."""
    sender, to = messages.sender, messages.to
    if not graph.late.any():
        return sender, np.zeros(len(messages), np.int64)
    message_of = spread(messages.copy, messages.message, len(own.buffer_bytes), -1)
    message, reader = message_of[own.reads.ids], own.reads.row_of_each().astype(np.int64)
    message, reader = message[message >= 0], reader[message >= 0]
    order = np.lexsort((reader, own.late[reader], message))
    first = reader[order[np.unique(message[order], return_index=True)[1]]]
    late, source = own.late[first].astype(np.int64), rank[sender]
    waits = late > graph.late[sender]
    if _in_circle(source[waits], to[waits]):
        begin = _begins(graph, rank, sender[waits], first[waits])
        late[waits & (begin[source] <= begin[to])] = 0
    last: dict[tuple[int, int], int] = {}  # the last message between two ranks that is received in its own iteration
    for i in np.flatnonzero(late <= graph.late[sender]).tolist():
        link = int(source[i]), int(to[i])
        last[link] = max(last.get(link, -1), int(place[sender[i]]))
    overtaken = [place[sender[i]] < last.get((source[i], to[i]), -1) for i in range(len(messages))]
    late = np.where(overtaken, graph.late[sender], late)
    return np.where(late > graph.late[sender], first - 1, sender), late


def _in_circle(source: Ints, target: Ints) -> bool:
    """Whether these edges have a circle."""
    try:
        TopologicalSorter(grouped(zip(target.tolist(), source.tolist(), strict=True))).prepare()
    except CycleError:
        return True
    return False


def _begins(graph: TaskGraph, rank: Ints, made: Ints, read: Ints) -> Ints:
    """When each rank begins an iteration in the steady state, if every task but updates takes a unit of time. Tasks
    `read` read what tasks `made` have made in the iteration before."""
    ranks = int(rank.max(initial=0)) + 1
    preds, before = graph.preds.lists(), grouped(zip(read.tolist(), made.tolist(), strict=True))
    free, end, begin = (np.zeros(count, np.int64) for count in (ranks, len(graph), ranks))
    for _ in range(ranks + 2):
        begin[:] = -1
        last = end.copy()
        for t in range(len(graph)):
            r = rank[t]
            start = max([free[r], *end[preds[t]], *last[before.get(t, [])]])
            begin[r] = start if begin[r] < 0 else begin[r]
            free[r] = end[t] = start + int(graph.kind[t] != Kind.U)
    return begin


def meetings(graph: TaskGraph) -> tuple[Ints, Ints]:
    """The send and the receive of each message: the one writes what the other reads."""
    maker = {b: t for t in np.flatnonzero(np.isin(graph.kind, SENDS)).tolist() for b in graph.writes[t].tolist()}
    pairs = {(maker[b], t) for t in np.flatnonzero(np.isin(graph.kind, RECEIVES)).tolist()
             for b in graph.reads[t].tolist() if b in maker}
    found = np.array(sorted(pairs), np.int64).reshape(-1, 2)
    return found[:, 0], found[:, 1]


def _with_lanes(schedule: Schedule, send: Ints, receive: Ints, rank: Ints, place: Ints, messages: Messages,
                lane: Ints | None) -> Schedule:
    """The schedule with lanes `send->peer` and `recv<-peer`, in the order in which their senders run. `send`,
    `receive`: the keys of each message's two tasks; `place` of each task in the schedule. `lane`: of each sender, if
    messages of several lanes have lanes of their own."""
    early = unpack(receive).late > unpack(send).late  # received before everything that is sent in the same step
    made = np.argsort(place[messages.sender], kind="stable")
    source, to, send, receive = rank[messages.sender[made]], messages.to[made], send[made], receive[made]
    lanes: dict[Lane, Ints] = {}
    of = np.full(len(made), -1) if lane is None else lane[made]
    for a, b, own in sorted(set(zip(source.tolist(), to.tolist(), of.tolist(), strict=True))):
        here = np.flatnonzero((source == a) & (to == b) & (of == own))
        then = here[np.argsort(~early[made][here], kind="stable")]
        sends, receives = ("send", "recv") if own < 0 else (schedule.lanes[own].name,) * 2
        lanes |= {Lane(a, f"{sends}->{b}"): send[here], Lane(b, f"{receives}<-{a}"): receive[then]}
    return schedule.with_lanes(lanes)


def count_waits(graph: TaskGraph, schedule: Schedule) -> int:
    """The number of event waits of the plan with messages (`Schedule.waits` after `add_communication`), without making
    them: one for each send, and one for each receive unless a later one of its lane was awaited before."""
    rank = schedule.rank_of_tasks(graph)
    reader, _, writer = crossing(graph, rank)
    if not len(reader):
        return 0
    place = spread(schedule.ids(graph), np.arange(len(graph)), len(graph))
    ranks = int(rank.max()) + 1
    sends = len(np.unique(writer * ranks + rank[reader]))
    link = rank[writer] * ranks + rank[reader]
    order = np.lexsort((-place[writer], place[reader], link))  # a reader waits for its last message of a link
    made, first = place[writer][order], np.append(True, np.diff(link[order]) > 0)
    so_far = np.maximum.accumulate(made + link[order] * len(graph))  # each link by itself
    return sends + int((first | np.append(True, so_far[1:] > so_far[:-1])).sum())


def check_messages(graph: TaskGraph, schedule: Schedule, exempt: Any = None) -> None:
    """Proves that messages can carry all data between ranks, each of which has its own memory.

    A rank may read another rank's results only if they can be sent: F, O, B and U make such results, or, if messages
    are tasks, only sends do. No two ranks may write one buffer, and none may write a buffer whose value from before the
    step another rank reads. `exempt`: mask of buffers that are not checked. Raises ScheduleError.
    """
    rank = schedule.rank_of_tasks(graph)
    if not len(rank) or rank.min() == rank.max():
        return
    sends = np.isin(graph.kind, SENDS)
    sendable = sends if sends.any() else np.isin(graph.kind, SENDABLE)
    size = len(graph.buffer_bytes)
    exempt = np.zeros(size, bool) if exempt is None else exempt.copy()
    if graph.late.any():
        reader, buffer, writer = crossing(graph, rank)
        exempt[buffer[(writer > reader) & sendable[writer]]] = True  # sent in the iteration before
    none = np.full(size, -1, np.int64)
    (fault, first, second, buffer), _ = run_loop(
        _unsendable, len(graph.reads.ids) + len(graph.writes.ids), graph.reads.ptr, graph.reads.ids, graph.writes.ptr,
        graph.writes.ids, rank, sendable, np.isin(graph.kind, RECEIVES),
        exempt, none, none.copy(), none.copy())
    if fault:
        a, b = graph.name(first), graph.name(second)
        what = graph.buffer(buffer).name
        texts = {1: f"{b} on rank {rank[second]} reads {what} of {a} on rank {rank[first]}, and no message can "
                    f"carry it: only results of {'sends' if sends.any() else 'F, O, B and U'} travel between ranks",
                 2: f"{a} on rank {rank[first]} and {b} on rank {rank[second]} both write {what}, but each "
                    f"rank has its own memory",
                 3: f"{b} changes {what} on rank {rank[second]}, but {a} on rank {rank[first]} reads a "
                    f"copy that does not change"}
        raise schedule.error(texts[fault], [int(graph.keys[first]), int(graph.keys[second])])


def _unsendable(read_ptr, reads, write_ptr, writes, rank, sendable, receives, exempt,  # type: ignore[no-untyped-def]
                writer, early, other):
    """(fault or 0, the earlier task, the later task, the buffer). `writer[b]`: the last task that wrote b. `early[b]`
    and `other[b]`: tasks of two ranks that read b before any task wrote it."""
    for t in range(len(rank)):
        for i in range(read_ptr[t], read_ptr[t + 1]):
            b = reads[i]
            if exempt[b]:
                continue
            w = writer[b]
            if w >= 0:
                if rank[w] != rank[t] and not sendable[w]:
                    return 1, w, t, b
            elif early[b] < 0:
                early[b] = t
            elif rank[early[b]] != rank[t]:
                other[b] = t
        for i in range(write_ptr[t], write_ptr[t + 1]):
            b = writes[i]
            if exempt[b]:
                continue
            w, e = writer[b], early[b]
            if w >= 0 and rank[w] != rank[t] and not receives[t]:
                return 2, w, t, b
            if e >= 0 and rank[e] == rank[t]:
                e = other[b]
            if w < 0 and e >= 0:
                return 3, e, t, b
            writer[b] = t
    return 0, 0, 0, 0


def crossing(graph: TaskGraph, rank: Ints) -> tuple[Ints, Ints, Ints]:
    """Every read of a buffer that a task of another rank wrote last, as (reader, buffer, writer). In the body of a
    loop, what a late task reads may have been written in the iteration before."""
    n = len(graph)
    reader, buffer = graph.reads.row_of_each().astype(np.int64), graph.reads.ids.astype(np.int64)
    written = np.sort(graph.writes.ids.astype(np.int64) * n + graph.writes.row_of_each())
    at = np.maximum(np.searchsorted(written, buffer * n + reader) - 1, 0)
    last = written[at] if len(written) else np.full(len(reader), -1)
    writer = np.where((last // n == buffer) & (last % n < reader), last % n, -1)
    before = np.flatnonzero((writer < 0) & graph.late[reader])
    if len(before) and len(written):
        last = written[np.maximum(np.searchsorted(written, (buffer[before] + 1) * n) - 1, 0)]
        writer[before] = np.where((last // n == buffer[before]) & ~graph.late[last % n], last % n, -1)
    across = (writer >= 0) & (rank[writer] != rank[reader])
    return reader[across], buffer[across], writer[across]
