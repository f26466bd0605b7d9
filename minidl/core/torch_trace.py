"""Traces of other profilers (Chrome's Trace Event format) as timelines: calls of host threads, kernels and copies of
streams.

A call within another call does not count. A kernel depends on the call that launched it (their `correlation`; all
kernels of a graph have the call that launched the graph) and on the one before it on its stream. A call that waits for
the device (`cudaStreamSynchronize`) is no task: the thread's next call waits for the last kernel that ended before.
The collectives of a process group are matched in their order over its ranks, or by time where some are missing: each
begins when the last rank has come, and is a wait before. JAX's traces have XLA's operations, and the outermost calls of
threads without any. In a trace of functions alone (VizTracer), each stretch in which one runs itself is a task. A unit
is a name, and a micro-batch the number of the name's call. Times are whole nanoseconds until the timeline has them.
"""

from __future__ import annotations

import re
import sys
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from decimal import Decimal, InvalidOperation
from itertools import accumulate, count
from pathlib import Path
from statistics import median_low
from typing import Any

from .columns import grouped
from .report import count_of
from .schedule import MOST_LANES, Lane
from .tasks import Kind, pack
from .timeline import Timeline
from .trace import content

CALLS = re.compile(r"cpu_op|\w+_(runtime|driver)|Operator|Runtime")  #: categories of calls; the last two of older torch
DEVICE, OLDER = ("kernel", "gpu_memcpy", "gpu_memset"), ("Kernel", "Memcpy", "Memset")
_TRACE = ("a trace in JSON (of minidl, PyTorch's profiler, JAX's (its NAME.trace.json.gz), VizTracer or another in the "
          "Trace Event format)")
_JAX_MOST = 1_000_000  #: of the events of a trace in JSON; JAX leaves later ones out without a word
MOST = 1 << 20  #: of one name's calls, and of names
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", re.ASCII)
_EMPTY: dict[str, Any] = {}
_ROUNDING = 2  #: nanoseconds by which a call may seem to end after the one that made it
_RANGE = re.compile(r"[\W_]*(forward|backward|optimizer)", re.IGNORECASE)  #: ranges that users and optimizers name
_KIND = {"forward": Kind.F, "backward": Kind.B, "optimizer": Kind.U}
_MESSAGE = re.compile("gloo:(send|recv)")  #: lasts until it has arrived, beyond the call that posts it on its thread
_TOGETHER = re.compile("all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|barrier", re.IGNORECASE)  #: end at once


@dataclass(slots=True, eq=False)
class _Slice:
    """An event with a begin and an end, in nanoseconds."""

    name: str
    category: str | None
    thread: tuple[str, str]  #: process, thread
    start: int
    end: int
    args: dict[str, Any]
    call: str  #: the number that a kernel shares with the call that launched it; empty if there is none
    file: int = 0
    rank: int = 0
    lane: str = ""
    kind: Kind = Kind.F

    @property
    def on_device(self) -> bool:
        return self.category in DEVICE or (self.category in OLDER and "correlation" in self.args)

    @property
    def works(self) -> bool:
        """It is an operation, and no range, function or mark."""
        return (self.on_device or CALLS.fullmatch(self.category or "") is not None or "hlo_op" in self.args
                or self.name.startswith("gloo:"))

    @property
    def waits(self) -> bool:
        """It is a call that waits for the device."""
        return "ynchronize" in self.name and not self.on_device


Edge = tuple[_Slice, _Slice, int]  # producer, consumer, when the result shows


