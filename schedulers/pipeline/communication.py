"""Sends and receives as tasks, once it is known which rank runs what, and the proof that they cannot deadlock.

Every rank has one lane for each peer and direction. On both ends of a link the order is that in which the producer's
rank makes the messages, so the two always agree; receives wait on lanes of their own for nothing but their message, so
they are posted as early as can be.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ...graph import GraphError, Ints, Kind, Rows, TaskGraph, pack, task_name
from ...loops import run_loop
from ...schedule import Lane, Schedule, ScheduleError

RECEIVES = (Kind.RF, Kind.RO)


def add_communication(graph: TaskGraph, schedule: Schedule) -> tuple[TaskGraph, Schedule]:
    """The graph and schedule with a send and a receive for every result that another rank reads.

    A message holds all that one task hands to one rank: `2SF0` on the sender's lane `send->1` reads it, `3RF0` on the
    receiver's lane `recv<-0` writes the copies that the readers there read from then on. Raises GraphError for results
    that no F, O or B made, and where one task's result goes to two ranks or two results come to one task's stage at
    once: cut the stages elsewhere.
    """
    n = len(graph)
    rank = _rank_of_each(graph, schedule)
    reader, buffer, writer = _sources(graph)
    across = (writer >= 0) & (rank[np.maximum(writer, 0)] != rank[reader])
    if not across.any():
        return graph, schedule
    reader, buffer, writer = reader[across], buffer[across], writer[across]
    ranks = int(rank.max()) + 1
    message, of_read = np.unique(writer * ranks + rank[reader], return_inverse=True)
    sender, to = message // ranks, message % ranks
    stray = ~np.isin(graph.kind[sender], [Kind.F, Kind.O, Kind.B])
    if stray.any():
        raise GraphError(f"the result of {graph.name(int(sender[np.argmax(stray)]))} is read on another rank; only those "
                         f"of F, O and B can be sent")
    first_reader = np.full(len(message), n, np.int64)
    np.minimum.at(first_reader, of_read, reader)
    # copies: one buffer per message and buffer in it
    copies, of_copy = np.unique(of_read * len(graph.buffer_bytes) + buffer, return_inverse=True)
    copied, in_message = copies % len(graph.buffer_bytes), copies // len(graph.buffer_bytes)
    copy = len(graph.buffer_bytes) + np.arange(len(copies))
    size = np.bincount(in_message, graph.buffer_bytes[copied], len(message)).astype(np.int64)
    forward = graph.kind[sender] == Kind.F
    # rows: the graph's, its reads moved to the copies, then sends, then receives; put in order of emission
    rows = graph.reads.row_of_each().astype(np.int64)
    at = np.searchsorted(rows * len(graph.buffer_bytes) + graph.reads.ids, reader * len(graph.buffer_bytes) + buffer)
    moved = graph.reads.ids.copy()
    moved[at] = copy[of_copy]
    k = len(message)
    read_rows = np.concatenate([rows, n + in_message, n + k + in_message])
    reads = Rows.from_pairs(read_rows, np.concatenate([moved, copied, copy]), n + 2 * k)
    writes = Rows.from_pairs(np.concatenate([graph.writes.row_of_each(), n + in_message, n + k + in_message]),
                             np.concatenate([graph.writes.ids, copy, copy]), n + 2 * k)
    order = np.argsort(np.concatenate([np.arange(n) * 3, sender * 3 + 1, sender * 3 + 2]), kind="stable")

    def column(own: Ints, sends: Ints, receives: Ints) -> Ints:
        return np.concatenate([own, sends, receives])[order].astype(own.dtype)

    storages, storage, launches = _copied_storages(graph, copied, reader, of_copy)
    talking = replace(
        graph, unit=column(graph.unit, graph.unit[sender], graph.unit[first_reader]),
        kind=column(graph.kind, np.where(forward, Kind.SF, Kind.SO), np.where(forward, Kind.RF, Kind.RO)),
        micro_batch=column(graph.micro_batch, graph.micro_batch[sender], graph.micro_batch[sender]),
        iteration=column(graph.iteration, graph.iteration[sender], graph.iteration[sender]),
        flops=np.concatenate([graph.flops, np.zeros(2 * k)])[order], bytes=column(graph.bytes, size, size),
        reads=_permuted(reads, order), writes=_permuted(writes, order),
        buffer_bytes=np.concatenate([graph.buffer_bytes, graph.buffer_bytes[copied]]),
        buffer_role=np.concatenate([graph.buffer_role, graph.buffer_role[copied]]), buffer_storage=storage,
        buffer_names=graph.buffer_names + tuple(f"{graph.buffer_names[b]}, received" for b in copied)
        if graph.buffer_names else (),
        storages=storages, launches=tuple(launches[i] if i < n else () for i in order) if launches else ())
    try:
        talking.find(talking.keys[:1])
    except GraphError as error:
        raise GraphError(f"{error}: a stage's result goes to two ranks, or comes from two; cut the stages elsewhere") from None
    return talking, _with_lanes(graph, schedule, talking, rank, sender, to, first_reader, forward)


def _with_lanes(graph: TaskGraph, schedule: Schedule, talking: TaskGraph, rank: Ints, sender: Ints, to: Ints,
                reader: Ints, forward: Ints) -> Schedule:
    """The schedule with lanes `send->peer` and `recv<-peer`, in the order in which the messages are made."""
    place = np.empty(len(graph), np.int64)
    place[schedule.ids(graph)] = np.arange(len(graph))
    made = np.argsort(place[sender], kind="stable")
    sender, to, reader, forward = sender[made], to[made], reader[made], forward[made]
    send = pack(graph.unit[sender], np.where(forward, Kind.SF, Kind.SO), graph.micro_batch[sender],
                graph.iteration[sender])
    receive = pack(graph.unit[reader], np.where(forward, Kind.RF, Kind.RO), graph.micro_batch[sender],
                   graph.iteration[sender])
    source = rank[sender]
    lanes, keys = list(schedule.lanes), [schedule.order(i) for i in range(len(schedule.lanes))]
    for a, b in sorted(set(zip(source.tolist(), to.tolist(), strict=True))):
        here = (source == a) & (to == b)
        lanes += [Lane(a, f"send->{b}"), Lane(b, f"recv<-{a}")]
        keys += [send[here], receive[here]]
    joined = None
    if schedule.joined is not None:
        joined = np.concatenate([np.asarray(schedule.joined, bool), np.zeros(2 * len(sender), bool)])
    order = sorted(range(len(lanes)), key=lambda i: lanes[i].rank)  # stable: a rank's own lanes stay first
    ptr = np.concatenate([[0], np.cumsum([len(keys[i]) for i in order])])
    old = np.concatenate([[0], np.cumsum([len(k) for k in keys])])
    if joined is not None:
        joined = np.concatenate([joined[old[i] : old[i + 1]] for i in order])
    return Schedule(tuple(lanes[i] for i in order), ptr, np.concatenate([keys[i] for i in order]), joined)


def swap(schedule: Schedule, a: str, b: str) -> Schedule:
    """The schedule with tasks `a` and `b` in each other's place, say two receives; prove it before use."""
    from ...graph import parse_task

    keys = schedule.keys.copy()
    at = [np.flatnonzero(keys == parse_task(name)) for name in (a, b)]
    for name, found in zip((a, b), at, strict=True):
        if not found.size:
            raise ScheduleError(f"cannot swap {name}: the schedule has no such task")
    keys[at[0]], keys[at[1]] = keys[at[1]][0], keys[at[0]][0]
    return replace(schedule, keys=keys, slots=None)


