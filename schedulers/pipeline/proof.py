"""The proof of pipeline plans: every task once and on its rank, messages for all data between ranks, no deadlock; caps,
limits and weight versions are kept, and peaks are counted.

Every plan goes through `prove`, a policy's or a user's. `read_plan` makes the plan of a given schedule, before its
proof, and finds out where its stages live. Both raise ScheduleError with the grid and the culprit marked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from ...core.columns import Ints, spread
from ...core.graph import Role, TaskGraph
from ...core.machine import Machine
from ...core.placement import PipelineError, Placement, Versions, bidirectional, check_numbers
from ...core.schedule import Schedule
from ...core.tasks import COMMUNICATION, COPIES, MESSAGES, RECEIVES, SUMS, GraphError, Kind, pack, task_name, unpack
from ...passes.backward import fused_in
from ...passes.boundary import Mask
from ...passes.draft import Draft
from ...passes.messages import check_rendezvous, overtaken, waits_in_circle
from ...passes.placed import moved
from ...passes.rewrite import fuse
from ...passes.send_receive import add_communication, check_messages, talks
from ...passes.synchronise import norms_apart, synchronise
from ...passes.versions import newest, updates
from ...plans.plan import PipelinePlan
from ..saved import AS_TORCH, part_bytes_in
from .peaks import COMPUTE, counted
from .problem import costs
from .slices import slices_in
from .stages import stage_graph


def prove(plan: PipelinePlan) -> PipelinePlan:
    """The proved plan, with its slots and peaks; it is free of deadlock with buffered and with rendezvous sends. Raises
    ScheduleError that names the culprit, and MemoryLimitError for a plan above the limit of bytes."""
    schedule, graph, placement = plan.schedule, plan.graph, plan.placement
    schedule.ids(graph)  # a task that the graph lacks has no rank
    _at_home(schedule, placement, plan.micro_batches)
    _one_lane(schedule)
    plan = replace(plan, schedule=schedule.validate(graph))
    check_messages(graph, schedule, None if placement.parts is None else graph.role_is(Role.PARAMETER))
    if talks(schedule):
        check_rendezvous(graph, schedule)
    if plan.versions is not None and placement.parts is None:  # with parts, the graph itself says which version is read
        _versions(plan)
    plan = counted(plan)
    if graph.launches:  # a recorded network, whose ranks run programs
        if (idle := np.setdiff1d(np.arange(placement.ranks), schedule.rank_of_each)).size:
            raise schedule.error(f"rank {idle[0]} has no task; give it a stage, or take fewer ranks")
        plan = plan.divided()
    return plan


def as_torch_does(schedule: Schedule, ranks: int, micro_batches: int, chunks: int | None, runs: bool
                  ) -> tuple[Schedule, tuple[str, ...]]:
    """A grid of torch's without its messages, which follow from the order, and remarks on it.

    Messages are proved as torch's runtime runs them: sends and receives are posted in the order of their rank and wait
    for nothing, tasks wait for what they receive. `runs`: a network runs in this order, so a stage's backward tasks are
    numbered as gradients are added. Other schedules are returned as they are. Raises ScheduleError.
    """
    if AS_TORCH not in schedule.notes.items():
        return schedule, ()
    message = np.isin(unpack(schedule.keys).kind, MESSAGES)
    order = replace(schedule.keep(~message), notes=schedule.notes)
    made, said = read_plan(order, Machine(ranks), micro_batches, chunks), list[str]()
    adds = descending(order)
    if adds.size:
        second, first = map(task_name, order.keys[adds[0]].tolist())
        said.append(f"the grid has {first} before {second}, but a network adds up its micro-batches in ascending "
                    f"order, as one process does: if one runs, backward tasks are numbered so")
    if message.any():
        graph, _ = add_communication(made.graph, order.validate(made.graph))
        schedule.once(graph)
        _one_lane(schedule)
        _at_home(schedule, made.placement, micro_batches)
        waits, circle = waits_in_circle(graph, schedule, posted=True)
        if circle:
            raise schedule.error(f"deadlock: {waits}", circle)
        waits, circle = waits_in_circle(graph, schedule)
        said.append(f"the grid's messages are free of deadlock if sends are buffered: yes; rendezvous: "
                    f"{f'no, {waits}' if circle else 'yes'}")
        if late := overtaken(graph, schedule):
            first, second = map(task_name, late)
            said.append(f"{first} is received before {second}, but sent after it: messages have numbers here, but not "
                        f"in torch, whose gradients are wrong then; for its runtime, make it without defer_pp_recv")
    if runs and adds.size:
        order = _ascending(order)
    return order, tuple(said)


def chunks_in(schedule: Schedule, ranks: int) -> int:
    """How many stages each rank seems to have, by the number of stages with forwards."""
    own = unpack(schedule.keys)
    return max(1, round((int(own.unit[own.kind == Kind.F].max(initial=0)) + 1) / ranks))


def stages_in(schedule: Schedule, ranks: int, micro_batches: int, chunks: int | None = None) -> Placement | int:
    """The number of stages of a schedule; or its placement, if its forwards go through the ranks in both directions."""
    own = unpack(schedule.keys)
    forward = np.flatnonzero(own.kind == Kind.F)
    unit, rank = own.unit[forward], schedule.rank_of_each[forward]
    if len(np.unique(unit * ranks + rank)) > len(np.unique(unit)) and unit.max() < ranks:
        both = bidirectional(ranks)
        if (both.home(schedule.keys[forward], micro_batches) == rank).all():
            return both
    return ranks * (chunks or chunks_in(schedule, ranks))


def read_plan(schedule: Schedule, machine: Machine, micro_batches: int, chunks: int | None = None,
              graph: TaskGraph | None = None, like: PipelinePlan | None = None, message_bytes: int | list[int] = 0
              ) -> PipelinePlan:
    """The plan of any schedule, not proved yet, for `ranks * chunks` stages (or `ranks`, if it is bidirectional).

    The forwards show where its stages live, and how many a rank has unless `chunks` is given. `graph`: the stages of a
    recorded network, O and W apart, whose replicas sum their gradients. If the schedule has communication tasks,
    they are compared with those that the compute order needs. `like`: a plan with the same placement and number of
    micro-batches, which says how activations count, which weight versions are read, and into what parts all-reduces are
    cut. `message_bytes`: on given times, as of `stage_graph`. Raises PipelineError for impossible numbers.
    """
    if chunks is not None and chunks < 1:
        raise PipelineError(f"the number of chunks is {chunks}; it must be at least 1")
    ranks, replicas = machine.ranks, machine.replicas
    asked, chunks = chunks, chunks or chunks_in(schedule, ranks)
    slices = like.slices if like is not None else 1 if graph is None else slices_in(graph)
    check_numbers(ranks * chunks, micro_batches, machine.activation_cap)
    if like is not None and like.placement.parts is not None:
        schedule.ids(like.graph)
        return replace(like, schedule=schedule, versions=_versions_of(schedule, like))
    micro_batches = micro_batches if like is None else like.micro_batches
    message = np.isin(unpack(schedule.keys).kind, COMMUNICATION)
    compute = schedule.keep(~message) if message.any() else schedule
    stale = like is not None and like.stale and like.graph.launches
    if graph is not None and replicas > 1 and not stale:
        graph = norms_apart(Draft.of(graph)).graph
    _once(compute, ranks, ranks * chunks, micro_batches, like.graph if like is not None and stale else graph)
    placement = (_placement(compute, ranks, micro_batches, chunks, asked, graph is None) if like is None
                 else like.placement)
    joint = fused_in(compute, placement.stages, micro_batches)
    if graph is None:
        _complete(compute, placement.stages, micro_batches)
        free = AS_TORCH in schedule.notes.items() and bool(descending(compute).size)
        graph = (stage_graph(placement.stages, micro_batches, joint, placement.directions, message_bytes, not free)
                 if like is None or like.slices == 1 else like.graph)
    elif like is not None and like.stale:
        graph = like.graph  # whose tasks read the versions
    else:
        try:
            graph, _ = fuse(graph, np.broadcast_to(joint, (placement.stages, micro_batches)))
        except GraphError as error:  # O and W cannot be one task in this network
            raise compute.error(str(error)) from None
    _adds_in_order(compute, graph)
    summing = schedule.keys[np.isin(unpack(schedule.keys).kind, SUMS)].tolist()
    if summing and replicas == 1:
        raise schedule.error(f"{task_name(summing[0])} sums over replicas of a network, but there is one; say how many "
                             f"there are (--replicas)", summing[:1])
    if talks(schedule):
        _at_home(compute, placement, micro_batches)
        check_messages(graph, compute.validate(graph))
    if replicas > 1 and not stale:  # whose graph has its sums
        graph = synchronise(graph, part_bytes=part_bytes_in(schedule))
    if talks(schedule):
        graph, _ = add_communication(graph, schedule.only(graph).validate(graph))
    plan = PipelinePlan("plan", graph, schedule, costs(placement, 1.0, 1.0, 1.0), machine.size,
                        placement=placement, micro_batches=micro_batches, slices=slices)
    if like is not None:
        plan = replace(plan, scheduler=like.scheduler, kept=like.kept, steady=like.steady,
                       versions=_versions_of(schedule, like))
    return plan


def _versions_of(schedule: Schedule, like: PipelinePlan) -> Versions | None:
    """The weight versions that the schedule reads, if each forward and backward reads the same as in the other plan."""
    if like.versions is None:
        return None
    works = np.isin(unpack(like.schedule.keys).kind, COMPUTE)
    theirs, own = unpack(like.schedule.keys[works]), unpack(schedule.keys)
    read = spread(((theirs.kind == Kind.F).astype(int), theirs.micro_batch, theirs.unit), like.versions.read[works],
                  (2, like.micro_batches, like.placement.stages))
    return replace(like.versions, read=read[(own.kind == Kind.F).astype(int), own.micro_batch % like.micro_batches,
                                            own.unit])


def _once(schedule: Schedule, ranks: int, stages: int, micro_batches: int, graph: TaskGraph | None) -> None:
    """Raises ScheduleError for a kind, rank or id out of range, a task that appears twice, or an unknown update."""
    own = unpack(schedule.keys)
    unit, kind, micro_batch = own.unit, own.kind, own.micro_batch
    rank = schedule.rank_of_each
    update = np.zeros(len(schedule), bool) if graph is None else (
        (np.isin(kind, (Kind.U, Kind.R)) | (own.late > 0)) & (graph.find(schedule.keys) >= 0))
    more = " without --model" if graph is None else ", and U as the network has them"
    apart = "count as such (--slices)" if graph is not None else "or mini-batches: check with the plan's --scheduler"
    beyond = f"is out of range: micro-batches are 0..{micro_batches - 1} (--micro-batches); slices {apart}"
    for bad, what in (
            ((kind == Kind.F) & (micro_batch >= micro_batches), beyond),
            (~update & (~np.isin(kind, COMPUTE) | (schedule.keys != pack(unit, kind, micro_batch))),
             f"does not belong here: the tasks of one iteration are F, O, W, B{more}, none late or in parts"),
            (rank >= ranks, f"is on a rank that does not exist: ranks are 0..{ranks - 1}"),
            (unit >= stages, f"is out of range: stages are 0..{stages - 1}"),
            (~update & (micro_batch >= micro_batches), beyond)):
        _refuse(schedule, bad, what)
    keys, count = np.unique(schedule.keys, return_counts=True)
    if (count > 1).any():
        key = int(keys[np.argmax(count > 1)])
        where = ", ".join(str(schedule.lanes[i]) for i in schedule.lane_of_each()[schedule.keys == key])
        counted = "; its weight gradient would count twice" if unpack(key).kind in (Kind.W, Kind.B) else ""
        raise schedule.error(f"task {task_name(key)} appears twice, on {where}{counted}", [key])


def _complete(schedule: Schedule, stages: int, micro_batches: int) -> None:
    """Raises ScheduleError unless each (stage, micro-batch) has one F, and one B or one O and one W."""
    own = unpack(schedule.keys)
    has = spread((own.kind, own.micro_batch, own.unit), True, (max(COMPUTE) + 1, micro_batches, stages), False)
    both = has[Kind.B] & (has[Kind.O] | has[Kind.W])
    if both.any():
        i, s = (int(x) for x in np.argwhere(both)[0])
        keys = [int(pack(s, k, i)) for k in (Kind.O, Kind.W) if has[k, i, s]]
        raise schedule.error(f"stage {s} has both {s}B{i} and {' and '.join(map(task_name, keys))} for micro-batch "
                             f"{i}; the weight gradient would count twice", [int(pack(s, Kind.B, i)), *keys])
    for needed, name in ((has[Kind.F], "F"), (has[Kind.B] | has[Kind.O], "O"), (has[Kind.B] | has[Kind.W], "W")):
        if not needed.all():
            i, s = (int(x) for x in np.argwhere(~needed)[0])
            near = [int(pack(s, k, i)) for k in COMPUTE if has[k, i, s]]
            either = "" if name == "F" else f" (or {s}B{i})"
            raise schedule.error(f"task {s}{name}{i}{either} is missing; each stage and micro-batch needs one F, "
                                 f"and one B or one O and one W", near)


def descending(schedule: Schedule) -> Ints:
    """The entries (n, 2) of weight gradients of a stage on one lane that follow each other by micro-batch, but not in
    the schedule: the first comes after the second. In a bidirectional pipeline each lane has a sum of its own."""
    adds: Ints = np.flatnonzero(np.isin(unpack(schedule.keys).kind, (Kind.W, Kind.B)))
    own, lane = unpack(schedule.keys[adds]), schedule.lane_of_each()[adds]
    adds, unit, lane = (column[np.lexsort((own.micro_batch, lane, own.unit))] for column in (adds, own.unit, lane))
    follows = (unit[:-1] == unit[1:]) & (lane[:-1] == lane[1:])
    return np.stack([adds[:-1], adds[1:]], axis=1)[follows & (adds[:-1] > adds[1:])]


def _ascending(order: Schedule) -> Schedule:
    """The order whose B of a stage are numbered in their order."""
    at, keys = np.flatnonzero(unpack(order.keys).kind == Kind.B), order.keys.copy()
    own = unpack(keys[at])
    keys[at[np.lexsort((at, own.unit))]] = own.key[np.lexsort((own.micro_batch, own.unit))]
    return replace(order, keys=keys, notes=moved(order.notes, dict(zip(own.key.tolist(), keys[at].tolist(),
                                                                       strict=True))))


def _adds_in_order(schedule: Schedule, graph: TaskGraph) -> None:
    """Raises ScheduleError if a stage adds weight gradients in another order of micro-batches than the graph does."""
    for before, after in schedule.keys[descending(schedule)].tolist():
        first, second = graph.find(np.array([before, after])).tolist()
        if min(first, second) >= 0 and first in graph.preds[second]:
            raise schedule.error(
                f"{task_name(after)} runs before {task_name(before)}, but a stage adds up the weight gradients of its "
                f"micro-batches in ascending order, so that every plan is bit-identical (torch's LoopedBFS adds "
                f"them in descending order); number the backward tasks of each stage in ascending order",
                [before, after])


def _placement(schedule: Schedule, ranks: int, micro_batches: int, chunks: int, asked: int | None,
               complete: bool) -> Placement:
    """The placement that the forwards show (for a stage without forwards, any of its tasks): one rank for each stage;
    or a bidirectional pipeline's, if `asked` is 2 or None. Raises ScheduleError if it is neither, or if `complete` is
    true and a stage has no tasks."""
    own = unpack(schedule.keys)
    unit, kind, rank = own.unit, own.kind, schedule.rank_of_each
    table = np.full(ranks * chunks, -1, np.int64)
    if not complete:
        table[:] = 0
        table[unit[::-1]] = rank[::-1]
    forward = kind == Kind.F
    table[unit[forward][::-1]] = rank[forward][::-1]
    if ranks > 1 and unit.max(initial=0) < ranks and (asked == 2 or (asked is None and (table[unit] != rank).any())):
        both = bidirectional(ranks)
        if (both.home(schedule.keys, micro_batches) == rank).all():
            return both
    missing = np.flatnonzero(table < 0)
    if missing.size:
        raise schedule.error(f"stage {missing[0]} has no forward; {ranks} ranks with {chunks} "
                             f"chunk{'s' * (chunks > 1)} each hold stages 0..{ranks * chunks - 1}")
    _same_rank(schedule, rank, table[unit])
    return Placement("given", ranks, table[None])


def _at_home(schedule: Schedule, placement: Placement, micro_batches: int) -> None:
    """Raises ScheduleError unless every task, sends included, is on the rank of its stage, and every receive on the
    rank to which its message goes."""
    rank = schedule.rank_of_each
    own = unpack(schedule.keys)
    receives = np.isin(own.kind, RECEIVES)
    _refuse(schedule, receives & (rank != own.destination), lambda entry: (
        f"is on rank {rank[entry]}, but its message goes to rank {own.destination[entry]}"))
    _same_rank(schedule, rank, np.where(receives, rank, placement.home(schedule.keys, micro_batches)))


def _one_lane(schedule: Schedule) -> None:
    """Raises ScheduleError if a rank computes on several lanes, other than parts of tasks beside the first parts, or a
    message is part of a pair."""
    message = np.isin(unpack(schedule.keys).kind, (*COMMUNICATION, *COPIES))
    _refuse(schedule, message & (schedule.second | np.append(schedule.second[1:], False)),
            "is part of a pair; only tasks that compute can run as one action")
    entry = np.flatnonzero(~message & (unpack(schedule.keys).part <= 1))
    seen: dict[int, int] = {}
    used, first = np.unique(schedule.lane_of_each()[entry], return_index=True)
    for lane, at in zip(used.tolist(), first.tolist(), strict=True):
        rank = schedule.lanes[lane].rank
        if seen.setdefault(rank, lane) != lane:
            raise schedule.error(f"rank {rank} computes on the lanes {schedule.lanes[seen[rank]].name} and "
                                 f"{schedule.lanes[lane].name}; a rank of a pipeline must compute on one lane",
                                 [int(schedule.keys[entry[at]])])


def _same_rank(schedule: Schedule, rank: Ints, home: Ints) -> None:
    _refuse(schedule, rank != home, lambda entry: (
        f"is on rank {rank[entry]}, but stage {unpack(schedule.keys[entry]).unit} lives on rank {home[entry]}; its "
        f"weights are there"))


def _refuse(schedule: Schedule, bad: Mask, why: str | Callable[[int], str]) -> None:
    """Raises ScheduleError about the first of these entries, and why."""
    if bad.any():
        entry = int(np.argmax(bad))
        key = int(schedule.keys[entry])
        raise schedule.error(f"task {task_name(key)} {why if isinstance(why, str) else why(entry)}", [key])


def _versions(plan: PipelinePlan) -> None:
    """Raises ScheduleError if a task reads a weight version that does not exist yet, or a backward reads another one
    than its forward. If no history is kept, every task must read the newest one. Versions are made by the updates of a
    recorded step, and by the weight gradients on given times; a recorded stage without them has none."""
    versions, schedule = plan.versions, plan.schedule
    assert versions is not None
    if len(versions.read) != len(schedule):
        raise schedule.error(f"{len(versions.read)} weight versions are given for {len(schedule)} tasks")
    own, graph = unpack(schedule.keys), plan.graph
    works, step = np.isin(own.kind, COMPUTE), plan.micro_batches // versions.every
    if graph.launches:
        made_by = graph.keys[updates(graph)]
        made = newest(schedule, np.isin(schedule.keys, made_by), step)
        works &= np.isin(own.unit, unpack(made_by).unit)  # a stage without parameters reads no version
    else:
        made = newest(schedule, (own.kind == Kind.W) | (own.kind == Kind.B), plan.micro_batches) // versions.every
    least = -step if graph.launches else 0  # a recorded step follows others
    read, bare = versions.read, versions.history in ("none", "predicted")
    _refuse(schedule, works & (read != made if bare else (read > made) | (read < least)), lambda entry: (
        f"reads weight version {read[entry]}, but then the newest one of stage {own.unit[entry]} is {made[entry]}"
        + (", and no other is kept" if bare else "")))
    if bare:
        return
    forward = works & (own.kind == Kind.F)
    before = spread((own.micro_batch[forward], own.unit[forward]), read[forward],
                    (plan.micro_batches, plan.placement.stages), -1)
    other = np.flatnonzero(works)[read[works] != before[own.micro_batch[works], own.unit[works]]]
    if other.size:
        e = int(other[0])
        first = int(pack(own.unit[e], Kind.F, own.micro_batch[e]))
        raise schedule.error(f"task {task_name(int(schedule.keys[e]))} reads weight version {read[e]}, but "
                             f"{task_name(first)} read version {before[own.micro_batch[e], own.unit[e]]}",
                             [int(schedule.keys[e]), first])
