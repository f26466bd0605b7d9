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
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from ..system.files import read, write_atomic
from .report import UNITS
from .schedule import Lane
from .tasks import COLLECTIVE, RECEIVES, SENDS, Kind, parse_task, unpack
from .timeline import COLUMNS, Timeline

VERSION = "1.0.0"
COMPUTE, SEND, RECEIVE, COLLECT = 4, 5, 6, 7  #: types of nodes
TYPES = {**dict.fromkeys(map(int, SENDS), SEND), **dict.fromkeys(map(int, RECEIVES), RECEIVE),
         **dict.fromkeys(map(int, COLLECTIVE), COLLECT)}
COLLECTIVES = {Kind.A: 0, Kind.AG: 2, Kind.AS: 7}  #: comm_type
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
    return b"".join(_field(number, _field(1, name) + _field(field, value))
                    for name, (field, value) in values.items())


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
    groups = _groups(timeline)
    for rank in sorted({lane.rank for lane in timeline.lanes}):
        write_atomic(f"{name}.{rank}.et", b"".join(
            _varint(len(message)) + message for message in _written(timeline, rank, scale, factor, groups)))
    if told := {number: ranks for ranks, number in groups.items() if number}:
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


def _scale(t: Timeline, factor: float | None) -> float:
    """Microseconds of the file for one unit of the timeline."""
    scale = UNITS.get(t.unit, 1.0) * (factor or 1.0)
    least = min((x for x in (t.durations[t.tasks] * scale).tolist() if x > 0), default=1.0)
    if max(t.end[t.tasks].tolist(), default=0) * scale >= LONGEST:
        raise ValueError(f"a time is above {LONGEST:.0e} us, the longest that is exact in a Chakra trace; give a "
                         "smaller --trace-factor")
    if least < 1:
        ask = 10 ** math.ceil(math.log10(10 / least) + math.log10(factor or 1.0))
        raise ValueError(f"a task takes {least:.3g} us, and a Chakra trace has whole microseconds; give --trace-factor "
                         f"{ask}, by which all times are multiplied")
    return scale


def _groups(t: Timeline) -> dict[tuple[int, ...], str]:
    """Ranks that sum together -> the name of their group, which is empty for all ranks."""
    every, ranks = tuple(sorted({lane.rank for lane in t.lanes})), t.rank_of_each
    of = defaultdict[int, set[int]](set)
    for record in t.tasks[np.isin(unpack(t.key[t.tasks]).kind, COLLECTIVE)].tolist():
        of[int(t.key[record])].add(int(ranks[record]))
    names = map(str, count(1))
    return {own: "" if own == every else next(names) for own in sorted({tuple(sorted(r)) for r in of.values()})}