def check_rendezvous(graph: TaskGraph, schedule: Schedule) -> None:
    """Proves that no send waits for ever where a send ends only once its receive is posted. Raises ScheduleError.

    A send and its receive then are one event on two lanes, so lanes and edges must have no circle through such events.
    """
    ids, n = schedule.ids(graph), len(graph)
    source, target = graph.preds.ids.astype(np.int64), graph.preds.row_of_each().astype(np.int64)
    event = np.arange(n)
    meets = np.isin(graph.kind[target], RECEIVES) & np.isin(graph.kind[source], (Kind.SF, Kind.SO))
    event[target[meets]] = source[meets]
    inner = np.ones(n, bool)
    inner[schedule.ptr[:-1][np.diff(schedule.ptr) > 0]] = False
    after = np.flatnonzero(inner)
    source, target = event[np.concatenate([source, ids[after - 1]])], event[np.concatenate([target, ids[after]])]
    real = source != target
    source, target = source[real], target[real]
    succs = Rows.from_pairs(source, target, n)
    done, *_, left, _ = run_loop(_drain, n, succs.ptr, succs.ids, np.bincount(target, minlength=n), np.zeros(n, np.int64))
    if done == n:
        return
    preds = Rows.from_pairs(target, source, n)
    at, way = int(np.argmax(left > 0)), []
    while at not in way:
        way.append(at)
        at = next(int(q) for q in preds[at] if left[q] > 0)
    circle = [int(graph.keys[t]) for t in way[way.index(at) :]]
    raise schedule.error("deadlock under rendezvous sends, where a send ends only when its receive is posted: "
                         + " waits for ".join(task_name(key) for key in [*circle, circle[0]]), circle)


