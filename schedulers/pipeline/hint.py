"""Plans whose order is a hint (`minidl.passes.hint`): the caps, the order at these caps, and the gaps that it keeps."""

from __future__ import annotations

import ast
import operator
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ...core.columns import grouped, spread
from ...core.machine import PlanError, shorten
from ...core.placement import Refused
from ...core.schedule import ScheduleError
from ...core.tasks import COLLECTIVE, COMMUNICATION, unpack
from ...passes.hint import CHAINED, Hint, Window, admissions, windows
from ...passes.messages import check_rendezvous
from ...passes.send_receive import talks
from ...plans.plan import PipelinePlan, Plan
from ...plans.ready import Picks
from ..saved import CAPS, ORDER
from .peaks import CapError
from .proof import prove

if TYPE_CHECKING:
    from ..registry import Scheduler

OPERATORS: dict[type, Any] = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
                              ast.FloorDiv: operator.floordiv}
ORDERS = ("fixed", "hint")
WORDS = "order=hint"


def check_hint(order: str, chosen: Scheduler) -> None:
    """Raises PlanError for an order that is neither fixed nor a hint, Refused for a policy without ranks."""
    if order not in ORDERS:
        raise PlanError(f"order is {shorten(order)}; it must be {' or '.join(ORDERS)}")
    if chosen.parallel == "none" or chosen.each:
        raise Refused(WORDS, f"{chosen.name} has no ranks whose tasks or sums could overtake each other",
                      "take a policy of a pipeline or of data-parallel ranks")


