"""A timeline as execution traces of MLCommons Chakra 1.0.0, which simulators of networks read: `NAME.{rank}.et`, a file
for each rank.

A file is a row of messages in protobuf's form (schema et_def.proto), each after its length: `GlobalMetadata`, then a
`Node` for each task. A task of a lane waits for the one before it (`ctrl_deps`), which the traces of profilers leave
out; `data_deps` are the tasks of other lanes that it needs. A message from rank to rank is a pair of COMM_SEND_NODE and
COMM_RECV_NODE with equal `comm_src`, `comm_dst` and `comm_tag`. Ranks that sum only among themselves have a `pg_name`,
and `NAME.groups.json` says which ranks each has. Times are whole microseconds.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from ..system.files import read, write_atomic
from .columns import grouped
from .report import UNITS
from .schedule import Lane
from .tasks import COLLECTIVE, RECEIVES, SENDS, Kind, parse_task, unpack
from .timeline import COLUMNS, Timeline

VERSION = "1.0.0"
COMPUTE, SEND, RECEIVE, COLLECT = 4, 5, 6, 7  #: types of nodes
TYPES = {**dict.fromkeys(map(int, SENDS), SEND), **dict.fromkeys(map(int, RECEIVES), RECEIVE),
         **dict.fromkeys(map(int, COLLECTIVE), COLLECT)}
COLLECTIVES = {Kind.A: 0, Kind.AG: 2, Kind.AS: 7, Kind.X: 6}  #: comm_type
LONGEST = 2.0**53  #: microseconds; times are floats
OURS = "a Chakra trace that minidl wrote"
#: the fields of an attribute's value by its type
INT32, INT64, UINT64, BOOL, STRING = 7, 9, 13, 27, 29
Attributes = dict[str, tuple[int, Any]]


# ------------------------------------------------------------------------------------------------------------- protobuf
def _varint(number: int) -> bytes:
    found = bytearray()
    while number > 127:
        found.append(number & 127 | 128)
        number >>= 7
    return bytes([*found, number])


def _field(number: int, value: int | bytes | str) -> bytes:
    """A whole number, or bytes with their length. Numbers below 0 do not occur."""
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    value = value.encode() if isinstance(value, str) else value
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def _attributes(number: int, values: Attributes) -> bytes:
    return b"".join(_field(number, _field(1, name) + _field(field, value)) for name, (field, value) in values.items())


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """The fields of a message: numbers, and bytes. Raises ValueError for other forms."""
    at = 0
    while at < len(message):
        key, at = _number(message, at)
        value: Any
        value, at = _number(message, at)
        if key & 7 == 2:
            value, at = message[at : at + value], at + value
        if key & 7 not in (0, 2) or at > len(message):
            raise ValueError("a message is damaged")
        yield key >> 3, value


def _number(message: bytes, at: int) -> tuple[int, int]:
    found, shift = 0, 0
    while True:
        if at >= len(message) or shift > 63:
            raise ValueError("a message is damaged")
        byte = message[at]
        found, at, shift = found | (byte & 127) << shift, at + 1, shift + 7
        if byte < 128:
            return found, at


def _messages(content: bytes) -> Iterator[bytes]:
    at = 0
    while at < len(content):
        size, at = _number(content, at)
        if at + size > len(content):
            raise ValueError("it ends within a message")
        yield content[at : at + size]
        at += size


# -------------------------------------------------------------------------------------------------------------- writing
def save(timeline: Timeline, path: str | Path, factor: float | None = None) -> None:
    """Writes `NAME.{rank}.et` for a path `NAME.et`, each whole or not at all. `factor`: by which all times are
    multiplied. Raises ValueError for times below a microsecond without a factor that makes them longer, and for times
    that are too long; OSError if a file cannot be written."""
    name, scale = str(path).removesuffix(".et"), _scale(timeline, factor)
    group = _groups(timeline)
    for rank, messages in _written(timeline, scale, factor, group).items():
        write_atomic(f"{name}.{rank}.et", b"".join(_varint(len(message)) + message for message in messages))
    if told := {number: ranks for ranks, number in sorted(set(group.values())) if number}:
        write_atomic(f"{name}.groups.json", json.dumps(told) + "\n")


def on_all_ranks(timeline: Timeline, ranks: int) -> Timeline:
    """The timeline of the first ranks, repeated for so many ranks: data-parallel ones, or replicas of a pipeline."""
    t, own = timeline, max((lane.rank for lane in timeline.lanes), default=0) + 1
    if ranks <= own:
        return t
    copies = ranks // own
    turn = np.arange(copies)

    def again(column: Any, step: int = 0) -> Any:
        return (np.tile(column, copies) + np.repeat(turn * step, len(column))).astype(column.dtype)

    return replace(t, lanes=tuple(Lane(own * r + lane.rank, lane.name) for r in range(copies) for lane in t.lanes),
                   lane=again(t.lane, len(t.lanes)), **{name: again(getattr(t, name)) for name in COLUMNS
                                                        if name != "lane"},
                   edges=np.concatenate([t.edges + r * len(t) for r in range(copies)]),
                   arrived=None if t.arrived is None else again(t.arrived))


def fitting(t: Timeline, factor: float | None) -> tuple[float, float | None]:
    """The microseconds of the shortest task with this factor; and this factor, or a larger one if those are below 1."""
    least = min((x for x in (t.durations[t.tasks] * UNITS.get(t.unit, 1.0)).tolist() if x > 0), default=1.0)
    short = least * (factor or 1.0)
    return short, factor if short >= 1 else 10 ** math.ceil(math.log10(10 / least))


def _scale(t: Timeline, factor: float | None) -> float:
    """Microseconds of the file for one unit of the timeline."""
    scale = UNITS.get(t.unit, 1.0) * (factor or 1.0)
    if max(t.end[t.tasks].tolist(), default=0) * scale >= LONGEST:
        raise ValueError(f"a time is above {LONGEST:.0e} us, the longest that is exact in a Chakra trace; give a "
                         "smaller --trace-factor")
    least, ask = fitting(t, factor)
    if ask != factor:
        raise ValueError(f"a task takes {least:.3g} us, and a Chakra trace has whole microseconds; give --trace-factor "
                         f"{ask}, by which all times are multiplied")
    return scale


def _groups(t: Timeline) -> dict[int, tuple[tuple[int, ...], str]]:
    """Key of a collective -> the ranks that take part, and the name of their group, which is empty for all ranks."""
    every, ranks = tuple(sorted({lane.rank for lane in t.lanes})), t.rank_of_each
    of = defaultdict[int, set[int]](set)
    for record in t.tasks[np.isin(unpack(t.key[t.tasks]).kind, COLLECTIVE)].tolist():
        of[int(t.key[record])].add(int(ranks[record]))
    own = {key: tuple(sorted(members)) for key, members in of.items()}
    names = {members: str(i) for i, members in enumerate(sorted({*own.values()} - {every}), 1)}
    return {key: (members, names.get(members, "")) for key, members in own.items()}


def _written(t: Timeline, scale: float, factor: float | None,
             group: Mapping[int, tuple[tuple[int, ...], str]]) -> dict[int, list[bytes]]:
    """The messages of each rank's file."""
    lanes, tasks, ranks, key = t.lane.tolist(), t.tasks, t.rank_of_each.tolist(), t.key.tolist()
    files = {rank: [_field(1, VERSION) + _attributes(2, {"minidl": (STRING, json.dumps({
        "labels": t.labels, "unit": t.unit, "predicted": t.predicted, "peak_bytes": t.peak_bytes, "factor": factor,
        "lanes": [lane.name for lane in own]}))})]
        for rank, own in sorted(grouped((lane.rank, lane) for lane in t.lanes).items())}
    counts, number = {rank: count(1) for rank in files}, dict[int, int]()
    ordered = tasks[np.lexsort((t.end[tasks], t.start[tasks]))].tolist()
    for record in ordered:
        number[record] = next(counts[ranks[record]])
    before = {b: a for a, b in pairwise(tasks.tolist()) if lanes[a] == lanes[b]}
    needs = defaultdict[int, set[int]](set)
    for a, b in t.edges.tolist():
        if ranks[a] == ranks[b]:
            needs[b].add(number[a])
    readers, partner, bare = _matched(t)
    for (a, to), tag in bare.items():  # these messages are no tasks of the timeline
        given = _message(ranks[a], to, tag, t.bytes[a])
        files[ranks[a]].append(_node(next(counts[ranks[a]]), f"send {t.name(a)}", SEND, [], [number[a]],
                                     t.end[a] * scale, 0, given))
        files[to].append(_node(got := next(counts[to]), f"receive {t.name(a)}", RECEIVE, [], [], t.end[a] * scale, 0,
                               given))
        for b in readers[a, to]:
            needs[b].add(got)
    took, start = t.durations, t.start.copy()
    first, _, size = t.actions
    for begin, several in zip(first[size > 1].tolist(), size[size > 1].tolist(), strict=True):
        action = tasks[begin : begin + several]  # one after the other, each for its share
        start[action] += np.arange(several) * took[action[0]]
    kinds, work = unpack(t.key).kind.tolist(), _work(t)
    for record in ordered:
        kind = Kind(kinds[record])
        node = TYPES.get(int(kind), COMPUTE)
        given = {"task": (STRING, t.name(record)), "lane": (STRING, t.lanes[lanes[record]].name),
                 "is_cpu_op": (BOOL, 0)}
        if node == COLLECT:
            given |= {"comm_type": (INT64, COLLECTIVES[kind]), "comm_size": (INT64, int(t.bytes[record]))}
            given |= {"pg_name": (STRING, name)} if (name := group[key[record]][1]) else {}
        elif node != COMPUTE:
            source, to, tag = partner.get(record, (ranks[record], int(unpack(key[record]).destination), 0))
            given |= _message(source, to, tag, t.bytes[record])
        elif record in work:
            given |= {"num_ops": (INT64, work[record][0]), "tensor_size": (UINT64, work[record][1])}
        files[ranks[record]].append(_node(
            number[record], t.label(record), node, [number[before[record]]] if record in before else [],
            sorted(needs[record]), start[record] * scale, took[record] * scale, given))
    return files


