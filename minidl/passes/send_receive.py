"""Sends and receives as tasks, once it is known which rank runs what, and the proof that they carry all
that crosses ranks.

Every rank has one lane for each peer and direction. On both ends of a link the order is that in which the producer's
rank makes the messages, so the two always agree; receives wait on lanes of their own for nothing but their message, so
they are posted as early as can be. So where each rank computes on one lane, a schedule that runs without messages as
tasks cannot deadlock with them, rendezvous or not: put each message right after the task that makes it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..graph import Ints, Rows, TaskGraph
from ..loops import run_loop
from ..schedule import Lane, Schedule, ScheduleError
from ..tasks import COMMUNICATION, RECEIVES, SENDS, GraphError, Kind, pack, parse_task, unpack
from .rewrite import sums

SENDABLE = (Kind.F, Kind.O, Kind.B)  #: whose results can be sent, beside those of sums over gradients


def talks(schedule: Schedule) -> bool:
    """Whether messages stand in the schedule as tasks."""
    return bool(np.isin(unpack(schedule.keys).kind, COMMUNICATION).any())


@dataclass(frozen=True)
class Messages:
    """One for all that a task hands to a rank: `sender[i]` to rank `to[i]`. Buffer `copied[j]` travels in message
    `of[j]` and is buffer `copy[j]` there."""

    sender: Ints
    to: Ints
    of: Ints
    copied: Ints
    copy: Ints

    def __len__(self) -> int:
        return len(self.sender)


def received(graph: TaskGraph, rank: Ints) -> tuple[TaskGraph, Messages]:
    """The graph whose tasks read copies of their own rank of what other ranks' tasks wrote, and the messages for it.
    Nothing writes the copies yet. `rank`: of each task. Raises GraphError where a task needs parts of one storage from
    several places."""
    reader, buffer, writer = crossing(graph, rank)
    ranks, buffers = int(rank.max(initial=0)) + 1, len(graph.buffer_bytes)
    message, of_read = np.unique(writer * ranks + rank[reader], return_inverse=True)
    copies, of_copy = np.unique(of_read * buffers + buffer, return_inverse=True)
    copied, of = copies % buffers, copies // buffers
    copy = buffers + np.arange(len(copies))
    at = np.searchsorted(graph.reads.row_of_each().astype(np.int64) * buffers + graph.reads.ids,
                         reader * buffers + buffer)
    moved = graph.reads.ids.astype(np.int64)
    moved[at] = copy[of_copy]
    names = [f"{graph.buffer_names[b]}, received" for b in copied] if graph.buffer_names else []
    if graph.storages:
        # copies of one message share a storage where the originals do, since launches look at it as one array
        source = graph.buffer_storage[copied].astype(np.int64)
        pairs, of_pair = np.unique(of * len(graph.storages) + source, return_inverse=True)
        storage = len(graph.storages) + of_pair
        specs = [replace(graph.storages[s], name=f"{graph.storages[s].name}, received")
                 for s in (pairs % len(graph.storages)).tolist()]
        moves: list[dict[int, int]] = [{}]
        move = np.zeros(len(graph), np.int64)
        taken: dict[int, set[int]] = {}
        for t, c in zip(reader.tolist(), of_copy.tolist(), strict=True):
            if not move[t]:
                move[t] = len(moves)
                moves.append({})
            taken.setdefault(t, set()).add(int(copied[c]))
            if moves[move[t]].setdefault(int(source[c]), int(storage[c])) != storage[c]:
                raise _in_parts(graph, t, int(copied[c]))
        for t, buffers_there in taken.items():
            for b in {*graph.reads[t].tolist(), *graph.writes[t].tolist()} - buffers_there:
                if int(graph.buffer_storage[b]) in moves[move[t]]:
                    raise _in_parts(graph, t, b)
    else:
        storage, specs, moves, move = copy, [], [{}], np.zeros(len(graph), np.int64)
    grown = graph.with_buffers(copied, storage, names, storages=specs)
    messages = Messages(message // ranks, message % ranks, of, copied, copy)
    return grown.remap(moved, graph.writes.ids, moves, move), messages


def _in_parts(graph: TaskGraph, task: int, buffer: int) -> GraphError:
    name = graph.storages[int(graph.buffer_storage[buffer])].name
    return GraphError(f"task {graph.name(task)} needs parts of {name} that are made on several "
                      f"ranks; cut the stages elsewhere")


def add_communication(graph: TaskGraph, schedule: Schedule) -> tuple[TaskGraph, Schedule]:
    """The graph and schedule with a send and a receive for every result that another rank reads.

    A message holds all that one task hands to one rank: `2SF0>1` on the sender's lane `send->1` reads it, `2RF0>1` on
    the receiver's lane `recv<-0` writes the copies that the readers there read from then on. A result that several
    ranks read goes to each in a message of its own. Raises GraphError for results that no F, O or B made.
    """
    rank = ranks_of(graph, schedule)
    own, messages = received(graph, rank)
    k, sender = len(messages), messages.sender
    if not k:
        return graph, schedule
    stray = ~(np.isin(graph.kind, SENDABLE) | sums(graph))[sender]
    if stray.any():
        raise GraphError(f"the result of {graph.name(int(sender[np.argmax(stray)]))} is read on another rank; only "
                         f"those of F, O and B can be sent")
    size = np.bincount(messages.of, graph.buffer_bytes[messages.copied], k).astype(np.int64)
    made = unpack(graph.keys[sender])
    send, receive = (pack(made.unit, np.where(made.kind == Kind.F, *kinds), made.micro_batch, destination=messages.to,
                          late=made.late, iteration=made.iteration) for kinds in (SENDS, RECEIVES))
    travel, arrive = (Rows.from_pairs(messages.of, buffers, k) for buffers in (messages.copied, messages.copy))
    both = np.repeat(np.arange(k), 2)  # each send, then its receive
    talking = own.insert(
        sender[both], np.stack([send, receive], axis=1).ravel(),
        travel.followed_by(arrive).take(both + np.tile([0, k], k)), arrive.take(both), size[both])
    return talking, _with_lanes(graph, schedule, send, receive, rank, messages)


def _with_lanes(graph: TaskGraph, schedule: Schedule, send: Ints, receive: Ints, rank: Ints,
                messages: Messages) -> Schedule:
    """The schedule with lanes `send->peer` and `recv<-peer`, in the order in which the messages are made. `send`,
    `receive`: the keys of each message."""
    place = np.empty(len(graph), np.int64)
    place[schedule.ids(graph)] = np.arange(len(graph))
    made = np.argsort(place[messages.sender], kind="stable")
    source, to, send, receive = rank[messages.sender[made]], messages.to[made], send[made], receive[made]
    lanes: dict[Lane, Ints] = {}
    for a, b in sorted(set(zip(source.tolist(), to.tolist(), strict=True))):
        here = (source == a) & (to == b)
        lanes |= {Lane(a, f"send->{b}"): send[here], Lane(b, f"recv<-{a}"): receive[here]}
    return schedule.with_lanes(lanes)


def swap(schedule: Schedule, a: str, b: str) -> Schedule:
    """The schedule with tasks `a` and `b` in each other's place, say two receives; prove it before use."""
    keys = schedule.keys.copy()
    at = [np.flatnonzero(keys == parse_task(name)) for name in (a, b)]
    for name, found in zip((a, b), at, strict=True):
        if not found.size:
            raise ScheduleError(f"cannot swap {name}: the schedule has no such task")
    keys[at[0]], keys[at[1]] = keys[at[1]][0], keys[at[0]][0]
    return replace(schedule, keys=keys, slots=None)