def load_torch(paths: Sequence[str | Path], known: Sequence[str] = ()) -> Timeline:
    """The timeline of one trace, also of minidl, or of one from each rank. `meta["notes"]`: lines that say what was
    left out or moved, and what cannot be known. `known`: names that are units 0, 1, .., as of a timeline to compare
    with. Raises ValueError for files that are no such traces, OSError for those that cannot be read."""
    notes: list[str] = []
    read = [_read(path, notes) for path in paths]
    if None in read:
        if len(paths) == 1:
            return Timeline.load(paths[0])
        raise ValueError(f"{paths[read.index(None)]} is a trace of minidl, which has all its ranks; give it alone")
    files, names, ranks = zip(*(file for file in read if file is not None), strict=True)
    named = len(paths) > 1 and None not in ranks
    if len(paths) > 1 and not named:
        notes.append("not all files say their rank (distributedInfo), so their order does: the first is rank 0")
    for number, slices in enumerate(files):
        for s in slices:
            s.file, s.rank = number, (ranks[number] or 0) if named else number
    tasks = [list(_tasks(slices, name)) for slices, name in zip(files, names, strict=True)]
    if missing := [str(path) for path, found in zip(paths, tasks, strict=True) if not found]:
        raise ValueError("; ".join([f"{missing[0]} has no calls and no kernels", *notes, f"give {_TRACE}"]))
    every = [s for found in tasks for s in found]
    _check_lanes(paths, every)
    matches = list(_matches(every, notes))
    _align({s for slices in (*files, *tasks) for s in slices}, matches, notes)
    edges = [edge for slices, found in zip(files, tasks, strict=True) for edge in _launches(slices, found)]
    edges += _meet(every, matches)
    notes.append("B: what ran in backward, where output gradients, weight gradients and recomputation cannot be told "
                 "apart; U: in an optimizer; F: all else" if any(s.kind for s in every) else
                 "all tasks are F: no ranges of autograd or of an optimizer tell more")
    return _timeline(every, edges, notes, known)


# --------------------------------------------------------------------------------------------------------------- events
def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else _EMPTY


def _text(value: Any) -> str:
    """A name as one printable line."""
    text = str(value)[:200] if value is None or isinstance(value, str | int) else "?"
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)


def _called(event: dict[str, Any]) -> str:
    """An event's name, or its phase, time and thread, for notes."""
    if event.get("name") is not None:
        return _text(event["name"])[:40]
    return f"{event['ph']} at {_text(event.get('ts'))[:20]} on thread {_text(event.get('tid'))[:20]}"


def _thread(event: dict[str, Any]) -> tuple[str, str]:
    """The process of an event, and its thread or the messages of its thread."""
    more = " messages" if _MESSAGE.match(str(event.get("name"))) else ""
    return sys.intern(_text(event.get("pid"))), sys.intern(_text(event.get("tid")) + more)


def _exact(value: Any) -> Decimal | None:
    """A number, or its text; None for anything else."""
    if type(value) is int or (isinstance(value, str) and _NUMBER.fullmatch(value.strip())):
        with suppress(InvalidOperation):
            number = Decimal(value)
            return number if number.adjusted() < 19 else None
    return None


def _read(path: str | Path, notes: list[str]) -> tuple[list[_Slice], dict[tuple[str, ...], str], int | None] | None:
    """The slices of a file, by thread and begin, those that contain others first; the names of its processes and
    threads; and its rank, if it says one. None for a trace of minidl."""
    trace = content(path, _TRACE, parse_float=str)
    head = _dict(trace)
    if "minidl" in head:
        return None
    events = head.get("traceEvents") if head else trace
    events = [e for e in events if isinstance(e, dict)] if isinstance(events, list) else []
    began = _dict(head.get("viztracer_metadata")).get("baseTimeNanoseconds") or head.get("baseTimeNanoseconds") or 0
    if (number := _exact(began)) is None:
        raise ValueError(f"{path}: baseTimeNanoseconds: {str(began)[:40]!r} is not a number")
    base = int(number)
    lost, found, pairs = list[str](), list[_Slice](), defaultdict[tuple[str, str], list[dict[str, Any]]](list)
    for e in events:
        if e.get("ph") == "X" and e.get("cat") != "Trace":  # the time in which a profiler of PyTorch was on
            found += _slice(e, e.get("dur", 0), base, lost)
        elif e.get("ph") in ("B", "E"):
            pairs[_thread(e)].append(e)
    for both in pairs.values():
        found += [*_pairs(both, base, lost)][::-1]  # those that contain others first, also if all end together
    if _dict(head.get("viztracer_metadata")).get("overflow") is True or len(found) == _JAX_MOST:
        notes.append(f"{path}: it had more events than its profiler keeps; some are missing")
    if lost:
        notes.append(f"{path}: {count_of(len(lost), 'event')} without a valid time, end or duration "
                     f"{'are' if len(lost) > 1 else 'is'} left out, the first {lost[0]!r}")
    if early := sum(s.start < base for s in found):
        notes.append(f"{path}: {count_of(early, 'event')} with a negative time {'are' if early > 1 else 'is'} kept, "
                     "since only differences of times count")
    found.sort(key=lambda s: (s.thread, s.start, -s.end))
    callers = {(s.call, s.thread[0]) for s in found if s.call and s.works and not s.on_device}
    if len(callers) > len({call for call, _ in callers}):
        notes.append(f"{path}: several processes number their launches alike, as in a file that was merged from ranks, "
                     "so no call is known to launch a kernel or to wait for it; give one file of each rank")
        for s in found:
            s.call = ""
    names = {_thread(e)[:1 + (e["name"] == "thread_name")]: _text(_dict(e.get("args")).get("name"))
             for e in events if e.get("ph") == "M" and e.get("name") in ("process_name", "thread_name")}
    told = _dict(head.get("distributedInfo")).get("rank")
    rank = None if told is None else _exact(told)
    if told is not None and (rank is None or not 0 <= int(rank) < MOST_LANES):
        raise ValueError(f"{path}: rank {str(told)[:40]!r} is not one from 0 to {MOST_LANES - 1}")
    return found, names, None if rank is None else int(rank)


