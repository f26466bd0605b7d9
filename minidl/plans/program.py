"""A program: one rank's work, as data. `lower` makes it from a graph and a schedule; the runtime runs it.

It has the parts of a loop (`minidl.passes.boundary`), each with its graph, its lanes, the waits between them and its
memory plan. A program knows no device and no transport.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..core.columns import Columns, Content, Ints, Rows, column, spread
from ..core.graph import Launch, Role, TaskGraph, View, check_kinds
from ..core.schedule import Lane, RankGrid, Schedule, ScheduleError
from ..core.tasks import COLLECTIVE, COMMUNICATION, MESSAGES, RECEIVES, SENDS, Kind, repack, task_name, unpack
from ..passes.boundary import Loop, loop
from ..passes.hint import joined
from ..passes.messages import check_collectives, check_rendezvous
from ..passes.rewrite import unroll
from ..passes.send_receive import meetings
from .memory import MemoryLimitError, MemoryPlan, plan_memory


@dataclass(frozen=True)
class Part(Columns):
    """One part of a program: tasks on lanes. Its schedule has been validated."""

    graph: TaskGraph
    schedule: Schedule

    @column
    def ids(self) -> Ints:
        """The task of each entry of the schedule."""
        return self.schedule.ids(self.graph)

    def with_live(self, live: Mapping[int, Any], samples: int = 0) -> Part:
        """The part on the data of other objects (`TaskGraph.with_live`), with the same waits and memory plan."""
        found = Part(self.graph.with_live(live, samples), self.schedule)
        vars(found).update({name: value for name, value in vars(self).items() if name != "graph"})
        return found

    def lane_tasks(self, lane: int) -> list[int]:
        """The tasks of a lane in order."""
        return self.ids[self.schedule.ptr[lane] : self.schedule.ptr[lane + 1]].tolist()

    @column
    def waits(self) -> Ints:
        """Pairs (waiting task, awaited task) between lanes: the fewest that keep every edge."""
        return self.schedule.waits(self.graph)

    @column
    def memory(self) -> MemoryPlan:
        return plan_memory(self.graph, self.schedule)

    @property
    def joined(self) -> list[Lane]:
        """Of each lane the one that has its tasks in a fixed order."""
        return joined(self.schedule)

    def as_json(self) -> dict[str, Any]:
        """Lanes with their tasks in order, waits as pairs (waiting, awaited), and where each storage
        lies in the arena."""
        graph, schedule, memory = self.graph, self.schedule, self.memory
        return {"lanes": {str(lane): schedule.names(i) for i, lane in enumerate(schedule.lanes)},
                "waits": [[graph.name(waiting), graph.name(awaited)] for waiting, awaited in self.waits],
                "memory": {"arena_bytes": memory.arena_bytes, "persistent_bytes": memory.persistent_bytes,
                           "storages": [{"name": spec.name, "bytes": spec.bytes, "offset": int(memory.offset[i])}
                                        for i, spec in enumerate(graph.storages) if memory.offset[i] >= 0]}}

    @column
    def communicates(self) -> tuple[bool, ...]:
        """For each lane, whether all its tasks are communication."""
        talks = np.isin(self.graph.kind, COMMUNICATION)
        return tuple(bool(len(tasks) and talks[tasks].all())
                     for tasks in map(self.lane_tasks, range(len(self.schedule.lanes))))


@dataclass(frozen=True)
class Program(Content):
    """One rank's part of a plan. `prologue`, `body` and `epilogue` have one part for each parity, as `loop` has.

    `group`: the ranks that sum gradients with this one, itself among them. `takes`: which of a step's inputs this rank
    reads (None: all). `runs_on`: whether communication may go on after a step's call has returned; its buffers then
    outlive the step, and late tasks wait for it. `boundary_waits`: pairs of keys (late task, communication task of the
    step before). `polls`: whether the lane that computes also moves the sums, between its tasks, as ranks of one
    core each do: a thread would push the lane off its core. `hint`: the keys of the tasks that compute, in the order of
    a hint; one thread then runs all lanes that compute, and takes the first task that is ready (`minidl.passes.hint`).
    `sums`: the keys of the sums over ranks in the order of a hint; ranks then choose the next one together.
    """

    rank: int
    ranks: int
    group: tuple[int, ...]
    loop: Loop
    prologue: tuple[Part, ...]
    body: tuple[Part, ...]
    epilogue: tuple[Part, ...]
    takes: tuple[int, ...] | None = None
    runs_on: bool = False
    boundary_waits: tuple[tuple[int, int], ...] = ()
    polls: bool = False
    hint: Ints | None = None
    sums: Ints | None = None

    def with_live(self, live: Mapping[int, Any], samples: int = 0) -> Program:
        """The program on the data of other objects (`TaskGraph.with_live`): for a rank that shares its plan with others
        of its process, but not their memory."""
        own = {id(part): part.with_live(live, samples) for part in (*self.prologue, *self.body, *self.epilogue)}
        found: dict[str, Any] = {name: tuple(own[id(part)] for part in getattr(self, name))
                                 for name in ("prologue", "body", "epilogue")}
        return replace(self, **found)

    @property
    def named(self) -> dict[str, Part]:
        """The parts, without those that differ from another only in which copies of double buffers they use."""
        late = {"prologue": self.prologue[0], "epilogue": self.epilogue[0]} if self.epilogue else {}
        return {"body": self.body[0], **late}

    @property
    def parts(self) -> Iterator[Part]:
        """The same, without their names."""
        return iter(self.named.values())

    @property
    def graph(self) -> TaskGraph:
        """The graph of the body."""
        return self.body[0].graph

    @property
    def schedule(self) -> Schedule:
        """The schedule of the body."""
        return self.body[0].schedule

    @property
    def collectives(self) -> tuple[int, ...]:
        """Keys of the body's collectives, in the order in which this rank starts them."""
        keys = self.schedule.keys
        return tuple(keys[np.isin(unpack(keys).kind, COLLECTIVE)].tolist())

    @property
    def peak_bytes(self) -> int:
        """Bytes of the arena, parameters, states and buffers that outlive a call, in the part that needs most. The
        transport's own buffers are not counted."""
        return max(part.memory.peak_bytes for part in self.parts)

    def as_json(self) -> dict[str, Any]:
        """Everything that the runtime gets, without the launches."""
        return {"rank": self.rank, "ranks": self.ranks, "group": list(self.group),
                "takes": self.takes and list(self.takes), "runs_on": self.runs_on, "peak_bytes": self.peak_bytes,
                "boundary_waits": [[task_name(late), task_name(transfer)] for late, transfer in self.boundary_waits],
                **{name: part.as_json() for name, part in self.named.items()}}

    def save(self, path: str | Path) -> None:
        """Writes JSON, whole or not at all."""
        from ..system.files import write_atomic

        write_atomic(path, json.dumps(self.as_json(), indent=1) + "\n")

    def __repr__(self) -> str:
        return f"<Program of rank {self.rank} of {self.ranks}: {len(self.graph)} tasks>"

    def __str__(self) -> str:
        title = (f"rank {self.rank} of {self.ranks}: {len(self.graph)} tasks, {len(self.body[0].waits)} waits, "
                 f"{self.peak_bytes:,} bytes")
        return "\n".join([title, *(f"{name}\n{self.named[name].schedule.grid()}"
                                   for name in ("prologue", "body", "epilogue") if name in self.named)])