def count_waits(graph: TaskGraph, schedule: Schedule) -> int:
    """How many event waits the plan has with its messages (`Schedule.waits` of what `add_communication` makes), without
    making them: one for each send, and one for each receive that no later one of its lane was awaited before."""
    rank = ranks_of(graph, schedule)
    reader, _, writer = crossing(graph, rank)
    if not len(reader):
        return 0
    place = np.empty(len(graph), np.int64)
    place[schedule.ids(graph)] = np.arange(len(graph))
    ranks = int(rank.max()) + 1
    sends = len(np.unique(writer * ranks + rank[reader]))
    link = rank[writer] * ranks + rank[reader]
    order = np.lexsort((-place[writer], place[reader], link))  # of one reader's messages the last is awaited
    made, first = place[writer][order], np.append(True, np.diff(link[order]) > 0)
    so_far = np.maximum.accumulate(made + link[order] * len(graph))  # links apart
    awaited = first | np.append(True, so_far[1:] > so_far[:-1])
    return sends + int(awaited.sum())


def check_messages(graph: TaskGraph, schedule: Schedule, exempt: Any = None) -> None:
    """Proves that messages can carry all that crosses ranks, each of which has a memory of its own.

    A rank reads results of another only if they can be sent: those of F, O and B and sums, or where messages are tasks
    those of sends. No two ranks write one buffer, and none writes what another holds from before the step. `exempt`:
    buffers that this is not asked of. Raises ScheduleError.
    """
    rank = ranks_of(graph, schedule)
    if not len(rank) or rank.min() == rank.max():
        return
    sends = np.isin(graph.kind, SENDS)
    sendable = sends if sends.any() else np.isin(graph.kind, SENDABLE) | sums(graph)
    size = len(graph.buffer_bytes)
    none = np.full(size, -1, np.int64)
    found, *_ = run_loop(_unsendable, len(graph.reads.ids) + len(graph.writes.ids), graph.reads.ptr, graph.reads.ids,
                         graph.writes.ptr, graph.writes.ids, rank, sendable, np.isin(graph.kind, RECEIVES),
                         np.zeros(size, bool) if exempt is None else exempt, none, none.copy(), none.copy())
    fault, first, second, buffer = found
    if fault:
        a, b = graph.name(first), graph.name(second)
        what = graph.buffer(buffer).name
        said = {1: f"{b} on rank {rank[second]} reads {what} of {a} on rank {rank[first]}, and no message can carry "
                   f"it: only what {'sends' if sends.any() else 'F, O and B'} make travels between ranks",
                2: f"{a} on rank {rank[first]} and {b} on rank {rank[second]} write {what}, but each "
                   f"rank has a memory of its own",
                3: f"{b} changes {what} on rank {rank[second]}, and {a} on rank {rank[first]} reads a "
                   f"copy that stays as it was"}
        raise schedule.error(said[fault], [int(graph.keys[first]), int(graph.keys[second])])