def _written(t: Timeline, rank: int, scale: float, factor: float | None,
             groups: dict[tuple[int, ...], str]) -> Iterator[bytes]:
    """The messages of one rank's file."""
    about = {"labels": t.labels, "unit": t.unit, "predicted": t.predicted, "peak_bytes": t.peak_bytes,
             "factor": factor, "lanes": [lane.name for lane in t.lanes if lane.rank == rank]}
    yield _field(1, VERSION) + _attributes(2, {"minidl": (STRING, json.dumps(about))})
    ranks, tasks = t.rank_of_each, t.tasks
    own = sorted(tasks[ranks[tasks] == rank].tolist(), key=lambda r: (t.start[r], t.end[r]))
    number = {record: i for i, record in enumerate(own, 1)}
    more = count(len(own) + 1)  # numbers of messages that are no tasks of the timeline
    needs, before = defaultdict[int, list[int]](list), dict[int, int]()
    for lane in np.unique(t.lane[own]).tolist():
        mine = [r for r in tasks.tolist() if t.lane[r] == lane]
        before |= dict(zip(mine[1:], mine, strict=False))
    readers, partner, bare = _matched(t)
    for a, b in t.edges.tolist():
        if a in number and b in number:
            needs[b].append(number[a])
    for (a, to), tag in bare.items():
        if a in number:
            yield _node(next(more), f"send {t.name(a)}", SEND, [], [number[a]], t.end[a] * scale, 0,
                        _message(rank, to, tag, t.bytes[a]))
        if to == rank:
            found = next(more)
            for b in readers[a, to]:
                needs[b].append(found)
            yield _node(found, f"receive {t.name(a)}", RECEIVE, [], [], t.end[a] * scale, 0,
                        _message(int(ranks[a]), rank, tag, t.bytes[a]))
    took, start = t.durations, t.start.copy()
    first, _, size = t.actions
    for begin, several in zip(first[size > 1].tolist(), size[size > 1].tolist(), strict=True):
        action = tasks[begin : begin + several]  # one after the other, each for its share
        start[action] += np.arange(several) * took[action[0]]
    for record, i in number.items():
        kind = Kind(int(unpack(t.key[record]).kind))
        node = TYPES.get(int(kind), COMPUTE)
        given: Attributes = {"task": (STRING, t.name(record)), "lane": (STRING, t.lanes[t.lane[record]].name),
                             "is_cpu_op": (BOOL, 0)}
        if node == COLLECT:
            given |= {"comm_type": (INT64, COLLECTIVES[kind]), "comm_size": (INT64, int(t.bytes[record]))}
            members = tuple(sorted({int(ranks[r]) for r in tasks[t.key[tasks] == t.key[record]].tolist()}))
            given |= {"pg_name": (STRING, name)} if (name := groups[members]) else {}
        elif node != COMPUTE:
            source, target, tag = partner.get(record, (rank, int(unpack(t.key[record]).destination), 0))
            given |= _message(source, target, tag, t.bytes[record])
        elif t.work is not None:
            _, rows = t.work.rows_of(t.key[[record]])
            given |= {"num_ops": (INT64, int(t.work.flops[rows].sum())),
                      "tensor_size": (UINT64, int(t.work.bytes[rows].sum()))}
        yield _node(i, t.label(record), node, [number[before[record]]] if record in before else [],
                    sorted(set(needs[record])), start[record] * scale, took[record] * scale, given)


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
    """The timeline of files that `save` wrote, one for each rank, in the order of ranks; times are as in the files.
    Raises ValueError for other files, OSError for those that cannot be read."""
    rows, edges, lanes = list[tuple[Any, ...]](), list[tuple[int, int]](), list[Lane]()
    ends: tuple[dict[int, list[int]], ...] = defaultdict(list), defaultdict(list)  # by tag: the makers, the readers
    for rank, path in enumerate(paths):
        try:
            about, nodes = _nodes(read(path, "trace"))
            at = {}
            for number, node in sorted(nodes.items()):
                if "task" in node["attr"]:
                    at[number] = len(rows)
                    lane = len(lanes) + about["lanes"].index(node["attr"]["lane"])
                    rows.append((parse_task(node["attr"]["task"]), lane, node[6], node[6] + node[7],
                                 node["attr"].get("comm_size", 0)))
            for number, node in nodes.items():
                here, tag = at.get(number), node["attr"].get("comm_tag")
                edges += [(at[d], here) for d in node["needs"] if here is not None and d in at]
                if tag is not None:
                    users = [at[n] for n, other in nodes.items() if number in other["needs"] and n in at]
                    ends[node[3] == RECEIVE][tag] += [here] if here is not None else (
                        users if node[3] == RECEIVE else [at[d] for d in node["needs"]])
            lanes += [Lane(rank, name) for name in about["lanes"]]
            if rank == 0:
                first = about
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            why = " ".join(str(error).split())[:120]
            raise ValueError(f"{path} is not {OURS}: {why}") from None
    edges += [(a, b) for tag in ends[0] for a in ends[0][tag] for b in ends[1].get(tag, [])]
    key, lane, start, end, nbytes = zip(*rows, strict=True) if rows else ((),) * 5
    return Timeline.of_tasks(lanes, key, lane, start, end, bytes=nbytes, edges=edges, labels=tuple(first["labels"]),
                             peak_bytes=first["peak_bytes"], predicted=first["predicted"], unit="us")


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