def _work(t: Timeline) -> dict[int, tuple[int, int]]:
    """The flops and bytes of each task whose work is known."""
    if t.work is None:
        return {}
    at, rows = t.work.rows_of(t.key[t.tasks])
    flops, nbytes = (np.bincount(at, column[rows], len(t.tasks)).astype(np.int64).tolist()
                     for column in (t.work.flops, t.work.bytes))
    return dict(zip(t.tasks.tolist(), zip(flops, nbytes, strict=True), strict=True))


def _matched(t: Timeline) -> tuple[dict[Any, list[int]], dict[int, tuple[int, int, int]], dict[tuple[int, int], int]]:
    """Edges between ranks: for (task, rank that reads it) the readers; for sends and receives (source, target, tag);
    and for (task, rank) of an edge without a message its tag."""
    rank, kind = t.rank_of_each, unpack(t.key).kind
    readers, partner = defaultdict[Any, list[int]](list), dict[int, tuple[int, int, int]]()
    numbers, bare = count(1), dict[tuple[int, int], int]()
    for a, b in t.edges[np.lexsort((t.edges[:, 1], t.edges[:, 0]))].tolist():
        if rank[a] == rank[b]:
            continue
        if kind[a] in SENDS and kind[b] in RECEIVES and not {a, b} & partner.keys():
            partner[a] = partner[b] = (int(rank[a]), int(rank[b]), next(numbers))
            continue
        to = (a, int(rank[b]))
        readers[to].append(b)
        if to not in bare:
            bare[to] = next(numbers)
    return readers, partner, bare