def _unsendable(read_ptr, reads, write_ptr, writes, rank, sendable, receives, exempt,  # type: ignore[no-untyped-def]
                writer, early, other):
    """(fault or 0, the task before, the task after, the buffer). `writer[b]`: who wrote b last. `early[b]` and
    `other[b]`: who read it, on two ranks, before anybody wrote it."""
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


def ranks_of(graph: TaskGraph, schedule: Schedule) -> Ints:
    """The rank of each task."""
    rank = np.empty(len(graph), np.int64)
    rank[schedule.ids(graph)] = np.array([lane.rank for lane in schedule.lanes])[schedule.lane_of_each()]
    return rank


def crossing(graph: TaskGraph, rank: Ints) -> tuple[Ints, Ints, Ints]:
    """Every read of what another rank's task wrote, as (reader, buffer, writer)."""
    n = len(graph)
    reader, buffer = graph.reads.row_of_each().astype(np.int64), graph.reads.ids.astype(np.int64)
    written = np.sort(graph.writes.ids.astype(np.int64) * n + graph.writes.row_of_each())
    at = np.maximum(np.searchsorted(written, buffer * n + reader) - 1, 0)
    last = written[at] if len(written) else np.full(len(reader), -1)
    writer = np.where((last // n == buffer) & (last % n < reader), last % n, -1)
    across = (writer >= 0) & (rank[writer] != rank[reader])
    return reader[across], buffer[across], writer[across]
