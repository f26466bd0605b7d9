"""Facts that the CSV of a plan keeps beside the order: how its ranks sum gradients, how a network is cut in stages, and
which policy and options made it. With these an order can be proved and run again. They are the notes of the schedule.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from difflib import SequenceMatcher
from typing import Any, TypeVar

import numpy as np

from ..core.columns import Ints
from ..core.graph import TaskGraph
from ..core.machine import is_whole
from ..core.schedule import Schedule, ScheduleError
from ..core.tasks import COPIES, Kind, unpack, widths
from ..passes.choices import Choices
from ..passes.draft import Sums
from ..passes.experts import WHAT as EXPERTS
from ..passes.group import WHAT as WAITING
from ..passes.offload import EACH, Moves
from ..passes.shard import Shards
from ..passes.shares import WHAT

T = TypeVar("T")
POLICY = "scheduler"  #: of an order that says less than its policy: which weights it reads, where slices begin
OPTIONS = "options"  #: of that policy
OLDER = "older weights"  #: the policy that reads them, of an order on given times, which says nothing of them
DROPPED = "layers computed again"
AS_TORCH = ("runtime", "torch")  #: of a grid that has torch's messages, or adds up micro-batches in its order
AWAY = "offloaded"  #: of an order with copies: the moves
LAG = "lag"  #: how late weight gradients may run
GROUPS = "groups of weight gradients"  #: by their members, as in `4W0+7W0 9W0+12W0`
PAIRS = "pairs of tasks"  #: whether costs said how much tasks beside each other slow each other down
ORDER, CAPS = "order", "caps"  #: of an order that is a hint: the most micro-batches by rank and stage
STAGES = "options of stages"  #: of passes that give stages other tasks, or other messages
OF_STAGES = ("fill", "only_new")
CUT, PARTS, SUMS = "stage of each unit that computes", "part_bytes", "sums over ranks"


def notes_of(graph: TaskGraph, stage_of_unit: Ints, options: Mapping[str, Any]) -> dict[str, str]:
    """The notes of an order of these stages of a network, planned with these options."""
    notes = {CUT: " ".join(map(str, stage_of_unit[_computing(graph)].tolist()))}
    if own := {name: options[name] for name in OF_STAGES if options.get(name)}:
        notes[STAGES] = _text(own)
    return notes | {name: str(options[name]) for name in (PARTS, LAG) if options.get(name) is not None}


def policy_notes(name: str, options: Mapping[str, Any]) -> dict[str, str]:
    """The notes of an order that only its policy explains."""
    return {POLICY: name} | ({OPTIONS: _text(options)} if options else {})


def kind_of(schedule: Schedule, other: str = "none") -> str:
    """How training is spread over ranks by this order: "pipeline", "data" or, if its notes do not say, the `other`."""
    return "pipeline" if CUT in schedule.notes else "data" if SUMS in schedule.notes else other


def options_in(notes: Mapping[str, str]) -> dict[str, Any]:
    """The options of the policy under which the order was made. Raises ScheduleError."""
    return _read(notes, OPTIONS, dict, lambda found: True, "be an object in JSON")


def stages_in(notes: Mapping[str, str]) -> dict[str, Any]:
    """The options with which the stages of the order were made. Raises ScheduleError."""
    return _read(notes, STAGES, dict, lambda found: found.keys() <= {*OF_STAGES}, "have fill and only_new alone")


def sums_in(schedule: Schedule) -> Sums:
    """How ranks sum gradients; each alone if the order does not say. Raises ScheduleError."""
    return _read(schedule.notes, SUMS, Sums, lambda found: (
        isinstance(found.scatter, bool) and (found.part_bytes is None or is_whole(found.part_bytes))
        and all(is_whole(task, 0) for group in (() if found.groups is None else found.groups) for task in group)),
        "have lists of tasks as groups, part_bytes from 1 on, and scatter true or false")


def cut_in(schedule: Schedule, graph: TaskGraph) -> Ints | None:
    """The stage of each unit of the network for which the order was made; None if it does not say. Raises
    ScheduleError for the cut of another network."""
    if CUT not in schedule.notes:
        return None
    found = numbers(schedule, CUT)
    units = _computing(graph)
    if len(found) != len(units):
        under = schedule.notes.get(POLICY)
        raise ScheduleError(f"the plan's {CUT!r} has {len(found)} of them, but the network has {len(units)}; " + (
            f"give --scheduler {under[:40]}" if under else "is it of another network or number of micro-batches?"))
    every = np.arange(int(graph.unit.max(initial=-1)) + 1)  # others, such as an optimizer's, go with the one before
    return found[np.maximum(np.searchsorted(units, every, "right") - 1, 0)]


def choices_in(order: Schedule, choices: Choices, alone: bool) -> Choices:
    """These choices, and what an order shows or says besides. `alone`: its graph has all of its tasks, so it shares
    nothing out. Raises ScheduleError."""
    own, noted = unpack(order.keys), Shards.of(order.notes.get(WHAT, "0"))
    dropped = numbers(order, DROPPED) if DROPPED in order.notes else np.unique(own.unit[own.kind == Kind.R])
    shard = choices.shard if alone or choices.shard.level not in (0, noted.level) else noted
    late = {} if LAG not in order.notes else {LAG: _one(order, LAG, 0)}
    groups = {} if GROUPS not in order.notes else {WAITING: order.notes[GROUPS]}
    found = replace(choices, dropped=tuple(dropped.tolist()), parts=widths(order.keys), shard=shard,
                    experts_over=order.notes.get(EXPERTS, choices.experts_over),
                    options={**choices.options, **late, **groups})
    return hint_in(order, found)


def hint_in(order: Schedule, choices: Choices) -> Choices:
    """These choices; with the notes of an order that is a hint, its own as well. Raises ScheduleError."""
    if ORDER not in order.notes:
        return choices
    if order.notes[ORDER] != "hint" or CAPS not in order.notes:
        raise ScheduleError(f"the plan's {ORDER!r} is {order.notes[ORDER][:40]!r}; it must be hint, with {CAPS!r}")
    cap = tuple(numbers(order, CAPS).tolist()) if choices.cap is None else choices.cap
    return replace(choices, order="hint", cap=cap)


def without_copies(order: Schedule) -> Schedule:
    """The order without the copies of memory that leaves."""
    return replace(order.keep(~np.isin(unpack(order.keys).kind, COPIES)), notes=order.notes)


def moves_in(order: Schedule) -> Moves | None:
    """The memory that an order offloads, None for an order without copies. Raises ScheduleError."""
    if AWAY not in order.notes or not np.isin(unpack(order.keys).kind, COPIES).any():
        return None
    return _read(order.notes, AWAY, Moves, lambda found: found.what in EACH and min(found.window, found.most or 1) >= 0,
                 "say what, window and most")


def slips(order: Schedule) -> tuple[str, ...]:
    """A note on an order for older weights, and on each lane that may be a slip of the pen: its name resembles another
    one of the same rank, which has more than twice as many tasks. Names with other numbers do not count, such as
    `stage1` and `stage2`."""
    count = dict(zip(order.lanes, np.diff(order.ptr).tolist(), strict=True))
    plain = {lane: re.sub(r"\d+", "", lane.name) for lane in order.lanes}
    found = [(lane, [other for other in order.lanes if other.rank == lane.rank and plain[other] != plain[lane]
                     and count[other] > 2 * count[lane]
                     and SequenceMatcher(None, lane.name.lower(), other.name.lower()).ratio() >= 0.7])
             for lane in order.lanes]
    return tuple(f"lane {lane} has only {count[lane]} task{'s' * (count[lane] != 1)}, and its name is like "
                 f"{like[0]} with {count[like[0]]}: if it is a slip, correct it; else it is a stream of its own"
                 for lane, like in found if like) + tuple(
        f"{name} made this order, for older weights: `check --scheduler {name}` looks at them; else, and in all "
        f"prices, tasks read the newest" for what, name in order.notes.items() if what == OLDER)


def part_bytes_in(schedule: Schedule) -> int | None:
    """The most bytes of a part of an all-reduce; None if it is whole. Raises ScheduleError."""
    return _one(schedule, PARTS, 1) if PARTS in schedule.notes else None


def _one(schedule: Schedule, name: str, least: int) -> int:
    """The number of a note."""
    found = numbers(schedule, name)
    if len(found) != 1 or found[0] < least:
        raise ScheduleError(f"the plan's {name!r} is {schedule.notes[name][:40]!r}; "
                            f"it must be a number from {least} on")
    return int(found[0])


def _computing(graph: TaskGraph) -> Ints:
    """The units of a network that compute, ascending: whatever the optimizer, these are the same."""
    return np.unique(graph.unit[np.isin(graph.kind, (Kind.F, Kind.O, Kind.W, Kind.B))])


def _text(values: Mapping[str, Any]) -> str:
    return json.dumps(values, default=lambda value: value.item())  # of NumPy's numbers


def _read(notes: Mapping[str, str], name: str, kind: Callable[..., T], fits: Callable[[T], bool], must: str) -> T:
    """The value of this kind that a note has as an object in JSON, if it `fits`."""
    try:
        found = kind(**json.loads(notes.get(name, "{}")))
        if fits(found):
            return found
    except (ValueError, TypeError, RecursionError):
        pass
    raise ScheduleError(f"the plan's {name!r} is {notes[name][:40]!r}; it must {must}")


def numbers(schedule: Schedule, name: str) -> Ints:
    """The numbers of a note. Raises ScheduleError."""
    words = schedule.notes[name].split()
    wrong = next((word for word in words if not (word.isascii() and word.isdecimal() and len(word) < 16)), None)
    if wrong is not None:
        raise ScheduleError(f"the plan's {name!r} has {wrong[:40]!r}, which is not a number")
    return np.array(words, np.int64)
