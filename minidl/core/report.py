"""A timeline as text: usage of each lane, causes of waits, kernel families, critical path and longest tasks; and the
comparison of two timelines.

Every figure is computed from the records, in the same way for measured and predicted ones. This module draws nothing
and writes no file.
"""

from __future__ import annotations

import math
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .columns import Content, Floats, Ints, spread
from .tasks import COMMUNICATION, WORDS, Kind, What, pack, task_name, unpack, widths

if TYPE_CHECKING:
    from .schedule import Lane
    from .timeline import Timeline

UNITS = {"ns": 1e-3, "us": 1.0, "ms": 1e3, "s": 1e6}  #: known units in microseconds; any other has no known length
WIDTH = 100
_LANE = 16  #: the width at which names of lanes are wrapped
_CAUSE = 60  #: the same of causes
_PATH = 4  #: the most lines of the critical path, whose middle is left out
_LANES = 40  #: the most lanes in the text; `summary` has all
_KINDS = [kind.name for kind in Kind]


@dataclass(frozen=True)
class Usage:
    """How one lane spent the makespan: `busy + wait + transfer + gap + idle`.

    `gap`: time before tasks that could have run already (in a measured run, their launch); `gaps`: how many. `idle`:
    time after the lane's last task.
    """

    lane: Lane
    tasks: int
    busy: float
    wait: float
    transfer: float
    gap: float
    gaps: int
    longest_gap: float
    idle: float


@dataclass(frozen=True)
class Family:
    """The work of one kernel family: in how many tasks, its time, flops and bytes, and the least time for them on the
    device, or None if the device's rates are not known."""

    family: str
    tasks: int
    time: float
    flops: float
    bytes: float
    floor: float | None


@dataclass(frozen=True)
class CriticalPath(Content):
    """The chain of tasks that makes the run as long as it is.

    `records`: its tasks, first to last. `time`: kind of task, or `transfer` or `gap` between tasks -> time; the sum is
    the makespan.
    """

    records: Ints
    time: dict[str, float]


def usage(timeline: Timeline) -> tuple[Usage, ...]:
    """How each lane spent its time."""
    t = timeline
    first, free, _ = t.actions
    at = t.tasks[first]
    busy, found = np.maximum(0.0, t.end[at] - np.maximum(free, t.start[at])), []
    took, stop, least = _took(t), t.begin + t.makespan, 1e-9 * t.makespan
    for i, lane in enumerate(t.lanes):
        here, mine = t.lane == i, t.lane[at] == i
        gaps = _gaps(t, np.flatnonzero(here & (t.what != What.TASK)), at[mine], free[mine])
        gaps = gaps[gaps > least]
        last = t.end[at[mine]].max(initial=t.begin)
        found.append(Usage(
            lane, int((here & (t.what == What.TASK)).sum()), float(busy[mine].sum()),
            float(took[here & (t.what == What.WAIT)].sum()), float(took[here & (t.what == What.TRANSFER)].sum()),
            float(gaps.sum()), len(gaps), float(gaps.max(initial=0.0)), float(stop - last)))
    return tuple(found)


def _took(t: Timeline) -> Floats:
    """The time of each record since the first task began: a lane may wait before."""
    return np.maximum(0.0, t.end - np.maximum(t.start, t.begin))


def _gaps(t: Timeline, still: Ints, at: Ints, free: Floats) -> Floats:
    """The time before each action of a lane (first record `at`) that no wait or transfer (records `still`) fills."""
    gaps = np.maximum(0.0, t.start[at] - free)
    if len(still) and len(at):
        action = np.minimum(np.searchsorted(t.start[at], t.start[still], side="right"), len(at) - 1)
        filled = np.minimum(t.end[still], t.start[at][action]) - np.maximum(t.start[still], free[action])
        np.subtract.at(gaps, action, np.maximum(0.0, filled))
    return gaps


