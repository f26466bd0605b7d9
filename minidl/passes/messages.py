"""Messages and collectives between ranks as tasks of a schedule: the proofs that none waits for ever.

The message number that `minidl.plans.program` gives a send and its receive identifies them among all messages in flight
between the two ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

import numpy as np

from ..core.columns import Rows, prepared, run_lanes, spread
from ..core.graph import TaskGraph
from ..core.schedule import RankGrid, Schedule, ScheduleError
from ..core.tasks import COLLECTIVE, MESSAGES, RECEIVES, SENDS, task_name, unpack
from .rewrite import gradients
from .send_receive import meetings


def check_collectives(graph: TaskGraph, schedule: Schedule, grid: RankGrid, chosen: bool = False) -> None:
    """Proves for each pair of ranks that they start the collectives that both take part in in one order, and that
    replicas sum every gradient that they spend. Raises ScheduleError.

    All ranks of a group run the same lanes. So they agree where the schedule leaves them no choice: on one lane. A
    collective ends when the tasks before it have run in every replica; those have the same names everywhere, so a
    circle of waits over replicas would be one within each of them, which is what the other proofs look for. `chosen`:
    ranks choose together which of the sums that are ready on all of them is next. All run the same lanes, so what has
    run before a sum on one rank is about to run on the others, and some sum becomes ready on all.
    """
    at = np.flatnonzero(np.isin(unpack(schedule.keys).kind, COLLECTIVE))
    lane, rank = schedule.lane_of_each()[at], schedule.rank_of_each[at]
    for r in np.unique(rank).tolist() if not chosen else ():
        own, keys = lane[rank == r], schedule.keys[at[rank == r]]
        other = np.flatnonzero(own != own[0])
        if other.size:
            first, second, group = int(keys[0]), int(keys[other[0]]), grid.group(r)
            who = f"ranks {group[0]} and {group[1]}" if len(group) > 1 else "ranks"
            raise schedule.error(f"{task_name(first)} is on lane {schedule.lanes[own[0]]} and {task_name(second)} on "
                                 f"lane {schedule.lanes[own[other[0]]]}: {who} could start them in different orders; "
                                 f"put all collectives of a rank on one lane", [first, second])
    if grid.ranks > 1 and grid.replicas > 1:
        known = graph.writes.take(np.flatnonzero(np.isin(graph.kind, (*COLLECTIVE, *RECEIVES)))).ids
        for update, buffers in gradients(graph).items():
            if not np.isin(buffers, known).all():  # what is received is a norm's part, of what was summed
                raise schedule.error(f"{graph.name(update)} spends gradients of its own replica; {grid.replicas} "
                                     f"replicas must sum them before", [int(graph.keys[update])])


def check_same_order(orders: Sequence[Sequence[int]], grid: RankGrid) -> None:
    """Proves the same of the ranks of a job as they are: `orders[r]` has the collectives (by key) of rank r's program
    in their order. Raises ScheduleError with the first two tasks that two ranks start in different orders."""
    for rank, order in enumerate(orders):
        first = grid.group(rank)[0]
        for mine, theirs in zip_longest(order, orders[first]):
            if mine != theirs:
                said = [task_name(key) if key is not None else "nothing more" for key in (theirs, mine)]
                raise ScheduleError(f"rank {first} starts {said[0]} where rank {rank} starts {said[1]}, so they would "
                                    f"wait for each other for ever; ranks that hold the same stages need the same plan")


def check_rendezvous(graph: TaskGraph, schedule: Schedule) -> None:
    """Proves that each send has one receive, and that rendezvous sends, which end only when the receive is posted, do
    not deadlock. Raises ScheduleError."""
    waits, circle = waits_in_circle(graph, schedule)
    if circle:
        raise schedule.error("deadlock under rendezvous sends, where a send ends only when its receive is posted: "
                             + waits, circle)


def overtaken(graph: TaskGraph, schedule: Schedule) -> tuple[int, int] | None:
    """The keys of two receives of messages between the same two ranks, of which the first is received first and sent
    last; None if between any two ranks messages are received in the order in which they are sent."""
    (sent, got), place = meetings(graph), spread(ids := schedule.ids(graph), np.arange(len(ids)), len(graph))
    link = schedule.rank_of_tasks(graph)[sent] * schedule.ranks + schedule.rank_of_tasks(graph)[got]
    order = np.lexsort((place[got], link))
    late = np.flatnonzero((np.diff(link[order]) == 0) & (np.diff(place[sent][order]) < 0))
    return (int(graph.keys[got[order[late[0]]]]), int(graph.keys[got[order[late[0] + 1]]])) if late.size else None


def waits_in_circle(graph: TaskGraph, schedule: Schedule, posted: bool = False) -> tuple[str, list[int]]:
    """Tasks that wait for each other in a circle, in words and by key; none without one. Raises ScheduleError for a
    send without one receive.

    A rendezvous send and its receive are one event on two lanes, so lanes and edges must not form a circle through such
    events. `posted`, as in torch's runtime: both wait for nothing, and the receive's readers for the send. If a late
    receive takes the message of the iteration before, more iterations are looked at than there are ranks; a loop's
    first and last parts have some of the tasks of one. A rank begins an iteration when all its lanes have ended the one
    before.
    """
    sent, got = meetings(graph)
    met = np.bincount(np.concatenate([sent, got]), minlength=len(graph))
    alone = np.flatnonzero(np.isin(graph.kind, MESSAGES) & (met != 1))
    if alone.size:
        key = int(graph.keys[alone[0]])
        what, other = ("send", "receive") if graph.kind[alone[0]] in SENDS else ("receive", "send")
        raise schedule.error(f"{task_name(key)} is a {what} with {met[alone[0]]} {other}s; it must have "
                             f"exactly one", [key])
    ids, n = schedule.ids(graph), len(graph)
    later = graph.late[got].astype(np.int64) - graph.late[sent]  # in which iteration after its send a receive is
    turns = schedule.ranks + 2 if later.any() else 1
    turn = np.arange(turns)[:, None] * n
    event = np.arange(turns * n)
    for when in (0, 1):
        mine = (later == when) & (not posted)
        event[(turn[when:] + got[mine]).ravel()] = (turn[: turns - when] + sent[mine]).ravel()
    after = np.flatnonzero(spread(schedule.ptr[:-1][np.diff(schedule.ptr) > 0], False, n, True))
    source, target = graph.preds.ids.astype(np.int64), graph.preds.row_of_each().astype(np.int64)
    if posted:
        send = spread(got, sent, n, -1)
        waits, received = send[target] != source, send[source] >= 0
        source, target = (np.concatenate(pair) for pair in (
            (source[waits], send[source[received]]), (target[waits], target[received])))
    source, target = np.concatenate([source, ids[after - 1]]), np.concatenate([target, ids[after]])
    last, first = (ids[entries] for entries in schedule.turns)
    source = np.concatenate([(turn + source).ravel(), (turn[:-1] + last).ravel()])
    target = np.concatenate([(turn + target).ravel(), (turn[1:] + first).ravel()])
    source, target = event[source], event[target]
    real = source != target
    source, target = source[real], target[real]
    n *= turns
    preds, lanes, none = Rows.from_pairs(target, source, n), np.arange(n + 1), np.zeros(0)  # an event on each lane
    done, begin, *_ = run_lanes(*prepared(n, lanes, lanes[:n], np.zeros(n, np.int64), np.zeros(0, np.int32), preds.ptr,
                                          preds.ids, np.ones(n), none, none, np.zeros(n)))
    if done == n:
        return "", []
    at, way = int(np.argmax(begin < 0)), []
    while at not in way:
        way.append(at)
        at = next(int(q) for q in preds[at] if begin[q] < 0)
    circle = [int(graph.keys[t % len(graph)]) for t in way[way.index(at) :]]
    return " waits for ".join(map(task_name, [*circle, circle[0]])), circle