@dataclass(frozen=True)
class Division(Columns):
    """A plan's tasks by rank, for one replica. It has been validated for all ranks, so that lowering one of them needs
    no other.

    `tasks`: of each rank, in order of emission. `sent`, `received`: the two tasks of each message; its number is its
    place here.
    """

    graph: TaskGraph
    schedule: Schedule
    grid: RankGrid
    tasks: Rows
    sent: Ints
    received: Ints

    @column
    def rank(self) -> Ints:
        """The rank of each task."""
        return spread(self.tasks.ids, self.tasks.row_of_each().astype(np.int64), len(self.graph))

    @column
    def messages(self) -> tuple[Ints, Ints]:
        """(the number of the message, the other end's rank) of each send and receive; -1 for all other tasks."""
        number, peer = np.full(len(self.graph), -1, np.int64), np.full(len(self.graph), -1, np.int64)
        number[self.sent] = number[self.received] = np.arange(len(self.sent))
        peer[self.sent], peer[self.received] = self.rank[self.received], self.rank[self.sent]
        return number, peer

    @property
    def overlapping(self) -> NDArray[np.bool_]:
        """Mask of the messages that are received in the step after the one in which they are sent."""
        return self.graph.late[self.received] & ~self.graph.late[self.sent]

    def program(self, rank: int) -> Program:
        """The program of rank `rank` of the job. Raises ScheduleError if one of its parts is wrong."""
        graph, schedule, takes = self.graph, self.schedule, None
        replica, place = self.grid.place(rank)
        if self.grid.ranks > 1:
            graph, schedule, takes = _part_of_rank(self, place, replica * self.grid.ranks)
        steps = loop(graph, schedule)
        body = tuple(Part(g, schedule.validate(g)) for g in steps.body)
        prologue: tuple[Part, ...] = body
        epilogue: tuple[Part, ...] = ()
        if steps.epilogue:
            prologue, epilogue = (tuple(Part(g, schedule.only(g).validate(g)) for g in graphs)
                                  for graphs in (steps.prologue, steps.epilogue))
        if waits := _boundary_waits(body[0], steps):  # communication may still run when the next step begins
            schedule.repeated(2).validate(_two_steps(graph, steps))
        return Program(rank, self.grid.size, self.grid.group(rank), steps, prologue, body, epilogue, takes,
                       waits is not None, waits or ())