def critical_path(timeline: Timeline) -> CriticalPath:
    """Follows from the last task back to the one for which each task waited last: on its lane, or across an edge."""
    t = timeline
    tasks = t.tasks
    if not len(tasks):
        return CriticalPath(tasks, {})
    first, free, size = t.actions
    action = spread(tasks, np.repeat(np.arange(len(first)), size), len(t), -1)
    producer, arrivals = t.last_arrival
    time = dict.fromkeys([*_KINDS, "transfer", "gap"], 0.0)
    way, seen = list[int](), set[int]()
    at = int(tasks[np.argmax(t.end[tasks])])
    upto = float(t.end[at])  # the time after this is accounted for
    while True:
        a = int(action[at])
        seen.add(a)
        members = tasks[first[a] : first[a] + size[a]]
        way += members[::-1].tolist()
        start = min(float(t.start[at]), upto)
        for member in members.tolist():
            time[_KINDS[unpack(int(t.key[member])).kind]] += (upto - start) / len(members)
        source, arrival = int(producer[at]), float(min(arrivals[at], start))
        if a > 0 and t.lane[tasks[first[a - 1]]] == t.lane[at] and (source < 0 or free[a] >= arrival):
            source, arrival = int(tasks[first[a - 1]]), float(min(free[a], start))
        if source < 0 or int(action[source]) in seen:  # a repeated action: only where the clocks of two ranks disagree
            time["gap"] += start - t.begin
            break
        upto = min(float(t.end[source]), arrival)
        time["gap"] += start - arrival
        time["gap" if t.lanes[t.lane[source]].rank == t.lanes[t.lane[at]].rank else "transfer"] += arrival - upto
        at = source
    return CriticalPath(np.array(way[::-1], np.int64), {what: spent for what, spent in time.items() if spent > 0})


def causes(timeline: Timeline) -> dict[str, float]:
    """Why lanes that compute stood still -> time, all of them together, longest first: for which kind of task of
    another lane or rank they waited, data on their way, gaps before tasks that could have run, and the time after a
    lane's last task. The sum is all that `usage` does not call busy."""
    t, found, took = timeline, defaultdict[str, float](float), _took(timeline)
    (producer, _), rank = t.last_arrival, t.rank_of_each
    works = _computing(t)
    task_of = dict(zip(zip(t.key[t.tasks].tolist(), t.lane[t.tasks].tolist(), strict=True), t.tasks.tolist(),
                       strict=True))

    def word(record: int) -> str:
        return WORDS[Kind(int(unpack(t.key[record]).kind))]

    for record in np.flatnonzero((t.what != What.TASK) & works[t.lane]).tolist():
        source = int(producer[task_of.get((int(t.key[record]), int(t.lane[record])), record)])
        cause = "a task that the trace does not name" if source < 0 else word(source)
        if source >= 0 and t.lane[source] != t.lane[record]:
            cause += " on another " + ("lane" if rank[source] == rank[record] else "rank")
        found[f"data on their way: {cause}" if t.what[record] == What.TRANSFER else cause] += float(took[record])
    lanes = [u for u, computes in zip(usage(t), works.tolist(), strict=True) if computes]
    found["a gap: the task could have run"] = sum(u.gap for u in lanes)
    if len(t.tasks):
        last = int(t.tasks[np.argmax(t.end[t.tasks])])
        found[f"no task is left; the last to end is the {word(last)}"] = sum(u.idle for u in lanes)
    return dict(sorted(((cause, time) for cause, time in found.items() if time > 0), key=lambda x: -x[1]))


def _computing(t: Timeline) -> NDArray[np.bool_]:
    """Mask of the lanes with tasks that compute; all of them if none does."""
    mask = spread(t.lane[t.tasks[~np.isin(unpack(t.key[t.tasks]).kind, COMMUNICATION)]], True, len(t.lanes))
    return mask if mask.any() else ~mask