def with_cap(plan: PipelinePlan, order: str, cap: Any) -> PipelinePlan:
    """A proved plan with another cap, or whose order is a hint. `cap`: the most micro-batches that a rank keeps of each
    of its stages, by default as many as the order does: a number, or as in `2p-s`, with p ranks, m micro-batches and
    the rank s. At another cap the order is what ranks do with these costs if they run their first ready task. Raises
    Refused for plans that cannot have it, PlanError for a cap that is none."""
    _fits(plan)
    own = windows(plan.graph, plan.schedule)
    caps = own if cap is None else saved_caps(cap, own) if isinstance(cap, tuple) else {
        (rank, stage): min(number * plan.slices, plan.micro_batches) for (rank, stage) in own
        for number in [cap_of(cap, plan.placement.ranks, plan.micro_batches // plan.slices, rank)]}
    if caps != own:
        plan = _reordered(plan, caps, cap)
    if order == "fixed":
        return plan
    notes = {**plan.schedule.notes, ORDER: order, CAPS: " ".join(str(caps[where]) for where in sorted(caps))}
    plan = replace(plan, schedule=replace(plan.schedule, notes=notes))
    hint = Hint(caps, _gaps(Picks.of(replace(plan, hint=Hint(caps)))))
    most = [-(-max(cap for (rank, _), cap in caps.items() if rank == r) // plan.slices)
            for r in range(plan.placement.ranks)]
    said = (f"the order is a hint: each rank runs its first ready task and keeps at most {' '.join(map(str, most))} "
            f"micro-batches of a stage; no rank waits for ever, since every wait goes forward in an order without a "
            f"circle")
    plan = replace(plan, hint=hint, peaks=_peaks(plan, caps), remarks=(*plan.remarks, said),
                   notes={**plan.notes, "order": {"order": order, "cap": most}})
    if not plan.synthetic:
        return plan.divided()
    graph, schedule = plan.with_messages  # their waits must have no circle
    schedule.validate(graph)
    check_rendezvous(graph, schedule)
    return plan


def saved_caps(told: tuple[int, ...], own: Window) -> dict[tuple[int, int], int]:
    """The caps that a file has, by rank and stage. Raises ScheduleError if the order does not keep them."""
    if len(told) != len(own) or any(cap < own[where] for where, cap in zip(sorted(own), told, strict=True)):
        raise ScheduleError(f"the plan's {CAPS!r} is {' '.join(map(str, told))[:40]!r}; this order needs "
                            f"{' '.join(str(own[where]) for where in sorted(own))[:40]}, or more of each")
    return dict(zip(sorted(own), told, strict=True))


def with_chosen_sums(plan: Plan) -> Plan:
    """A plan of ranks that are all alike, which choose together which of their sums is next: the first one of the order
    that is ready on all ranks. Raises Refused for sums between other tasks."""
    own, lane = unpack(plan.schedule.keys), plan.schedule.lane_of_each()
    sums = np.isin(own.kind, COLLECTIVE)
    if np.isin(lane[sums], lane[~sums]).any():
        raise Refused(WORDS, f"{plan.scheduler}: ranks start sums between their tasks, all in one order",
                      "take a policy whose sums have a lane of their own")
    said = "the order of sums is a hint: of those that are ready on all ranks, the first one is next"
    return replace(plan, chosen_sums=bool(sums.any()), remarks=(*plan.remarks, said))


def cap_of(cap: Any, ranks: int, micro_batches: int, rank: int) -> int:
    """The cap of a rank. Raises PlanError for one that is no number, or below 1."""
    def value(node: ast.AST) -> int:
        match node:
            case ast.Expression(body=body):
                return value(body)
            case ast.Constant(value=int(number)) if not isinstance(number, bool):
                return number
            case ast.Name(id=name) if name in known:
                return known[name]
            case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
                return int(OPERATORS[type(op)](value(left), value(right)))
        raise ValueError

    known = {"p": ranks, "m": micro_batches, "s": rank}
    try:
        text = re.sub(r"(\d)\s*([pms(])", r"\1*\2", str(cap)) if len(str(cap)) <= 40 else ""
        found = value(ast.parse(text.strip(), mode="eval"))
    except (ValueError, SyntaxError, ZeroDivisionError, RecursionError):
        raise PlanError(f"cap={shorten(cap)} is no number of micro-batches; give one as in cap=4 or cap=2p-s, with p "
                        f"ranks, m micro-batches and the rank s") from None
    if found < 1:
        raise PlanError(f"cap={shorten(cap)} is {found} on rank {rank}; a rank keeps at least 1 micro-batch")
    return found


def _fits(plan: PipelinePlan) -> None:
    """Raises Refused for a plan whose order is more than an order."""
    own = unpack(plan.schedule.keys)
    lane = plan.schedule.lane_of_each()
    inline = np.isin(own.kind, COMMUNICATION) & np.isin(lane, np.unique(lane[~np.isin(own.kind, COMMUNICATION)]))
    for bad, why, cure in (
            (plan.stale, "its order says which weights tasks read", "take a policy that drains after each step"),
            (plan.placement.apart, "other ranks keep what a forward has made: no cap holds", "take another policy"),
            (plan.schedule.joined is not None, "it runs pairs of tasks as one action", "take another policy"),
            (bool((own.part[np.isin(own.kind, CHAINED)] > 0).any()), "its tasks are in parts", "leave --split out"),
            (bool(inline.any()), "ranks start sums between their tasks, all in one order", "leave --shard out"),
            (bool(own.late.any()), "some of its tasks run in the next step", "take another policy"),
            (talks(plan.schedule), "its messages have their place in its order", "leave them out of the file")):
        if bad:
            raise Refused(WORDS, f"{plan.scheduler}: {why}", cure)


def _reordered(plan: PipelinePlan, caps: Window, cap: Any) -> PipelinePlan:
    """The plan as ranks run their first ready task under these caps. Raises PlanError if the caps leave none."""
    free, schedule = Picks.of(plan), plan.schedule
    played = free.play(kept=False, more=admissions(free.graph, schedule, caps))
    if played.done < len(free.graph):
        raise PlanError(f"{plan.scheduler}: with cap={shorten(cap)} ranks would wait for each other for ever; "
                        f"take a larger cap")
    ran = spread(played.order, np.arange(len(free.graph)), len(free.graph))[free.graph.find(schedule.keys)]
    keys = schedule.keys[np.lexsort((ran, schedule.lane_of_each()))]
    return prove(replace(plan, schedule=replace(schedule, keys=keys, slots=None)))


def _gaps(each: Picks) -> tuple[tuple[int, int], ...]:
    """Pairs of keys: by these costs a rank waits for the first task and then runs it, although the second one could run
    before. If the second waits for it, ranks do with these costs just what the order says."""
    keys, end = each.graph.keys.tolist(), each.play(kept=True).end
    start, small = end - each.clock.duration, 1e-9 * float(each.clock.duration.max(initial=0.0))
    ready = each.ready(end)
    chain = spread(each.schedule.ids(each.graph), each.schedule.lane_of_each(), len(keys)).tolist()
    after = dict[int, int]()
    for order in (order.tolist() for order in each.orders if len(order)):
        if each.graph.kind[order[0]] in COMMUNICATION:
            continue
        rest, free = grouped((chain[t], t) for t in reversed(order)), 0.0
        for task in order:
            rest[chain[task]].pop()
            if start[task] > free + small:
                heads = [own[-1] for own in rest.values() if own]
                after |= {t: task for t in heads if ready[t] < start[task] - small}
            free = end[task]
    return tuple((keys[task], keys[t]) for t, task in after.items())


def _peaks(plan: PipelinePlan, caps: Window) -> tuple[float, ...]:
    """The most activations that each rank can hold. Raises CapError above the machine's cap."""
    found = [sum(cap for (rank, _), cap in caps.items() if rank == r) * plan.placement.share / plan.slices
             for r in range(plan.placement.ranks)]
    if plan.cap is not None and max(found) > plan.cap + 1e-9:
        raise CapError(f"as a hint the order may hold {max(found):g} activations on rank {int(np.argmax(found))}; the "
                       f"cap is {plan.cap:.15g}; give a smaller --scheduler-arg cap")
    return tuple(found)
