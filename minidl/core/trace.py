"""A timeline as a trace file for ui.perfetto.dev (Chrome's JSON format) and for Holistic Trace Analysis (HTA).

One process per rank, one thread per lane, and one thread for the host that issues the work. Tasks are `kernel` slices,
waits and transfers are separate slices; dependencies across lanes are flows. Slices of a thread never overlap: a slice
that would overlap goes to another thread of the same lane. Times are microseconds, rounded to nanoseconds; one unit of
an unknown length is shown as a millisecond.

HTA needs one file per rank, with the rank's number before the events, a launch for each kernel (the same
`correlation`), NCCL's names for communication, and `ProfilerStep` marks. It rounds to whole microseconds unless
HTA_DISABLE_NS_ROUNDING=1 is set.
"""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..system.files import LARGEST, read, write_atomic
from .columns import Floats, spread
from .report import UNITS
from .schedule import MOST_LANES, Lane
from .tasks import COMMUNICATION, Kind, What, parse_task, unpack
from .work import Work

if TYPE_CHECKING:
    from .timeline import Timeline

_NCCL = {Kind.A: "ncclDevKernel_AllReduce", Kind.AS: "ncclDevKernel_ReduceScatter", Kind.AG: "ncclDevKernel_AllGather"}
_CATEGORY = {What.TASK: "kernel", What.WAIT: "wait", What.TRANSFER: "transfer"}
_OURS = "a trace that minidl wrote"
_OWN_UNIT = 1e3  #: microseconds for one unit of an unknown length


def save(timeline: Timeline, path: str | Path) -> None:
    """Writes a trace for ui.perfetto.dev, `.json` or `.json.gz`, whole or not at all; with `{rank}` in the name one
    file per rank, as HTA reads. Raises ValueError for another suffix, OSError if the file cannot be written."""
    path = str(Path(path))
    check_path(path)
    if "{rank}" in path:
        for rank in sorted({lane.rank for lane in timeline.lanes}):
            save(timeline.of_rank(rank), path.replace("{rank}", str(rank)))
        return
    content = dumps(timeline).encode()
    write_atomic(path, gzip.compress(content, 6, mtime=0) if path.endswith(".gz") else content)


def check_path(path: str) -> None:
    """Raises ValueError for a file name that `save` does not accept."""
    if not path.endswith((".json", ".json.gz")):
        raise ValueError(f"a trace must be saved as .json or .json.gz, not as {path}")


def dumps(timeline: Timeline) -> str:
    """The trace as JSON text, one event per line. With several ranks in it, `distributedInfo` names the first."""
    _, lane_of, _ = _threads(timeline)
    used = timeline.lane[timeline.what == What.TASK]
    head = {
        "distributedInfo": {"rank": min((timeline.lanes[i].rank for i in np.unique(used)), default=0),
                            "world_size": max((lane.rank for lane in timeline.lanes), default=0) + 1},
        "displayTimeUnit": "ns",
        "minidl": {"unit": timeline.unit, "predicted": timeline.predicted, "peak_bytes": timeline.peak_bytes,
                   "lanes": [[lane.rank, lane.name] for lane in timeline.lanes], "lane_of_thread": lane_of,
                   "labels": list(timeline.labels), "meta": timeline.meta,
                   "work": None if timeline.work is None else timeline.work.as_json()},
    }
    lines = [json.dumps(key) + ": " + json.dumps(value, default=str) + ",\n" for key, value in head.items()]
    body = ",\n".join(json.dumps(event) for event in events(timeline))
    return "{" + "".join(lines) + '"traceEvents": [\n' + body + "\n]}\n"


def events(timeline: Timeline) -> Iterator[dict[str, Any]]:
    """Metadata first, then all events by time; at equal times, a slice comes before the flows that bind to it."""
    thread, lane_of, names = _threads(timeline)
    ranks = sorted({lane.rank for lane in timeline.lanes})
    host = {rank: len(names) + 1 + i for i, rank in enumerate(ranks)}
    threads = [(rank, host[rank], "host", 0) for rank in ranks]
    threads += [(timeline.lanes[lane].rank, tid, name, tid)
                for tid, (lane, name) in enumerate(zip(lane_of, names, strict=True), 1)]
    for rank in ranks:
        yield _meta("process_name", rank, 0, name=f"rank {rank}")
        yield _meta("process_sort_index", rank, 0, sort_index=rank)
    for rank, tid, name, place in threads:
        yield _meta("thread_name", rank, tid, name=name)
        yield _meta("thread_sort_index", rank, tid, sort_index=place)
    found = [*_steps(timeline, host), *_slices(timeline, thread, host)]
    found.sort(key=itemgetter(0))
    for ns, event in found:
        yield event | {"ts": ns / 1e3}