def families(timeline: Timeline) -> list[Family]:
    """The time of tasks by kernel family, longest first; empty if the timeline does not know its tasks' work."""
    t, work = timeline, timeline.work
    if work is None:
        return []
    at, row = work.rows_of(t.key[t.tasks])
    family, number = work.family[row], len(work.families)
    scale = 1 / UNITS[t.unit] if work.floor is not None and t.unit in UNITS else None
    count, time, flops, size, floor = (np.bincount(family, each, number) for each in (
        None, t.durations[t.tasks][at] * work.share[row], work.flops[row], work.bytes[row],
        None if work.floor is None else work.floor[row]))
    return [Family(work.families[f], int(count[f]), float(time[f]), float(flops[f]), float(size[f]),
                   None if scale is None else float(floor[f]) * scale)
            for f in np.argsort(-time, kind="stable").tolist() if count[f]]


def kinds(timeline: Timeline) -> dict[str, float]:
    """Time per kind of task, all lanes together."""
    kind = unpack(timeline.key[timeline.tasks]).kind
    total = np.bincount(kind, timeline.durations[timeline.tasks], len(_KINDS))
    return {_KINDS[k]: float(total[k]) for k in np.unique(kind)}


def longest(timeline: Timeline, count: int = 8) -> list[dict[str, Any]]:
    """The units and kinds that took the most time, over all micro-batches and iterations, longest first."""
    own, took = unpack(timeline.key[timeline.tasks]), timeline.durations[timeline.tasks]
    group, which = np.unique(pack(own.unit, own.kind), return_inverse=True)
    total, number = np.bincount(which, took), np.bincount(which)
    most = spread(which, took, len(group), by=np.maximum)
    found = []
    for g in np.argsort(-total, kind="stable")[:count].tolist():
        unit, kind = unpack(int(group[g])).unit, unpack(int(group[g])).kind
        found.append({"label": labelled(timeline.labels, f"{unit}{_KINDS[kind]}", unit), "tasks": int(number[g]),
                      "total": float(total[g]), "mean": float(total[g] / number[g]), "longest": float(most[g])})
    return found


def summary(timeline: Timeline) -> dict[str, Any]:
    """The content of `report` as plain data; times in the timeline's unit."""
    path = critical_path(timeline)
    lanes = [{"rank": u.lane.rank, **asdict(u), "lane": u.lane.name} for u in usage(timeline)]
    return {"predicted": timeline.predicted, "unit": timeline.unit, "makespan": timeline.makespan,
            "tasks": len(timeline.tasks), "peak_bytes": timeline.peak_bytes, "lanes": lanes,
            "kinds": kinds(timeline), "families": [asdict(f) for f in families(timeline)],
            "causes": causes(timeline), "longest": longest(timeline),
            "critical_path": {"tasks": [timeline.name(r) for r in path.records.tolist()], "time": path.time}}


def title(timeline: Timeline) -> str:
    """Makespan, number of tasks and lanes, how many tasks are in parts, and peak memory on one line."""
    t = timeline.in_unit(readable_unit(timeline))
    makespan = f"makespan {_number(t.makespan)(t.makespan)} {t.unit}".rstrip()
    parts = [f"{'predicted' if t.predicted else 'measured'}: {makespan}", count_of(len(t.tasks), "task"),
             count_of(len(t.lanes), "lane")]
    if parted := widths(t.key[t.tasks]):
        parts.append(f"{count_of(len(parted), 'task')} in up to {max(parted.values())} parts")
    return ", ".join(parts if t.peak_bytes is None else [*parts, f"peak {_bytes(t.peak_bytes)}"])


