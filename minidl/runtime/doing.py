"""The lanes and transfers of a runtime at a moment. Another thread asks for them while a step runs; nothing is kept for
it but the stamps of compiled lanes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from time import perf_counter
from typing import Any

from ..core.columns import grouped
from ..core.graph import TaskGraph
from ..core.standstill import LAST, Doing, LaneState, Ran, Traffic, TransferState
from ..core.tasks import RECEIVES, SENDS, Kind, task_name
from .version_log import VersionRead

KEPT = 5  #: names of the last transfers of each kind


def progress(ready: Any) -> tuple[Any, ...]:
    """A value that changes with any progress of the part that runs; cheap."""
    if ready is None:
        return ()
    lanes = tuple(passed for passed, _ in ready.lanes.where()) if ready.watched else ()
    return ready.runs, lanes, ready.meetings.common.flight.counts if ready.meetings is not None else ()


def of(parts: Sequence[Any], ready: Any) -> Doing:
    """The state of the bound part `ready`, one of the bound `parts` of a program; None: nothing has run yet."""
    if ready is None:
        return Doing()
    graph, schedule, meetings = ready.part.graph, ready.part.schedule, ready.meetings
    begun, flying = _flight(ready)
    now, order, ran, ended = perf_counter(), dict[str, tuple[str, ...]](), list[Any](), set[int]()
    at = []  # each computing lane with its tasks and how many moments have passed
    for number, (passed, moments) in zip(ready.compute, ready.lanes.where(), strict=True) if ready.watched else ():
        name, tasks = str(schedule.lanes[number]), ready.part.lane_tasks(number)
        starts, ends = moments[1::3], moments[2::3]
        started = tasks[: (passed + 1) // 3]
        order[name] = tuple(map(graph.name, started))
        ended |= set(tasks[: passed // 3])
        begun |= set(started) & (meetings.transfers.keys() if meetings is not None else set())
        ran += [(*(float(times[i]) if i < len(times) else 0.0 for times in (starts, ends)), started[i], name)
                for i in range(max(0, len(started) - LAST), len(started))]
        at.append((name, tasks, passed, float(moments[-1]) if passed and len(moments) else None))
    for number, talks in enumerate(ready.part.communicates):
        if talks:
            found = [t for t in ready.part.lane_tasks(number) if t in begun]
            order[str(schedule.lanes[number])] = tuple(map(graph.name, found))
    ended = (ended | begun) - flying
    waits = grouped(ready.part.waits.tolist())
    lanes = []
    for name, tasks, passed, since in at:
        i, phase = divmod(passed, 3)
        state = "ended" if i == len(tasks) else ("between", "waits", "runs")[phase]
        task = tasks[i] if phase else -1
        sources = [] if state != "waits" else [
            *waits.get(task, ()), *(meetings.awaits(task) if meetings is not None else ())]
        lanes.append(LaneState(
            name, state, graph.name(task) if phase else "", graph[task].in_words if phase else "",
            None if since is None else round(now - since, 6),
            tuple(dict.fromkeys(graph.name(s) for s in sources if s not in ended)), i, len(tasks)))
    last = tuple(Ran(graph.name(t), lane, *(round(now - moment, 6) if moment else None for moment in (s, e)))
                 for s, e, t, lane in sorted(ran, key=lambda r: r[0])[-LAST:])
    transfers = tuple(_transfer(ready, t, t in flying) for t in _pending(ready, begun, flying))
    return Doing(sum(p.runs for p in parts), tuple(lanes), transfers, _traffic(parts, ready, begun - flying), last,
                 order)


def _flight(ready: Any) -> tuple[set[int], set[int]]:
    """The transfers of this part that have begun; and which of them are under way."""
    if ready.meetings is None:
        return set(), set()
    own = ready.meetings.transfers
    begun, flying = ({e.task for e in some if own.get(e.task) is e} for some in ready.meetings.common.flight.standing())
    return begun, flying


def _pending(ready: Any, begun: set[int], flying: set[int]) -> list[int]:
    """The transfers that are under way, then the next one of each lane."""
    lanes = ready.meetings.entries if ready.meetings is not None else ()
    following = [next((e.task for e in lane if e.task not in begun), None) for lane in lanes]
    return [*sorted(flying), *(t for t in following if t is not None)]


def _transfer(ready: Any, task: int, under_way: bool) -> TransferState:
    graph, entry = ready.part.graph, ready.meetings.transfers[task]
    message = dict(graph.launches[task][0].constants).get("message")
    return TransferState(graph.name(task), graph[task].in_words, tuple(map(int, entry.peers)),
                         None if message is None else int(message), int(graph.bytes[task]), under_way)


def _traffic(parts: Iterable[Any], ready: Any, ended: set[int]) -> tuple[Traffic, ...]:
    """All that has been moved since the run began: whole runs of each part, and what has ended in the present one."""
    found: dict[tuple[tuple[int, ...], str], list[Any]] = {}
    for part in parts:
        for task, entry in part.meetings.transfers.items() if part.meetings is not None else ():
            kind = part.part.graph.kind[task]
            what = ("sent" if kind in SENDS else "received" if kind in RECEIVES
                    else "exchanged" if kind == Kind.X else "summed")
            row = found.setdefault((tuple(map(int, entry.peers)), what), [0, 0, []])
            times = part.runs - (part is ready) + (part is ready and task in ended)
            row[0], row[1] = row[0] + times, row[1] + times * int(part.part.graph.bytes[task])
            if part is ready and task in ended:
                row[2].append(part.part.graph.name(task))
    return tuple(Traffic(*key, count, size, tuple(names[-KEPT:]))
                 for key, (count, size, names) in sorted(found.items()))


def of_gossip(graph: TaskGraph, step: int, task: int, source: int, log: Sequence[VersionRead],
              bytes_of: Mapping[int, int]) -> Doing:
    """The state of a rank that mixes layers: it is at `task`, or waits for the layer that the rank `source` sends after
    it. `bytes_of`: of a message with each layer."""
    order = tuple(task_name(e.key) for e in log if e.step == step and e.source < 0 and e.to < 0)
    moved = grouped((((peer,), kind), e) for e in log for peer, kind in ((e.to, "sent"), (e.source, "received"))
                    if peer >= 0)
    traffic = tuple(Traffic(*key, len(some), sum(bytes_of[e.stage] for e in some),
                            tuple(task_name(e.key) for e in some[-KEPT:])) for key, some in sorted(moved.items()))
    lanes = () if task < 0 else (LaneState("main", "runs" if source < 0 else "waits", graph.name(task),
                                           graph[task].in_words, None, (), len(order), 0),)
    last = tuple(Ran(name, "main", None, None) for name in order[-LAST:])
    return Doing(step + 1, lanes, (), traffic, last, {"main": order})