def _meta(what: str, rank: int, tid: int, **value: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": rank + 1, "tid": tid, "args": value}


def _ns(timeline: Timeline, times: Any) -> list[int]:
    scale = UNITS.get(timeline.unit, _OWN_UNIT) * 1e3
    return [round(time * scale) for time in np.asarray(times, np.float64).tolist()]


def _threads(timeline: Timeline) -> tuple[list[int], list[int], list[str]]:
    """For each record its thread (from 1); for each thread its lane, and its name."""
    start, end = _ns(timeline, timeline.start), _ns(timeline, timeline.end)
    thread, lane_of, names = [0] * len(timeline), list[int](), list[str]()
    records: list[list[int]] = [[] for _ in timeline.lanes]
    for record in np.lexsort((timeline.what, timeline.end, timeline.start)).tolist():
        records[timeline.lane[record]].append(record)
    for i, lane in enumerate(timeline.lanes):
        first, free = len(names), [-(1 << 62)]
        for record in records[i]:
            row = next((row for row, time in enumerate(free) if time <= start[record]), len(free))
            free[row:row + 1] = [end[record]]
            thread[record] = first + row + 1
        lane_of += [i] * len(free)
        names += [f"{lane.name} ({row})" if row > 1 else lane.name for row in range(1, len(free) + 1)]
    return thread, lane_of, names


def _steps(timeline: Timeline, host: dict[int, int]) -> Iterator[tuple[int, dict[str, Any]]]:
    """`ProfilerStep#k` on each rank's host thread: from the first launch of iteration k to the first of the next."""
    tasks = timeline.tasks
    if not len(tasks):
        return
    iteration = unpack(timeline.key[tasks]).iteration
    rank_of = timeline.rank_of_each[tasks]
    for rank in np.unique(rank_of).tolist():
        mine = tasks[rank_of == rank]
        steps, which = np.unique(iteration[rank_of == rank], return_inverse=True)
        began = spread(which, np.minimum(timeline.issued[mine], timeline.start[mine]), len(steps), np.inf, np.minimum)
        began = np.maximum.accumulate(np.append(began[1:], timeline.end[mine].max()))
        edges = _ns(timeline, np.append(min(timeline.issued[mine].min(), timeline.start[mine].min()), began))
        for step, begin, end in zip(steps.tolist(), edges, edges[1:], strict=False):
            yield begin, {"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{step}", "pid": rank + 1,
                          "tid": host[rank], "dur": (end - begin) / 1e3, "args": {}}


def _slices(timeline: Timeline, thread: list[int], host: dict[int, int]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Every record as a slice, every task with its launch, every edge across lanes as a flow."""
    start, end, issued = (_ns(timeline, x) for x in (timeline.start, timeline.end, timeline.issued))
    arrived = None if timeline.arrived is None else _ns(timeline, timeline.arrived)
    ends: dict[int, list[tuple[str, int]]] = defaultdict(list)
    for flow, (producer, consumer) in enumerate(timeline.edges.tolist()):
        ends[consumer].append(("f", flow))
        ends[producer].append(("s", flow))
    kind = unpack(timeline.key).kind.tolist()
    for i in sorted(range(len(timeline)), key=lambda i: (thread[i], start[i], end[i])):
        rank, what = timeline.lanes[timeline.lane[i]].rank, What(timeline.what[i])
        place = {"pid": rank + 1, "tid": thread[i]}
        args: dict[str, Any] = {"record": i, "task": timeline.name(i), "bytes": int(timeline.bytes[i])}
        if what == What.TASK:
            name = timeline.label(i)
            if kind[i] in COMMUNICATION:
                name = f"{_NCCL.get(Kind(kind[i]), 'ncclDevKernel_SendRecv')} {name}"
            args |= {"device": rank, "stream": int(timeline.lane[i]) + 1, "correlation": i + 1,
                     "queued": (start[i] - issued[i]) / 1e3}
            yield issued[i], {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": rank + 1,
                              "tid": host[rank], "dur": 0.0, "args": {"correlation": i + 1}}
        else:
            name = f"{_CATEGORY[what]} {timeline.name(i)}"
        yield start[i], {"ph": "X", "cat": _CATEGORY[what], "name": name, **place, "dur": (end[i] - start[i]) / 1e3,
                         "args": args}
        for side, flow in ends[i]:
            event = {"ph": side, "cat": "dependency", "name": "dependency", "id": flow + 1, **place,
                     "args": {"record": i}}
            if side == "f":
                late = {} if arrived is None else {"arrived": arrived[flow] / 1e3}
                yield start[i], event | {"bp": "e", "args": {"record": i, **late}}
            else:
                yield max(start[i], end[i] - 1), event


def load(path: str | Path, make: type[Timeline]) -> Timeline:
    """Makes a timeline of what `save` wrote, exact to the nanosecond. Raises ValueError for any other file, OSError for
    one that cannot be read."""
    trace = content(path, _OURS)
    try:
        return _timeline(trace, make)
    except (KeyError, IndexError, TypeError, AttributeError, ArithmeticError):
        why = "a part is missing or has another form"
    except ValueError as error:
        why = " ".join(str(error).split())[:200]
    raise ValueError(f"{path} is not {_OURS}: {why}")


def content(path: str | Path, what: str, **how: Any) -> Any:
    """The JSON in a file, also packed by gzip. `what` it should be; `how`: as for `json.loads`. An array may end with a
    comma, or without its bracket, as the Trace Event format allows, and names may have control characters, as PyTorch
    writes them. Raises ValueError for any other file, OSError for one that cannot be read."""
    raw, how = read(path, "trace"), {"strict": False, **how}
    try:
        raw = _unpacked(raw) if raw[:2] == b"\x1f\x8b" else raw
        text = raw.decode(json.detect_encoding(raw), "replace").strip()
        try:
            return json.loads(text, **how)
        except json.JSONDecodeError:
            if not text.startswith("["):
                raise
            return json.loads(text.removesuffix("]").rstrip().removesuffix(",") + "]", **how)
    except RecursionError:
        why = "nested too deeply"
    except ValueError as error:
        why = str(error).partition(";")[0]
    raise ValueError(f"{path} is not {what}: {why}")


def _unpacked(raw: bytes) -> bytes:
    """The content of a gzip file, of at most the size that an unpacked trace may have. Raises ValueError."""
    try:
        content = gzip.GzipFile(fileobj=io.BytesIO(raw)).read(LARGEST["trace"] + 1)
    except (EOFError, gzip.BadGzipFile, zlib.error):
        raise ValueError("its packed content is damaged") from None
    if len(content) > LARGEST["trace"]:
        raise ValueError(f"its content is larger than {LARGEST['trace'] >> 20} MiB")
    return content


def _timeline(trace: Any, make: type[Timeline]) -> Timeline:
    head, found = trace["minidl"], trace["traceEvents"]
    slices = {e["args"]["record"]: e for e in found if e["ph"] == "X" and "record" in e["args"]}
    launches = {e["args"]["correlation"] - 1: e for e in found if e.get("cat") == "cuda_runtime"}
    flows = {side: {e["id"]: e for e in found if e["ph"] == side} for side in "sf"}
    rows = [slices[i] for i in range(len(slices))]
    scale = 1e3 * UNITS.get(head["unit"], _OWN_UNIT)

    def times(values: Iterable[float]) -> Floats:
        """Microseconds to whole nanoseconds, as `save` rounded them, so that sums are exact."""
        return np.rint(np.fromiter(values, np.float64) * 1e3)

    start = times(e["ts"] for e in rows)
    both = [(flows["s"][i], flows["f"][i]) for i in sorted(flows["s"])]
    late = [f["args"]["arrived"] for _, f in both if "arrived" in f["args"]]
    what = {name: number for number, name in _CATEGORY.items()}
    timeline = make(
        lanes=tuple(Lane(rank, name) for rank, name in head["lanes"]),
        what=np.array([what[e["cat"]] for e in rows], np.int8),
        key=np.array([parse_task(e["args"]["task"]) for e in rows], np.int64),
        lane=np.array([head["lane_of_thread"][e["tid"] - 1] for e in rows], np.int32),
        issued=times(launches.get(i, e)["ts"] for i, e in enumerate(rows)) / scale,
        start=start / scale, end=(start + times(e["dur"] for e in rows)) / scale,
        bytes=np.array([e["args"]["bytes"] for e in rows], np.int64),
        edges=np.array([[s["args"]["record"], f["args"]["record"]] for s, f in both], np.int64).reshape(-1, 2),
        arrived=times(late) / scale if late else None, labels=tuple(head["labels"]),
        peak_bytes=head["peak_bytes"], predicted=head["predicted"], unit=head["unit"], meta=head["meta"],
        work=Work.from_json(head["work"]) if head.get("work") else None)
    _check(timeline)
    return timeline


def _check(timeline: Timeline) -> None:
    """Raises ValueError for columns that no timeline can have."""
    t, records = timeline, len(timeline)
    fine = {
        "a lane": all(type(x.rank) is int and 0 <= x.rank < MOST_LANES and isinstance(x.name, str) for x in t.lanes),
        "the lane of a record": records == 0 or bool(t.lane.min() >= 0 and t.lane.max() < len(t.lanes)),
        "an edge": bool(((t.edges >= 0) & (t.edges < records)).all()),
        "a time": all(bool(np.isfinite(x).all()) for x in (t.issued, t.start, t.end, t.arrived) if x is not None),
        "an end before its start": bool((t.end >= t.start).all()),
        "the arrivals": t.arrived is None or len(t.arrived) == len(t.edges),
        "a label": all(isinstance(label, str) for label in t.labels),
        "a note": isinstance(t.meta, dict) and all(isinstance(line, str) for line in t.meta.get("notes", ())),
        "the peak": t.peak_bytes is None or type(t.peak_bytes) is int,
        "the unit": isinstance(t.unit, str) and isinstance(t.predicted, bool),
    }
    for culprit, good in fine.items():
        if not good:
            raise ValueError(f"{culprit} is not valid")