def divide(graph: TaskGraph, schedule: Schedule, ranks: int = 1, chosen: bool = False) -> Division:
    """The division of a graph among `ranks` ranks. The schedule is one replica's: it has `ranks` ranks, or a number
    that divides it. `chosen`: as in `check_collectives`. Raises ScheduleError if it is wrong."""
    own = max(1, schedule.ranks)
    if ranks % own:
        raise ScheduleError(f"the schedule has {own} ranks; " + (
            f"this run has {ranks}" if ranks > 1 else
            "one device can run only one: the first argument of Lane (in a file the column rank) is the rank, and a "
            "second stream of rank 0 is Lane(0, 'side')"))
    grid = RankGrid(own, ranks // own)
    if ranks > 1 or np.isin(graph.kind, COLLECTIVE).any():
        check_collectives(graph, schedule, grid, chosen)
    none = np.empty(0, np.int64)
    if own == 1:
        return Division(graph, schedule, grid, Rows(np.array([0, len(graph)]), np.arange(len(graph))), none, none)
    schedule = schedule.validate(graph)
    check_rendezvous(graph, schedule)
    rank = schedule.rank_of_tasks(graph)
    _check_apart(graph, schedule, rank)
    return Division(graph, schedule, grid, Rows.from_pairs(rank, np.arange(len(graph)), own), *meetings(graph))


def lower(graph: TaskGraph, schedule: Schedule, *, ranks: int = 1, rank: int = 0) -> Program:
    """The program of rank `rank` among `ranks`. The schedule is one replica's: it has `ranks` ranks, or a number that
    divides it. Validates everything; raises ScheduleError if something is wrong."""
    check_kinds(graph=(graph, TaskGraph), schedule=(schedule, Schedule))
    return divide(graph, schedule, ranks).program(rank)


def check_limit(program: Program, limit: int | None) -> None:
    """Raises MemoryLimitError if the program needs more bytes than the limit."""
    if limit is not None and program.peak_bytes > limit:
        arena = max(part.memory.arena_bytes for part in program.parts)
        who = "the plan" if program.ranks == 1 else f"rank {program.rank}"
        raise MemoryLimitError(f"{who} needs {program.peak_bytes:,} bytes ({arena:,} in the arena, "
                               f"{program.peak_bytes - arena:,} for parameters, states and buffers that outlive a "
                               f"step), more than the limit of {limit:,}")


def _renumbered(keys: Ints, first: int) -> Ints:
    """The keys with the destinations of messages in a replica whose ranks are numbered from `first` on."""
    if not first:
        return keys
    own = unpack(keys)
    return repack(keys, destination=np.where(np.isin(own.kind, MESSAGES), own.destination + first, 0))


def _check_apart(graph: TaskGraph, schedule: Schedule, rank: Ints) -> None:
    """Raises ScheduleError if a task reads another rank's result without a message. `rank`: of each task."""
    sends, receives = np.isin(graph.kind, SENDS), np.isin(graph.kind, RECEIVES)
    source, target = graph.preds.ids, graph.preds.row_of_each()
    bare = (rank[source] != rank[target]) & ~(sends[source] & receives[target])
    for p, t in zip(source[bare].tolist(), target[bare].tolist(), strict=True):
        if {*graph.writes[p].tolist()} & {*graph.reads[t].tolist()}:
            raise schedule.error(f"{graph.name(t)} on rank {rank[t]} reads what {graph.name(p)} makes on rank "
                                 f"{rank[p]}, and no message carries it", [int(graph.keys[p]), int(graph.keys[t])])
    writer, maker = np.full(len(graph.buffer_bytes), -1, np.int64), graph.writes.row_of_each()
    writer[graph.writes.ids[~sends[maker]]] = rank[maker[~sends[maker]]]
    for rows in (graph.reads, graph.writes):
        task = rows.row_of_each()
        strange = (graph.persistent[rows.ids] & (writer[rows.ids] >= 0) & (writer[rows.ids] != rank[task])
                   & ~(sends[task] & (rows is graph.writes)))
        if strange.any():
            b, t = int(rows.ids[np.argmax(strange)]), int(task[np.argmax(strange)])
            raise schedule.error(f"{graph.name(t)} on rank {rank[t]} needs {graph.buffer(b).name}, which outlives a "
                                 f"step and is written on rank {writer[b]}; no message carries it",
                                 [int(graph.keys[t])])


def _part_of_rank(division: Division, rank: int, first: int) -> tuple[TaskGraph, Schedule, tuple[int, ...]]:
    """One rank's tasks, buffers and lanes, and which of the step's inputs they read. `rank`: within its replica, whose
    ranks are numbered from `first` on in the job.

    Sends and receives get launches of their own: the bytes that travel, the peer, and the message's number, which is
    the same on both ranks and of no other message in the job; `later` marks a send that is received in the next step.
    """
    graph, schedule, mine = division.graph, division.schedule, division.tasks[rank]
    numbers, peers = (column[mine] for column in division.messages)
    later = {*division.sent[division.overlapping].tolist()}
    own = graph.take(mine)
    own = replace(own, keys=_renumbered(own.keys, first))
    sends, receives = np.isin(own.kind, SENDS), np.isin(own.kind, RECEIVES)
    reads, writes = own.reads.where(~receives), own.writes.where(~sends)
    launches = list(own.launches)
    for i in np.flatnonzero(sends | receives).tolist() if launches else ():
        views = tuple(View(s, (graph.storages[s].bytes,), (1,), 0, "uint8") for s in dict.fromkeys(
            graph.buffer_storage[own.reads[i] if sends[i] else own.writes[i]].tolist()))
        constants: tuple[tuple[str, int], ...] = (("peer", int(peers[i]) + first),
                                                  ("message", int(numbers[i]) + len(division.sent) * first))
        if int(mine[i]) in later:
            constants += (("later", 1),)
        launches[i] = (Launch("send", views, (), constants=constants) if sends[i]
                       else Launch("receive", (), views, constants=constants),)
    made = {*graph.buffer_storage[writes.ids].tolist()}
    touched = made | {*graph.buffer_storage[reads.ids].tolist()}
    takes = tuple(i for i, v in enumerate(graph.inputs) if v.storage in touched)
    part = replace(own, reads=reads, writes=writes, launches=tuple(launches),
                   inputs=tuple(graph.inputs[i] for i in takes),
                   outputs=tuple(v for v in graph.outputs if v.storage in made)).compact()
    lanes = [i for i, lane in enumerate(schedule.lanes) if lane.rank == rank]
    orders = [_renumbered(schedule.order(i), first) for i in lanes]
    joined = (None if schedule.joined is None else np.concatenate(
        [schedule.second[schedule.ptr[i] : schedule.ptr[i + 1]] for i in lanes] or [np.empty(0, bool)]))
    names = [re.sub(r"(?<=->|<-)\d+$", lambda peer: str(int(peer[0]) + first), schedule.lanes[i].name) for i in lanes]
    return part, Schedule.of_keys([Lane(0, name) for name in names], orders, joined), takes


def _two_steps(graph: TaskGraph, steps: Loop) -> TaskGraph:
    """Two steps in a row, on the double buffers of the loop."""
    unrolled = unroll(graph, 2)
    doubled = np.isin(unrolled.buffer_storage, steps.doubled)
    return unrolled.with_copies(np.where(doubled[:, None], np.arange(2), 0), unrolled.iteration)[0]


def _boundary_waits(part: Part, steps: Loop) -> tuple[tuple[int, int], ...] | None:
    """The communication of the previous step for which each lane of a body must wait, each transfer once; None if
    communication must end with its step."""
    graph = part.graph
    lasting = {*steps.lasting,
               *(s for s, spec in enumerate(graph.storages) if spec.role.persistent and spec.role is not Role.SCALAR)}
    talks = [t for lane, talk in enumerate(part.communicates) if talk for t in part.lane_tasks(lane)]
    touched = graph.buffer_storage[graph.writes.take(np.array(talks, np.int64)).ids]
    if not talks or not set(touched.tolist()) <= lasting:
        return None
    place = {t: i for i, t in enumerate(talks)}
    writer = {b: t for t in talks for b in graph.writes[t].tolist()}
    waits: list[tuple[int, int]] = []
    awaited: set[int] = set()
    for lane, talk in enumerate(part.communicates):
        known: set[int] = set()
        for task in [] if talk else part.lane_tasks(lane):
            if graph.late[task]:
                found = {writer[b] for b in graph.reads[task].tolist() if b in writer} - known
                waits += [(int(graph.keys[task]), int(graph.keys[t])) for t in sorted(found, key=place.__getitem__)]
                known |= found
        awaited |= known
    # no other task has to wait for one that another communication task of the same step waits for
    within = {int(p) for t in talks for p in part.graph.preds[t] if part.graph.kind[p] >= Kind.A}
    return tuple(waits) if awaited == set(talks) - within else None