def _slice(e: dict[str, Any], until: Any, base: int, lost: list[str], *, absolute: bool = False) -> Iterator[_Slice]:
    """The event as a slice that lasts for `until`, or up to then (`absolute`). If its times cannot be, its name
    goes to `lost`."""
    begin, end = _exact(e.get("ts")), _exact(until)
    if not absolute and begin is not None and end is not None:
        end += begin
    if begin is None or end is None or end < begin:
        lost.append(_called(e))
    else:
        call = _dict(e.get("args")).get("correlation")
        yield _Slice(_text(e.get("name", "?")), e["cat"] if isinstance(e.get("cat"), str) else None, _thread(e),
                     base + round(begin * 1000), base + round(end * 1000), _dict(e.get("args")),
                     str(call) if isinstance(call, int | str) else "")


def _pairs(events: list[dict[str, Any]], base: int, lost: list[str]) -> Iterator[_Slice]:
    """The slices of a thread's B and E events: in the order of the file, or by time where that does not nest."""
    depths = [*accumulate(1 if e["ph"] == "B" else -1 for e in events)]
    if min(depths) < 0 or depths[-1]:
        events.sort(key=lambda e: _exact(e.get("ts")) or 0)
    stack, begun = list[dict[str, Any]](), Counter[str]()
    for e in events:
        name = _text(e.get("name"))
        if e["ph"] == "B":
            stack.append(e)
            begun[name] += 1
        elif not stack or ("name" in e and not begun[name]):
            lost.append(_called(e))
        else:
            while (own := _text((begin := stack.pop()).get("name"))) != name and "name" in e:
                begun[own] -= 1
                lost.append(_called(begin))
            begun[own] -= 1
            args = _dict(begin.get("args")) | _dict(e.get("args"))
            yield from _slice(begin | {"args": args}, e.get("ts"), base, lost, absolute=True)
    lost += map(_called, stack)