def report(timeline: Timeline, width: int = WIDTH) -> str:
    """The usage of each lane, the critical path and the longest tasks, as text wrapped at `width` columns."""
    t = timeline.in_unit(readable_unit(timeline))
    whole, number = t.makespan, _number(t.makespan)
    lines = [title(t)]
    if not len(t.tasks):
        return lines[0]
    lanes, top = usage(t), longest(t)
    gap_number = _number(max(u.longest_gap for u in lanes))

    def row(name: Any, some: Sequence[Usage]) -> list[Any]:
        busy, wait, transfer, gap, idle = (sum(getattr(u, x) for u in some)
                                           for x in ("busy", "wait", "transfer", "gap", "idle"))
        return [name, sum(u.tasks for u in some), number(busy), _share(busy, whole * len(some)),
                number(wait), number(transfer), number(gap), sum(u.gaps for u in some),
                gap_number(max(u.longest_gap for u in some)), number(idle)]

    rows = [row(u.lane, [u]) for u in lanes[:_LANES]] + ([row("all", lanes)] if len(lanes) > 1 else [])
    head = ["lane", "tasks", "busy", "", "wait", "transfer", "gap", "gaps", "longest", "idle"]
    lines += ["", *_table(head, rows, _LANE)]
    if len(lanes) > _LANES:
        lines.append(f"and {count_of(len(lanes) - _LANES, 'lane')} more")
    if still := causes(t):
        whole_of_all = whole * int(_computing(t).sum())
        rows = [[cause, number(time), _share(time, whole_of_all)] for cause, time in still.items()]
        lines += ["", *_table(["lanes that compute waited for", "time", ""], rows, _CAUSE)]
    if of := families(t):
        rows = [[f.family, f.tasks, number(f.time), _share(f.time, sum(x.time for x in of)),
                 *(["", ""] if f.floor is None else [number(f.floor), _share(f.floor, f.time)])] for f in of]
        lines += ["", *_table(["kernel family", "tasks", "time", "", "floor", "of its time"], rows)]
    path = critical_path(t)
    parts = [f"{what} {_share(spent, whole)}" for what, spent in path.time.items()]
    wrapped = textwrap.wrap(" ".join(t.name(r) for r in path.records.tolist()), width - 2)
    if len(wrapped) > _PATH:
        wrapped[_PATH // 2 : -_PATH // 2] = ["…"]
    lines += ["", *textwrap.wrap(f"critical path: {count_of(len(path.records), 'task')}, {', '.join(parts)}", width),
              *("  " + line for line in wrapped)]
    task_number = _number(max(x["longest"] for x in top))
    rows = [[x["label"], x["tasks"], number(x["total"]), _share(x["total"], sum(kinds(t).values())),
             task_number(x["mean"]), task_number(x["longest"])] for x in top]
    lines += ["", *_table(["longest tasks", "tasks", "total", "", "mean", "longest"], rows)]
    return "\n".join(lines)


def compare(predicted: Timeline, measured: Timeline) -> str:
    """Two timelines side by side: lanes, kinds, the error of the makespan (of the first, relative to the second) and
    the tasks that differ most. Raises ValueError if their units cannot be compared."""
    unit = readable_unit(measured)
    p, m = predicted.in_unit(unit), measured.in_unit(unit)
    number = _number(max(p.makespan, m.makespan))
    names = ["predicted" if p.predicted else "measured", "predicted" if m.predicted else "measured"]
    names = names if names[0] != names[1] else ["first", "second"]
    lines = [f"makespan: {names[0]} {number(p.makespan)}, {names[1]} {number(m.makespan)}{unit and ' ' + unit}, "
             f"error {_error(p.makespan, m.makespan)}"]

    def pair(one: float | None, other: float | None) -> list[str]:
        both = [number(x) if x is not None else "-" for x in (one, other)]
        return [*both, _error(one, other) if one is not None and other is not None else "-"]

    short = [name[:9] for name in names]
    left, right = ({u.lane: (u.busy, u.wait + u.transfer, u.gap + u.idle) for u in usage(t)} for t in (p, m))
    missing = (None, None, None)
    rows: list[Sequence[Any]] = [["lane", *short, "error", *short, *short]]
    for lane in list(dict.fromkeys([*left, *right]))[:_LANES]:
        busy, waiting, idle = map(pair, left.get(lane, missing), right.get(lane, missing))
        rows.append([lane, *busy, *waiting[:2], *idle[:2]])
    lines += ["", *_table(["", "busy", "", "", "waiting", "", "gaps, idle", ""], rows, _LANE)]
    for head, label, (one, other) in (
            ("time by kind", 40, (kinds(p), kinds(m))),
            ("time by kernel family", 40, ({f.family: f.time for f in families(t)} for t in (p, m))),
            ("lanes that compute waited for", _CAUSE, (causes(p), causes(m)))):
        if one or other:
            rows = [[name, *pair(one.get(name), other.get(name))] for name in dict.fromkeys([*one, *other])]
            lines += ["", *_table([head, *short, "error"], rows, label)]
    one_task, other_task = _by_key(p), _by_key(m)
    common = [key for key in one_task if key in other_task]
    worst = sorted(common, key=lambda key: -abs(one_task[key] - other_task[key]))[:8]
    number = _number(max((max(one_task[key], other_task[key]) for key in worst), default=0.0))
    lines += ["", *_table(["largest errors", *short, "error"],
                          [[labelled(m.labels, task_name(key), int(unpack(key).unit)),
                            *pair(one_task[key], other_task[key])] for key in worst])]
    for name, mine, theirs in ((names[0], one_task, other_task), (names[1], other_task, one_task)):
        if only := [key for key in mine if key not in theirs]:
            lines.append(f"only {name}: {count_of(len(only), 'task')}, the first {task_name(only[0])}")
    return "\n".join(lines)


def _by_key(t: Timeline) -> dict[int, float]:
    """Mean duration by task."""
    key, which = np.unique(t.key[t.tasks], return_inverse=True)
    mean = np.bincount(which, t.durations[t.tasks]) / np.bincount(which) if len(key) else np.empty(0)
    return dict(zip(key.tolist(), mean.tolist(), strict=True))


def labelled(labels: Sequence[str], name: str, unit: int) -> str:
    """A name, and the label of its unit if it has one: `4W0 layers.2`."""
    return f"{name} {labels[unit] if unit < len(labels) else ''}".rstrip()


# ---------------------------------------------------------------------------------------------------------------- text
def readable_unit(timeline: Timeline) -> str:
    """A unit in which the makespan has few digits before the decimal point."""
    if timeline.unit not in UNITS:
        return timeline.unit
    span = timeline.makespan * UNITS[timeline.unit]
    return "s" if span >= 1e7 else "ms" if span >= 1e4 else "us"


def _number(largest: float) -> Callable[[float], str]:
    """A function that formats numbers, with as many decimals as give the largest one four digits."""
    digits = 3 - math.floor(math.log10(largest)) if largest > 0 else 0
    return lambda x: f"{x:.{min(max(digits, 0), 12)}f}"


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "-"


def _error(one: float, other: float) -> str:
    share = round(one / other - 1, 3) if other else 0.0
    return "-" if not other else f"{share:+.1%}" if share else "0.0%"


def count_of(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _bytes(number: float) -> str:
    power = max(0, min(4, (int(number).bit_length() - 1) // 10))
    return f"{number / 1024**power:.{2 * (power > 0)}f} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]], label: int = 40) -> list[str]:
    """A table: the first column left-aligned, the others right-aligned, two spaces between. A text of the first column
    that is longer than `label` goes on in lines of its own."""
    cells = []
    for row in (head, *rows):
        parts = textwrap.wrap(str(row[0]).replace("/", "/ "), label) or [""]
        first, *more = (part.replace("/ ", "/") for part in parts)
        cells += [[first, *map(str, row[1:])], *([f"  {part}", *[""] * (len(row) - 1)] for part in more)]
    width = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join([row[0].ljust(width[0]), *(cell.rjust(w) for cell, w in zip(row[1:], width[1:], strict=True))])
            .rstrip() for row in cells]