def _drain(succ_ptr, succ_ids, missing, queue):  # type: ignore[no-untyped-def]
    """How many events can happen; `missing` keeps what the others wait for."""
    tail = 0
    for t in range(len(missing)):
        if missing[t] == 0:
            queue[tail] = t
            tail += 1
    head = 0
    while head < tail:
        t = queue[head]
        head += 1
        for i in range(succ_ptr[t], succ_ptr[t + 1]):
            s = succ_ids[i]
            missing[s] -= 1
            if missing[s] == 0:
                queue[tail] = s
                tail += 1
    return tail


def _rank_of_each(graph: TaskGraph, schedule: Schedule) -> Ints:
    rank = np.empty(len(graph), np.int64)
    rank[schedule.ids(graph)] = np.array([lane.rank for lane in schedule.lanes])[schedule.lane_of_each()]
    return rank


def _sources(graph: TaskGraph) -> tuple[Ints, Ints, Ints]:
    """Every read as (task, buffer, task that wrote what is read, or -1)."""
    n = len(graph)
    reader, buffer = graph.reads.row_of_each().astype(np.int64), graph.reads.ids.astype(np.int64)
    written = np.sort(graph.writes.ids.astype(np.int64) * n + graph.writes.row_of_each())
    at = np.searchsorted(written, buffer * n + reader) - 1
    last = written[np.maximum(at, 0)]
    return reader, buffer, np.where((at >= 0) & (last // n == buffer), last % n, -1)


def _permuted(rows: Rows, order: Ints) -> Rows:
    """Row i of the result is row `order[i]`."""
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    return Rows.from_pairs(place[rows.row_of_each()], rows.ids, len(order))


def _copied_storages(graph: TaskGraph, copied: Ints, reader: Ints, of_copy: Ints):  # type: ignore[no-untyped-def]
    """Storages, storage of each buffer and launches, with one storage per copy that its readers' launches use."""
    if not graph.storages:
        return (), np.arange(len(graph.buffer_bytes) + len(copied), dtype=np.int32), ()
    source = graph.buffer_storage[copied]
    storage = len(graph.storages) + np.arange(len(copied))
    moves: dict[int, dict[int, int]] = {}
    for t, c in zip(reader.tolist(), of_copy.tolist(), strict=True):
        moves.setdefault(t, {})[int(source[c])] = int(storage[c])
    launches = tuple(tuple(launch.moved(moves[t]) for launch in own) if t in moves else own
                     for t, own in enumerate(graph.launches))
    return (graph.storages + tuple(replace(graph.storages[s], name=f"{graph.storages[s].name}, received") for s in source),
            np.concatenate([graph.buffer_storage, storage]).astype(np.int32), launches)