# ---------------------------------------------------------------------------------------------------------------- tasks
def _tasks(slices: list[_Slice], names: dict[tuple[str, ...], str]) -> Iterator[_Slice]:
    """The slices of one file that are tasks, with their lanes; all slices get their kinds."""
    threads = grouped((s.thread, s) for s in slices)
    streams = {thread[0] for thread in threads if names.get(thread, "").startswith("Stream")}
    work = any(s.works for s in slices)
    kernels, hosts = list[_Slice](), dict[tuple[str, str], list[_Slice]]()
    for thread, own in threads.items():
        _tell(own)
        device, name = names.get(thread[:1], ""), names.get(thread, "")
        if device.startswith("/device:"):  # of XLA, whose other lines repeat this one
            found = list(_outermost(own)) if name.startswith("Stream" if thread[0] in streams else "XLA Ops") else []
        elif work:
            kernels += (s for s in own if s.on_device)
            calls = [s for s in own if s.works and not s.on_device]
            found = list(_outermost(calls or (s for s in own if s.category is None and not s.name.startswith("$")
                                              and "step_num" not in s.args)))
        else:
            found = list(_alone(own))
        if found:
            hosts[thread] = found
    launch = {s.call: s.kind for s in slices if s.call and not s.on_device}
    for s in kernels:
        s.lane = f"device {s.thread[0]} stream {s.thread[1]}"
        s.kind = launch.get(s.call, Kind.F)
    yield from kernels
    several, used = len({process for process, _ in hosts}) > 1, Counter[str]()
    for thread, found in hosts.items():
        name = names.get(thread, "")
        lane = f"thread {thread[1]}" if not name or name.startswith("thread") else name
        lane = f"{names.get(thread[:1]) or f'process {thread[0]}'} {lane}" if several else lane
        used[lane] += 1
        for s in found:
            s.lane = lane if used[lane] == 1 else f"{lane} ({used[lane]})"
        yield from found


def _tell(slices: list[_Slice]) -> None:
    """Gives the slices of a thread the kind of the innermost range around them that says one."""
    around: list[_Slice] = []
    for s in slices:
        while around and around[-1].end <= s.start:
            around.pop()
        if s.name.startswith("autograd::engine::evaluate_function"):
            s.kind = Kind.B
        elif s.category == "user_annotation" and (found := _RANGE.match(s.name)):
            s.kind = _KIND[found[1].lower()]
        elif around:
            s.kind = around[-1].kind
        around.append(s)


def _outermost(slices: Iterable[_Slice]) -> Iterator[_Slice]:
    """The calls of a thread that are within no other. One that begins in another may end some rounding later."""
    end = late = -(1 << 80)
    for s in slices:
        within = s.end <= end or (s.start < end and s.end <= late)
        if (not within or _MESSAGE.match(s.name)) and not s.waits:
            end, late = s.end, s.end + _ROUNDING
            yield s


def _alone(slices: list[_Slice]) -> Iterator[_Slice]:
    """The stretches in which each function of a thread runs itself, and none that it calls."""
    around, at = list[_Slice](), 0

    def until(time: int) -> Iterator[_Slice]:
        nonlocal at
        while around:
            s = around[-1]
            end = min(s.end, time)
            if end > at or s.start == s.end:
                yield replace(s, start=min(at, end), end=end)
            at = max(at, end)
            if s.end > time:
                return
            around.pop()

    for s in slices:
        yield from until(s.start)
        at = max(at, s.start) if around else s.start
        around.append(s)
    yield from until(max(s.end for s in slices))


def _check_lanes(paths: Sequence[str | Path], tasks: list[_Slice]) -> None:
    """Raises ValueError if tasks of two files overlap on one lane."""
    last: dict[tuple[int, str], _Slice] = {}
    for s in sorted(tasks, key=lambda s: s.start):
        before = last.setdefault((s.rank, s.lane), s)
        if s.start < before.end and s.file != before.file:
            raise ValueError(f"{paths[before.file]} and {paths[s.file]} are both of rank {s.rank}, and overlap on "
                             f"{s.lane}; give one file of each rank")
        if s.end > before.end:
            last[s.rank, s.lane] = s


def _launches(slices: list[_Slice], tasks: list[_Slice]) -> Iterator[Edge]:
    """The edges within one file: from calls to the kernels that they launch, and from kernels to calls that wait."""
    hosts = grouped((s.thread, s) for s in tasks)
    starts = {thread: [s.start for s in own] for thread, own in hosts.items()}
    kernels = sorted((s for s in tasks if s.on_device and s.call), key=lambda s: s.end)
    ends, launched = [s.end for s in kernels], dict[str, tuple[_Slice, int]]()
    posted: list[tuple[int, _Slice, int]] = []  # calls that hand a collective or a message to gloo
    for s in slices:
        if s.on_device or s.thread not in hosts:
            continue
        own, begin = hosts[s.thread], starts[s.thread]
        if at := bisect_right(begin, s.start):
            if s.call:
                launched[s.call] = own[at - 1], s.end
            if s.name.startswith("c10d::"):
                posted.append((s.start, own[at - 1], s.end))
        if s.waits and (before := bisect_right(ends, s.end)) and (after := bisect_left(begin, s.end)) < len(own):
            yield kernels[before - 1], own[after], s.end
    posted.sort(key=lambda post: post[0])
    made = [(s, *launched[s.call]) for s in kernels if s.call in launched]
    made += [(s, *posted[at - 1][1:]) for s in tasks if s.name.startswith("gloo:")
             and (at := bisect_right(posted, s.start, key=lambda post: post[0]))]
    for s, call, shown in made:
        yield call, s, min(shown, s.start)