def _message(source: int, target: int, tag: int, nbytes: Any) -> Attributes:
    return {"comm_src": (INT32, source), "comm_dst": (INT32, target), "comm_tag": (INT32, tag),
            "comm_size": (INT64, int(nbytes))}


def _node(number: int, name: str, kind: int, after: Iterable[int], needs: Iterable[int], start: float, took: float,
          given: Attributes) -> bytes:
    packed = [_field(field, b"".join(map(_varint, ids))) for field, ids in ((4, [*after]), (5, [*needs])) if ids]
    return (_field(1, number) + _field(2, name) + _field(3, kind) + b"".join(packed) + _field(6, round(start))
            + _field(7, round(took)) + _attributes(10, given))


# -------------------------------------------------------------------------------------------------------------- reading
def load(paths: Sequence[str | Path]) -> Timeline:
    """The timeline of files that `save` wrote, `NAME.{rank}.et`; under other names, in the order of ranks. Times of
    files are divided by their factor. Raises ValueError for other files, OSError for those that cannot be read."""
    rows, edges, lanes = list[tuple[Any, ...]](), list[tuple[int, int]](), list[Lane]()
    ends: tuple[dict[int, list[int]], ...] = defaultdict(list), defaultdict(list)  # by tag: the makers, the readers
    named = grouped((int(found[1]), path) for path in paths if (found := re.search(r"\.([0-9]{1,5})\.et$", str(path))))
    if twice := next((some for some in named.values() if len(some) > 1), None):
        raise ValueError(f"{twice[0]} and {twice[1]} are of one rank, by their names; give one file of each rank")
    for rank, path in sorted((r, p) for r, (p,) in named.items()) if len(named) == len(paths) else enumerate(paths):
        try:
            about, nodes = _nodes(read(path, "trace"))
            lane_of = {name: len(lanes) + i for i, name in enumerate(about["lanes"])}
            users = grouped((need, number) for number, node in nodes.items() for need in node["needs"])
            at = {}
            for number, node in sorted(nodes.items()):
                if "task" in node["attr"]:
                    at[number] = len(rows)
                    lane = lane_of[node["attr"]["lane"]]
                    begin, end = (time / (about["factor"] or 1.0) for time in (node[6], node[6] + node[7]))
                    rows.append((parse_task(node["attr"]["task"]), lane, begin, end, node["attr"].get("comm_size", 0)))
            for number, node in nodes.items():
                here, tag = at.get(number), node["attr"].get("comm_tag")
                edges += [(at[d], here) for d in node["needs"] if here is not None and d in at]
                if tag is not None:
                    ends[node[3] == RECEIVE][tag] += [here] if here is not None else (
                        [at[n] for n in users.get(number, ())] if node[3] == RECEIVE
                        else [at[d] for d in node["needs"]])
            lanes += [Lane(rank, name) for name in about["lanes"]]
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is not {OURS}: {' '.join(str(error).split())[:120]}") from None
    edges += [(a, b) for tag in ends[0] for a in ends[0][tag] for b in ends[1].get(tag, [])]
    key, at_lane, start, end, nbytes = zip(*rows, strict=True) if rows else ((),) * 5
    return Timeline.of_tasks(lanes, key, at_lane, start, end, bytes=nbytes, edges=edges, labels=tuple(about["labels"]),
                             peak_bytes=about["peak_bytes"], predicted=about["predicted"], unit="us")


def _nodes(content: bytes) -> tuple[dict[str, Any], dict[int, dict[Any, Any]]]:
    """The texts that `save` keeps of the timeline; each node by its number: its fields by number, `needs`, `attr`."""
    head, *rest = _messages(content)
    about = json.loads(dict(_attribute(value) for field, value in _fields(head) if field == 2)["minidl"])
    nodes = {}
    for message in rest:
        node: dict[Any, Any] = {"needs": [], "attr": {}, 6: 0, 7: 0}
        for field, value in _fields(message):
            if field == 10:
                name, content = _attribute(value)
                node["attr"][name] = content
            elif field == 5:
                at = 0
                while at < len(value):
                    need, at = _number(value, at)
                    node["needs"].append(need)
            else:
                node[field] = value
        nodes[node[1]] = node
    return about, nodes


def _attribute(message: bytes) -> tuple[str, Any]:
    (_, name), (field, value) = _fields(message)
    return name.decode(), value.decode() if field == STRING else value