# ---------------------------------------------------------------------------------------------------------------- ranks
def _what(s: _Slice) -> str:
    """Which collective it is, or a message."""
    what = str(s.args.get("Collective name") or s.name.partition("(")[0])
    return "message" if re.match(r"i?(send|recv)|nccl\w*SendRecv", what) else what


def _group(s: _Slice) -> tuple[str, ...] | None:
    """The key of all collectives of a process group, or of all messages from one rank to another. None for
    other tasks, and for messages that do not say their ranks."""
    if s.name.startswith("gloo:"):  # which names neither its group nor a message's ranks
        said = s.name, str(s.args.get("Input Dims")), str(s.args.get("Input type"))
        return None if _MESSAGE.match(s.name) else said
    if not s.on_device or not (s.name.startswith("nccl") or "Collective name" in s.args):
        return None
    group = tuple(str(s.args.get(f"Process Group {x}", "")) for x in ("Name", "Ranks"))
    if _what(s) != "message":
        return group
    pair = tuple(str(s.args[x]) for x in ("Src Rank", "Dst Rank") if x in s.args)
    return group + pair if len(pair) == 2 else None


def _matches(tasks: list[_Slice], notes: list[str]) -> Iterator[tuple[_Slice, ...]]:
    """The tasks of several ranks that are one collective: the n-th of a group on each."""
    groups: dict[tuple[str, ...], dict[int, list[_Slice]]] = defaultdict(lambda: defaultdict(list))
    for s in sorted(tasks, key=lambda s: (s.rank, s.start)):
        if (group := _group(s)) is not None:
            groups[group][s.rank].append(s)
    for group, ranks in groups.items():
        if len(ranks) < 2:
            continue
        fewest, most = (of(map(len, ranks.values())) for of in (min, max))
        together = list(zip(*ranks.values(), strict=True) if fewest == most else _at_once(list(ranks.values())))
        same = next((i for i, each in enumerate(together) if len({_what(s) for s in each}) > 1), len(together))
        if group[0].startswith("gloo:") and _TOGETHER.search(group[0]) and not _of_all(together):
            same, group = 0, (f"{group[0]} (gloo does not say which ranks it has)",)
        yield from together[:same]
        if same < most:
            notes.append(f"the ranks differ in the collectives of group {' '.join(filter(None, group)) or 'nccl'}: "
                         f"{same} of {most} are matched")


def _of_all(together: list[tuple[_Slice, ...]]) -> bool:
    """Whether all ranks are at one time in 9 of 10 of these collectives, if clocks that differ are moved."""
    ends = [[s.end for s in own] for own in zip(*together, strict=True)]
    apart = [median_low(map(int.__sub__, own, ends[0])) for own in ends]
    moved = [zip(*((s.start - by, s.end - by) for s, by in zip(each, apart, strict=True)), strict=True)
             for each in together]
    return 10 * sum(max(begin) <= min(end) for begin, end in moved) >= 9 * len(together)


def _at_once(ranks: list[list[_Slice]]) -> Iterator[tuple[_Slice, ...]]:
    """The collectives that are there at one time on all ranks, some of which have collectives that others lack."""
    at = [0] * len(ranks)
    while all(i < len(own) for i, own in zip(at, ranks, strict=True)):
        heads = tuple(own[i] for i, own in zip(at, ranks, strict=True))
        first = min(range(len(heads)), key=lambda rank: heads[rank].end)
        if heads[first].end >= max(s.start for s in heads):
            yield heads
            at = [i + 1 for i in at]
        else:
            at[first] += 1


def _align(slices: Iterable[_Slice], matches: list[tuple[_Slice, ...]], notes: list[str]) -> None:
    """Moves the times of ranks whose clocks disagree, so that the collectives that all leave together end together; the
    clocks disagree if one ended on some rank before it began on another."""
    apart, wrong = defaultdict[int, dict[int, list[int]]](lambda: defaultdict(list)), set[int]()
    for first, *others in matches:
        if _TOGETHER.search(_what(first)):
            for s in others:
                apart[first.rank][s.rank].append(first.end - s.end)
                apart[s.rank][first.rank].append(s.end - first.end)
            if min(s.end for s in (first, *others)) < max(s.start for s in (first, *others)):
                wrong.add(first.rank)
    move, times = dict[int, int](), defaultdict[int, list[int]](list)
    for root in sorted(apart):
        if root not in move:
            own, way = {root: 0}, [root]
            for a in way:
                for b, differences in apart[a].items():
                    if b not in own:
                        own[b] = own[a] + median_low(differences)
                        way.append(b)
            move |= dict.fromkeys(own, 0) if wrong.isdisjoint(own) else own
    for s in slices:
        s.start, s.end = s.start + move.get(s.rank, 0), s.end + move.get(s.rank, 0)
        times[s.rank] += s.start, s.end
    if moved := [f"rank {rank} by {by / 1e3:+,.3f} us" for rank, by in sorted(move.items()) if by]:
        notes.append("the clocks of ranks differ (a collective ended on one before it began on another), so times were "
                     f"moved until collectives end together: {', '.join(moved)}")
    spans = sorted((min(own), max(own), rank) for rank, own in times.items())
    for end, (begin, _, rank) in zip(accumulate((end for _, end, _ in spans), max), spans[1:], strict=False):
        if begin > end:
            notes.append(f"rank {rank} begins {(begin - end) / 1e3:,.3f} us after the ranks before it have ended, and "
                         "no collective tells whether their clocks differ")


def _meet(tasks: list[_Slice], matches: list[tuple[_Slice, ...]]) -> Iterator[Edge]:
    """Lets each collective begin when the last rank has come, which the tasks before it on that rank explain."""
    before = grouped(((s.rank, s.on_device), s) for s in sorted(tasks, key=lambda s: s.end))
    ends = {key: [s.end for s in own] for key, own in before.items()}
    for together in matches:
        late = max(together, key=lambda s: s.start)
        key, met = (late.rank, late.on_device), late.start
        own = before[key]
        last = next((own[i] for i in reversed(range(bisect_right(ends[key], met))) if own[i] is not late), None)
        for s in together:
            if s is not late and s.start < met <= s.end:
                s.start = met
                if last is not None:
                    yield last, s, met


def _timeline(tasks: list[_Slice], edges: list[Edge], notes: list[str], known: Sequence[str]) -> Timeline:
    unit = {name: i for i, name in enumerate(dict.fromkeys([*known, *(s.name for s in tasks)]))}
    counts: dict[str, Iterator[int]] = defaultdict(count)
    number = [next(counts[s.name]) for s in tasks]
    if max(len(unit), max(number) + 1) > MOST:
        raise ValueError(f"the traces have {len(tasks):,} calls and kernels; at most {MOST:,} of one name can be read")
    lanes = sorted({Lane(s.rank, s.lane) for s in tasks})
    lane = {lane: i for i, lane in enumerate(lanes)}
    begin, at = min(s.start for s in tasks), {id(s): i for i, s in enumerate(tasks)}
    return Timeline.of_tasks(
        lanes, pack([unit[s.name] for s in tasks], [s.kind for s in tasks], number),
        [lane[Lane(s.rank, s.lane)] for s in tasks], [(s.start - begin) / 1e3 for s in tasks],
        [(s.end - begin) / 1e3 for s in tasks], edges=[(at[id(a)], at[id(b)]) for a, b, _ in edges],
        arrived=[(when - begin) / 1e3 for *_, when in edges], labels=tuple(unit), unit="us", meta={"notes": notes})
